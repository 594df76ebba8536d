"""Compressing while nobody uses the mount: a thread of low priority that stops when a client comes.

It packs; what it packed is written by the thread that writes behind saves: whoever holds
the write lock must not be kept from the processor by programs that want all of it.
"""

import logging
import os
import threading
import time
from collections.abc import Callable

import trio

from cachefs.sizes import format_size
from cachefs.store import Store, StoreFull
from cachefs.store.recompress import Progress, Recompressor

log = logging.getLogger("cachefs.recompress")

QUIET = 30.0
"""Seconds without a client's read or write after which the store counts as idle. What a
chat saves and restores between two turns stays raw, which is read three times as fast."""
QUIET_WHEN_SHORT = 0.2
"""The same where eviction would begin soon: what is saved now need not be evicted."""
_LOOK = 0.2
_REST = 5.0
_AFTER_FAILURE = 60.0
_NICE = 10
"""Not the lowest: it holds the interpreter now and then, and requests wait until it gives it back."""


class Idle:
    """Runs a recompressor while no client reads or writes."""

    def __init__(self, store: Store, recompressor: Recompressor) -> None:
        self._store = store
        self._recompressor = recompressor
        self._last = time.monotonic()
        self._saved = 0
        self._stop = threading.Event()

    def client(self) -> None:
        """A client reads or writes."""
        self._last = time.monotonic()

    async def run(self) -> None:
        """Until cancelled."""
        thread = threading.Thread(target=self._loop, name="recompress", daemon=True)
        thread.start()
        try:
            await trio.sleep_forever()
        finally:
            self._stop.set()
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(thread.join)

    def _loop(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        pause = _LOOK
        while not self._stop.wait(pause):
            pause = _LOOK
            if not self._is_quiet():
                continue
            try:
                progress = self._recompressor.step(self._disturbed())
            except StoreFull as error:
                log.info("no room to compress what is stored, will try again: %s", error)
                pause = _AFTER_FAILURE
            except Exception:  # the thread must not end
                log.exception("compressing failed, will try again")
                pause = _AFTER_FAILURE
            else:
                pause = self._next(progress)

    def _next(self, progress: Progress) -> float:
        """Seconds until the next step."""
        self._saved += progress.saved
        if not progress.ended:
            return 0.0
        if self._saved:
            log.info("compressed what is stored: %s saved", format_size(self._saved))
            self._saved = 0
        return _REST

    def _is_quiet(self) -> bool:
        quiet = time.monotonic() - self._last
        if quiet > QUIET:
            return True
        # A writer may be waiting for what it wrote to be placed, or for room.
        short = self._store.room() < 2 * self._store.low_water
        return short and quiet > QUIET_WHEN_SHORT and not self._store.queued

    def _disturbed(self) -> Callable[[], bool]:
        """What says whether a client came since now."""
        last = self._last
        return lambda: self._last != last or self._stop.is_set()
