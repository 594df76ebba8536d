"""The daemon while it serves: from the first answer to the last commit, inside trio."""

import faulthandler
import logging
import os
import shutil
import signal
import subprocess
import types
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import pyfuse3
import trio

from cachefs import log as logs
from cachefs.config import MountConfig
from cachefs.mount import mountpoint as places
from cachefs.mount.notify import Notifier
from cachefs.mount.processes import users_of
from cachefs.sizes import format_size

log = logging.getLogger("cachefs.daemon")

# How long clients' dirty pages may take to arrive when a signal ends the mount.
_FLUSH_WITHIN = 120.0


class Running(Protocol):
    """What is served: background tasks run, and all is written, inside ``running()``."""

    def running(self) -> AbstractAsyncContextManager[object]: ...


class Life:
    """Serves one mount until it is taken away or a signal comes."""

    def __init__(
        self,
        config: MountConfig,
        max_bytes: int,
        ready: Callable[[], None],
        stopping: tuple[signal.Signals, ...],
    ) -> None:
        self._config = config
        self._max_bytes = max_bytes
        self._ready = ready
        self._signals = stopping
        self._notifier = Notifier()
        self._stopping = False
        mount = places.mounted_at(config.mountpoint)
        self._device = mount.device if mount else None

    def mounted(self) -> bool:
        """Whether it is our mount that lies at the mountpoint, not none or somebody else's."""
        mount = places.mounted_at(self._config.mountpoint)
        return mount is not None and mount.device == self._device

    async def run(self, operations: Running) -> None:
        """Serve. An exception means that the filesystem itself failed."""
        async with trio.open_nursery() as helpers:
            await helpers.start(self._listen)
            async with operations.running():
                helpers.start_soon(self._announce)
                await pyfuse3.main()
            self._notifier.stopping()
            helpers.cancel_scope.cancel()

    async def _announce(self) -> None:
        """Say that the mount is usable, once it has answered."""
        config = self._config
        # In a thread: the answer comes from this process. It is a thread that may be
        # left behind, should the mount be taken away at this very moment.
        try:
            await trio.to_thread.run_sync(os.statvfs, config.mountpoint, abandon_on_cancel=True)
        except OSError as error:
            log.warning("%s went away before it was usable: %s", config.mountpoint, error)
            return
        summary = f"{config.store} at {config.mountpoint}, at most {format_size(self._max_bytes)}"
        log.info("mounted %s, pid %d", summary, os.getpid())
        try:
            self._ready()
        except OSError:
            log.warning("whoever asked for the mount has gone; unmounting")
            await self._stop()
            return
        self._notifier.ready(summary)

    async def _listen(self, *, task_status: trio.TaskStatus[None]) -> None:
        with trio.open_signal_receiver(*self._signals, signal.SIGUSR1) as signals:
            # The threads' stacks are written by C code, even when Python hangs; then
            # trio's handler runs, and the tasks follow if the event loop is alive.
            faulthandler.register(signal.SIGUSR1, file=logs.stream(), all_threads=True, chain=True)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)
            task_status.started()
            try:
                await self._obey(signals)
            finally:
                faulthandler.unregister(signal.SIGUSR1)

    async def _obey(self, signals: AsyncIterator[int]) -> None:
        async with trio.open_nursery() as nursery:
            async for number in signals:
                if number == signal.SIGUSR1:
                    for line in task_dump():
                        log.info("%s", line)
                elif self._stopping:
                    log.info("%s again: not waiting for clients any longer", signal.Signals(number).name)
                    pyfuse3.terminate()
                else:
                    log.info("%s: unmounting", signal.Signals(number).name)
                    nursery.start_soon(self._stop)

    async def _stop(self) -> None:
        """Unmount while still serving, so that the kernel can hand over its dirty pages.

        When clients have files open there, take in what they wrote so far and
        leave: their later calls fail.
        """
        self._stopping = True
        self._notifier.stopping()
        if self.mounted():
            if await self._unmount():
                return  # the kernel ends the main loop
            users = ", ".join(map(str, await trio.to_thread.run_sync(users_of, self._config.mountpoint)))
            log.warning("%s has open files (%s); leaving all the same", self._config.mountpoint, users or "?")
            await self._command("sync", "-f", str(self._config.mountpoint))
        pyfuse3.terminate()

    async def _unmount(self) -> bool:
        path = str(self._config.mountpoint)
        if shutil.which("fusermount3"):
            return await self._command("fusermount3", "-u", path)
        return await self._command("umount", "-i", path)

    async def _command(self, *command: str) -> bool:
        # A program and not a call of our own: should this process be killed while it
        # waits for itself in the kernel, it could never end.
        try:
            with trio.fail_after(_FLUSH_WITHIN):
                done = await trio.run_process(
                    command, check=False, stdin=subprocess.DEVNULL, capture_stdout=True, capture_stderr=True
                )
        except (OSError, trio.TooSlowError) as error:
            log.warning("%s: %s", " ".join(command), error or "no answer")
            return False
        if done.returncode != 0:
            log.info("%s", done.stderr.decode(errors="replace").strip())
        return done.returncode == 0


def task_dump() -> Iterator[str]:
    """All trio tasks, children below their parents, with where each waits."""
    root = trio.lowlevel.current_root_task()
    waiting = [(root, 0)] if root else []
    yield "trio tasks:"
    while waiting:
        task, depth = waiting.pop()
        indent = "  " * depth
        yield f"{indent}- {task.name}"
        for frame, line in _frames(task):
            code = frame.f_code
            yield f"{indent}    {code.co_filename}:{line} {code.co_qualname}"
        waiting += [(child, depth + 1) for nursery in task.child_nurseries for child in nursery.child_tasks]


def _frames(task: trio.lowlevel.Task) -> list[tuple[types.FrameType, int]]:
    try:
        return list(task.iter_await_frames())
    except Exception:  # compiled coroutines (pyfuse3's) cannot always be looked into
        return []
