"""Open files as the kernel has them."""

import trio

from cachefs.mount.content import Content
from cachefs.mount.readahead import Announcer, ReadAhead
from cachefs.states.pieces import Buffer
from cachefs.store import Now

REQUEST = 1 << 20
"""Bytes of the kernel's largest request."""


class Handle:
    """An open file: its content, whether it writes, and how it is read."""

    __slots__ = ("_ahead", "_announcer", "content", "ino", "opener", "writes")

    def __init__(self, nursery: trio.Nursery, ino: int, content: Content, writes: bool, opener: int) -> None:
        self.ino = ino
        self.content = content
        self.writes = writes
        self.opener = opener
        """Process id of who opened it to write, 0 if unknown."""
        self._ahead = ReadAhead(nursery, content.read)
        self._announcer = Announcer(nursery, content.will_need)

    async def read(self, offset: int, size: int, answer: memoryview) -> Buffer:
        """At most ``size`` bytes from ``offset``.

        What is in memory and needs no work is copied into ``answer`` at once. That must
        be sent before the event loop takes up anything else.
        """
        content = self.content
        if content.is_dirty or size > len(answer):
            self._ahead.reset()
            return await content.read(offset, size)
        now, n = content.read_now(offset, answer[:size])
        self._announcer.read(offset, size, cold=now is Now.COLD)
        if now is Now.DONE:
            return answer[:n]
        if now is Now.COLD:
            return await content.read(offset, size)
        return await self._ahead.read(offset, size, content.size, content.version)
