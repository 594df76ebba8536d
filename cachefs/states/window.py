"""The bytes that were fed and not yet given out, without copying them more than needed."""

from collections import deque

from .pieces import Buffer

# A view keeps the whole fed buffer alive, which a header's few bytes are not worth.
_COPY_BELOW = 4096


class Window:
    """A queue of fed buffers, read from the front; ``have`` is its length in bytes.

    ``add`` only queues. ``take`` gives a view where the bytes lie in one fed buffer and joins them once where
    they do not.
    """

    __slots__ = ("_at", "_head", "_rest", "have")

    def __init__(self) -> None:
        self._head = b""
        self._at = 0
        self._rest: deque[bytes] = deque()
        self.have = 0

    def add(self, data: bytes) -> None:
        self._rest.append(data)
        self.have += len(data)

    def peek(self, n: int, start: int = 0) -> bytes:
        """A copy of at most ``n`` bytes from ``start`` on; nothing is consumed."""
        begin = self._at + start
        end = begin + n
        head = self._head
        if end <= len(head):
            return head[begin:end]
        parts = [head[begin:]]
        skip = max(0, begin - len(head))
        left = n - len(parts[0])
        for part in self._rest:
            if skip >= len(part):
                skip -= len(part)
                continue
            parts.append(part[skip : skip + left])
            left -= len(parts[-1])
            skip = 0
            if not left:
                break
        return b"".join(parts)

    def take(self, n: int) -> Buffer:
        """Consume exactly ``n`` bytes (``n <= have``)."""
        self.have -= n
        head, at = self._head, self._at
        if at == len(head) and self._rest:
            head, at = self._head, self._at = self._rest.popleft(), 0
        end = at + n
        if end <= len(head):
            self._at = end
            if n < _COPY_BELOW:
                return head[at:end]
            return memoryview(head)[at:end] if n != len(head) else head
        parts: list[Buffer] = [memoryview(head)[at:]]
        left = end - len(head)
        self._head, self._at = b"", 0
        while left:
            part = self._rest.popleft()
            if len(part) > left:
                parts.append(memoryview(part)[:left])
                self._head, self._at = part, left
                break
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def whole(self) -> tuple[bytes, int]:
        """Everything as one bytes object and the index in it where the window starts."""
        if self._rest:
            if self._at == len(self._head) and len(self._rest) == 1:
                self._head = self._rest.popleft()
            else:
                self._head = b"".join([memoryview(self._head)[self._at :], *self._rest])
                self._rest.clear()
            self._at = 0
        return self._head, self._at

    def copy(self) -> bytes:
        """All bytes of the window, in order."""
        return b"".join([memoryview(self._head)[self._at :], *self._rest])
