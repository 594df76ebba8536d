"""The handlers over open files, called as the kernel calls them but without one."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyfuse3
import pytest
import trio

from cachefs.config import MountConfig
from cachefs.mount.mountpoint import COMMIT
from cachefs.mount.operations import CacheFS
from cachefs.store import Store, StoreFull
from cachefs.store.tree import ROOT

from ..states import build
from ..store.filling import noise, temporary_store
from ..store.recount import assert_exact, assert_nothing_leaks

CONTEXT: Any = SimpleNamespace(uid=0, gid=0, pid=1, umask=0)
N = 3000
STATE = build.ggsq(range(N), build.kv(range(N), width=1024))
READ = 1 << 20


class Client:
    """What a program does, as the handlers see it."""

    def __init__(self, store: Store, nursery: trio.Nursery) -> None:
        self.store = store
        self.fs = CacheFS(store, MountConfig(Path("/store"), Path("/mountpoint")))
        self.fs._nursery = nursery

    async def open(self, name: bytes, flags: int) -> int:
        dirent = self.store.tree.lookup(ROOT, name)
        if dirent is None:
            info, _ = await self.fs.create(ROOT, name, 0o600, flags, CONTEXT)
        else:
            info = await self.fs.open(dirent.ino, flags, CONTEXT)
        return int(info.fh)

    async def write(self, fh: int, data: bytes, at: int = 0) -> None:
        for start in range(0, len(data), READ):
            await self.fs.write(fh, at + start, data[start : start + READ])

    async def close(self, fh: int) -> None:
        try:
            await self.fs.flush(fh)
        finally:
            await self.fs.release(fh)

    async def save(self, name: bytes, data: bytes, flags: int = os.O_WRONLY | os.O_TRUNC) -> None:
        fh = await self.open(name, flags)
        await self.write(fh, data)
        await self.close(fh)


@asynccontextmanager
async def client() -> AsyncIterator[Client]:
    """At the end nothing is open and nothing is accounted for."""
    with temporary_store() as store:
        async with trio.open_nursery() as nursery:
            made = Client(store, nursery)
            yield made
        assert not made.fs._contents
        assert not made.fs._handles
        await made.fs._finish()
        assert_nothing_leaks(store)
        assert_exact(store)


async def test_who_asks_for_figures_takes_no_error_from_who_syncs() -> None:
    """`cachefs stats` has the daemon commit; that a file was lost is told to the client that syncs."""
    async with client() as one:
        await one.save(b"f", noise(300_000))
        one.fs._upkeep.note_untold(errno.ENOSPC)
        await one.fs.setxattr(ROOT, COMMIT.encode(), b"", CONTEXT)
        assert not one.store.index.active
        assert one.store.tree.xattrs(ROOT) == []
        with pytest.raises(pyfuse3.FUSEError) as told:
            await one.fs.fsyncdir(0, False)
        assert told.value.errno == errno.ENOSPC
        await one.fs.fsyncdir(0, False)


async def test_a_reader_sees_what_another_handle_wrote() -> None:
    """Not what was read ahead before that."""
    async with client() as one:
        await one.save(b"f", STATE)
        fh = await one.open(b"f", os.O_RDONLY)
        for at in range(0, 3 * READ, READ):
            assert bytes(await one.fs.read(fh, at, READ)) == STATE[at : at + READ]
        await trio.testing.wait_all_tasks_blocked()
        other = build.ggsq(range(N), build.kv(range(N), width=1024, salt=1))
        await one.save(b"f", other)
        for at in range(3 * READ, 5 * READ, READ):
            assert bytes(await one.fs.read(fh, at, READ)) == other[at : at + READ]
        await one.close(fh)


async def test_a_close_that_fails_lets_the_file_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would count as open, and stay, for ever."""
    async with client() as one:
        await one.save(b"f", noise(100_000))
        fh = await one.open(b"f", os.O_WRONLY)
        await one.write(fh, b"x" * 1000, 500)

        def refuse(*arguments: object) -> None:
            raise OSError(errno.EIO, "refused")

        with monkeypatch.context() as patch:
            patch.setattr(one.store.tree, "set_content", refuse)
            for call in (one.fs.flush, one.fs.release):
                with pytest.raises(pyfuse3.FUSEError) as caught:
                    await call(fh)
                assert caught.value.errno == errno.EIO
        await one.save(b"f", noise(5000))


async def test_an_unlinked_file_stays_while_it_is_open() -> None:
    async with client() as one:
        fh = await one.open(b"f", os.O_RDWR)
        await one.write(fh, STATE)
        await one.fs.unlink(ROOT, b"f", CONTEXT)
        await one.fs.fsync(fh, False)
        one.store.writer.purge(1 << 40)
        assert bytes(await one.fs.read(fh, 12345, 54321)) == STATE[12345 : 12345 + 54321]
        await one.write(fh, b"more", len(STATE))
        await one.close(fh)
        await one.fs.forget([(2, 1)])
        assert one.store.tree.orphans() == []


async def test_a_rename_keeps_what_was_written() -> None:
    """The new name never stands for less than the old one did."""
    async with client() as one:
        await one.save(b"f", b"old")
        fh = await one.open(b"f.tmp", os.O_WRONLY)
        await one.write(fh, STATE)
        await one.fs.rename(ROOT, b"f.tmp", ROOT, b"f", 0, CONTEXT)
        await one.fs.fsyncdir(0, False)
        ino = one.store.tree.require(ROOT, b"f").ino
        recipe = one.store.tree.recipe(ino)
        assert bytes(one.store.read(recipe, 0, recipe.size)) == STATE
        await one.close(fh)


async def test_parallel_writers_of_one_file() -> None:
    """Writes that come at once, in any order, as those of a mapping do, all arrive."""
    async with client() as one:
        fh = await one.open(b"f", os.O_RDWR)
        data = noise(4_000_000)
        order = sorted(range(0, len(data), 131_072), key=lambda at: at * 7919 % 31)
        async with trio.open_nursery() as writers:
            for at in order:
                writers.start_soon(one.fs.write, fh, at, data[at : at + 131_072])
        assert bytes(await one.fs.read(fh, 0, len(data) + 5)) == data
        await one.close(fh)


async def test_flushes_of_other_handles_between_writes() -> None:
    """A child that closes its copy of the descriptor while the parent writes."""
    async with client() as one:
        fh = await one.open(b"f", os.O_WRONLY)
        async with trio.open_nursery() as both:
            both.start_soon(one.write, fh, STATE)
            for _ in range(5):
                await one.fs.flush(fh)
                await trio.lowlevel.checkpoint()
        await one.close(fh)
        fh = await one.open(b"f", os.O_RDONLY)
        for at in range(0, len(STATE), READ):
            assert bytes(await one.fs.read(fh, at, READ)) == STATE[at : at + READ]
        await one.close(fh)


async def test_what_was_lost_behind_a_close_takes_no_other_files_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The close had been answered; the next sync and the rename say what happened to it."""
    old, new = noise(3 << 20), noise(1 << 20, 1)
    async with client() as c:
        await c.save(b"final", old)
        fh = await c.open(b"final.tmp", os.O_WRONLY | os.O_CREAT)
        await c.write(fh, new)
        with monkeypatch.context() as patch:
            patch.setattr(c.store, "write_behind", full)
            patch.setattr(pyfuse3, "invalidate_inode", lambda ino: None)
            await c.fs.flush(fh)
            await c.fs.release(fh)
        with pytest.raises(pyfuse3.FUSEError) as caught:
            await c.fs.rename(ROOT, b"final.tmp", ROOT, b"final", 0, CONTEXT)
        assert caught.value.errno == errno.ENOSPC
        with pytest.raises(pyfuse3.FUSEError):
            await c.fs.fsyncdir(0, False)
        await c.fs.fsyncdir(0, False)
        assert in_tree(c.store, b"final") == old
        await c.save(b"final.tmp", new, os.O_WRONLY | os.O_TRUNC)
        await c.fs.rename(ROOT, b"final.tmp", ROOT, b"final", 0, CONTEXT)
        assert in_tree(c.store, b"final") == new


def full() -> None:
    raise StoreFull("another program filled the disk")


def in_tree(store: Store, name: bytes) -> bytes:
    recipe = store.tree.recipe(store.tree.require(ROOT, name).ino)
    return bytes(store.read(recipe, 0, recipe.size))


async def test_who_was_about_to_open_what_is_replaced() -> None:
    """The inode was looked up before the rename, and is opened after it: it is that version still."""
    async with client() as one:
        for version in range(3):
            await one.save(b"new", noise(100_000, version))
            await one.fs.rename(ROOT, b"new", ROOT, b"name", 0, CONTEXT)
            if not version:
                known = (await one.fs.lookup(ROOT, b"name", CONTEXT)).st_ino
        fh = int((await one.fs.open(known, os.O_RDONLY, CONTEXT)).fh)
        assert bytes(await one.fs.read(fh, 0, READ)) == noise(100_000, 0)
        await one.close(fh)
        assert known in one.store.tree.orphans()
        await one.fs.forget([(known, 2)])
        assert known not in one.store.tree.orphans()
