"""A store with what a mount runs beside it, but no kernel."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
import trio

from cachefs.mount.content import Content
from cachefs.mount.upkeep import Upkeep
from cachefs.store import Store, StoreFull
from cachefs.store.evict import Member
from cachefs.store.tree import ROOT

from ..store.filling import SMALL, make, temporary_store
from ..store.recount import assert_exact, assert_nothing_leaks


class Desk:
    """Opens files of a store as the handlers do. ``gone`` are the names that were evicted."""

    def __init__(self, store: Store, nursery: trio.Nursery) -> None:
        self.store = store
        self.nursery = nursery
        self.gone: list[bytes] = []
        self.upkeep = Upkeep(store, self._evicted)
        self.contents: dict[int, Content] = {}
        store.busy = self.contents.__contains__

    def _evicted(self, member: Member) -> None:
        self.gone.append(member.name)

    def open(self, name: bytes) -> Content:
        """A file's content, made if there is none of that name."""
        dirent = self.store.tree.lookup(ROOT, name)
        ino = make(self.store, name) if dirent is None else dirent.ino
        content = Content(self.store, self.upkeep, self.nursery, ino)
        self.contents[ino] = content
        return content

    async def close(self, content: Content, *, keep_torn: bool = False, killed: bool = False) -> bool:
        """Close the last handle: flush, release, drop. Whether the old version was put back."""
        try:
            await content.flush(killed=killed)
        finally:
            restored = await self.abandon(content, keep_torn=keep_torn, killed=killed)
        return restored

    async def abandon(self, content: Content, *, keep_torn: bool = False, killed: bool = True) -> bool:
        """What happens to a handle whose process was killed; here without the kernel's flush."""
        (ino,) = [ino for ino, each in self.contents.items() if each is content]
        try:
            return await content.release(keep_torn=keep_torn, killed=killed)
        finally:
            await content.drop()
            del self.contents[ino]

    async def save(self, name: bytes, data: bytes, step: int = 1 << 20) -> None:
        """Write a file from its beginning, as a client does that truncates first."""
        content = self.open(name)
        if content.size:
            await content.truncate(0)
        for at in range(0, len(data), step):
            await content.write(at, data[at : at + step])
        await self.close(content)

    async def load(self, name: bytes) -> bytes:
        content = self.open(name)
        try:
            return bytes(await content.read(0, content.size + 1))
        finally:
            await self.abandon(content)

    def in_tree(self, name: bytes) -> bytes:
        """The bytes of the version that the tree has."""
        recipe = self.store.tree.recipe(self.store.tree.require(ROOT, name).ino)
        return bytes(self.store.read(recipe, 0, recipe.size))

    @contextmanager
    def full_disk(self) -> Iterator[None]:
        """The disk fills up while blocks are written behind."""

        def refuse() -> None:
            raise StoreFull("no space")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.store, "write_behind", refuse)
            yield

    @contextmanager
    def no_room(self) -> Iterator[None]:
        """No room can be reserved for new bytes, whatever is evicted."""

        async def refuse(size: int) -> None:
            raise OSError(errno.ENOSPC, "no space left")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.upkeep, "make_room", refuse)
            patch.setattr(self.store, "reserve", lambda size: False)
            yield


@asynccontextmanager
async def desk(max_bytes: int = SMALL) -> AsyncIterator[Desk]:
    """At the end everything is committed, nothing is held, and all counts are exact."""
    with temporary_store(max_bytes) as store:
        async with trio.open_nursery() as nursery:
            made = Desk(store, nursery)
            yield made
            assert not made.contents
        await made.upkeep.commit()
        assert_nothing_leaks(store)
        assert_exact(store)
