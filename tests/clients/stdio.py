"""glibc's FILE and libstdc++'s fstream, down to the calls that reach the kernel.

llama.cpp reads and writes its states through these two libraries, so what a filesystem sees is their
buffering: a few small writes for the header, then one large write a tensor, placed so that file offsets stay
multiples of the buffer. Taken from strace of a C++ program that makes the same library calls (glibc 2.36,
libstdc++ 12).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import TracebackType
from typing import Self

STDIO_BUFFER_MAX = 8192
FILEBUF = 8191
"""libstdc++ allocates BUFSIZ and keeps one byte back."""
FILEBUF_DIRECT = 1024
"""From this many bytes on, libstdc++ passes the caller's memory to writev instead of copying it."""


def buffer_size(fd: int) -> int:
    """stdio takes the file's preferred block size for its buffer, but never more than BUFSIZ."""
    return min(os.fstat(fd).st_blksize, STDIO_BUFFER_MAX)


def write_all(fd: int, data: memoryview | bytes) -> None:
    """Repeat write() until everything went out, as _IO_new_file_write does."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class FileWriter:
    """A FILE opened "wb" or "ab" and only written to.

    `calls` holds (offset, length) of every write, for tests of the shape itself.
    """

    def __init__(self, path: Path, mode: str = "wb") -> None:
        how = {"wb": os.O_TRUNC, "ab": os.O_APPEND}[mode]
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | how, 0o666)
        self._block = buffer_size(self.fd)
        self._offset = os.lseek(self.fd, 0, os.SEEK_END if mode == "ab" else os.SEEK_SET)
        self._buffer = bytearray()
        self.calls: list[tuple[int, int]] = []

    def fwrite(self, data: bytes | memoryview) -> None:
        """Fill the buffer; once full, send it, then whole blocks straight from `data`; keep the rest."""
        view = memoryview(data).cast("B")
        room = self._block - len(self._buffer)
        self._buffer += view[:room]
        view = view[room:]
        if not view:
            return
        self.fflush()
        whole = len(view) - len(view) % self._block
        if whole:
            self._send(view[:whole])
        self._buffer += view[whole:]

    def ftell(self) -> int:
        return self._offset + len(self._buffer)

    def fflush(self) -> None:
        if self._buffer:
            # The buffer is emptied even when the write fails: stdio does not try the same bytes twice.
            data, self._buffer = bytes(self._buffer), bytearray()
            self._send(memoryview(data))

    def fclose(self) -> None:
        """Raise what the last write or close() reports; llama.cpp uses `fclose_ignored`."""
        try:
            self.fflush()
        finally:
            fd, self.fd = self.fd, -1
            os.close(fd)

    def fclose_ignored(self) -> None:
        """llama.cpp's llama_file destructor: the result of fclose() is dropped."""
        with contextlib.suppress(OSError):
            self.fclose()

    def _send(self, view: memoryview) -> None:
        write_all(self.fd, view)
        self.calls.append((self._offset, len(view)))
        self._offset += len(view)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.fd >= 0:
            self.fclose_ignored()


class FileReader:
    """A FILE opened "rb" by llama.cpp's llama_file, which measures the file by seeking to its end first."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDONLY)
        self._block = buffer_size(self.fd)
        self._buffer = memoryview(b"")
        self._offset = 0
        self.size = os.fstat(self.fd).st_size
        # fseek(SEEK_END) goes to the start of the last block and reads it; rewinding drops it.
        self.fseek(self.size)
        self.fseek(0)

    def fseek(self, offset: int) -> None:
        """Seek to the block that holds `offset` and read up to it, so that the buffer stays block aligned."""
        start = offset - offset % self._block
        os.lseek(self.fd, start, os.SEEK_SET)
        self._offset = start
        self._buffer = memoryview(b"")
        if offset > start:
            self._fill(offset - start if offset == self.size else self._block)
            self._buffer = self._buffer[offset - start :]

    def ftell(self) -> int:
        return self._offset - len(self._buffer)

    def fread(self, size: int) -> bytes:
        """What is buffered, whole blocks into place, then one block through the buffer; EOFError if short."""
        out = bytearray()
        while len(out) < size:
            want = size - len(out)
            if self._buffer:
                out += self._buffer[:want]
                self._buffer = self._buffer[want:]
            elif want >= self._block:
                data = os.read(self.fd, want - want % self._block)
                if not data:
                    raise EOFError(f"{want} bytes short")
                self._offset += len(data)
                out += data
            elif not self._fill(self._block):
                raise EOFError(f"{want} bytes short")
        return bytes(out)

    def _fill(self, size: int) -> int:
        data = os.read(self.fd, size)
        self._offset += len(data)
        self._buffer = memoryview(data)
        return len(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)


class Ofstream:
    """std::ofstream in binary mode: fields gather, a large block goes out with them in one writev."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._buffer = b""
        self.calls: list[int] = []

    def write(self, data: bytes) -> None:
        if len(data) < min(FILEBUF_DIRECT, FILEBUF - len(self._buffer)):
            self._buffer += data
            return
        expected = len(self._buffer) + len(data)
        sent = os.writev(self.fd, [self._buffer, data])
        self.calls.append(sent)
        if sent < expected:
            write_all(self.fd, memoryview(self._buffer + data)[sent:])
        self._buffer = b""

    def close(self) -> None:
        try:
            if self._buffer:
                write_all(self.fd, self._buffer)
                self.calls.append(len(self._buffer))
                self._buffer = b""
        finally:
            os.close(self.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def ofstream_write(path: Path, *parts: bytes) -> None:
    """Open, write each part, close."""
    with Ofstream(path) as out:
        for part in parts:
            out.write(part)


def ifstream_ate(path: Path) -> bytes:
    """std::ifstream opened at its end: the size by tellg, then the whole file in one read."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.lseek(fd, 0, os.SEEK_END)
        size = os.lseek(fd, 0, os.SEEK_CUR)
        os.lseek(fd, 0, os.SEEK_SET)
        out = bytearray()
        while len(out) < size:
            data = os.read(fd, size - len(out))
            if not data:
                break
            out += data
        return bytes(out)
    finally:
        os.close(fd)
