"""antirez/ds4's kvstore: files whose 48-byte header is rewritten at every hit, and that go once consumed."""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from .cxxfs import regular_files, remove
from .payload import noise, u32
from .stdio import FileReader, FileWriter, buffer_size, write_all

HEADER = struct.Struct("<3s5B2I2I3Q")
MAGIC = b"KVC"
PAYLOAD_MAGIC = 0x34565344
CHUNK = 8 << 20


@dataclass
class Header:
    tokens: int
    payload: int
    hits: int = 0
    created: int = 1_700_000_000
    last_used: int = 1_700_000_000
    extension: int = 0

    def pack(self) -> bytes:
        head = (MAGIC, 1, 8, 0, self.extension, 0, self.tokens, self.hits, 8192, 0)
        return HEADER.pack(*head, self.created, self.last_used, self.payload)

    @classmethod
    def read(cls, data: bytes) -> Header:
        magic, version, _, _, ext, _, tokens, hits, _, _, created, used, payload = HEADER.unpack(data)
        assert (magic, version) == (MAGIC, 1)
        return cls(tokens, payload, hits, created, used, ext)


@dataclass
class KvStore:
    directory: Path
    limit: int = 1 << 40
    cold: int = 1 << 40
    """Files above this many bytes are unlinked by the hit that loads them."""

    def __post_init__(self) -> None:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, text: str) -> Path:
        return self.directory / f"{hashlib.sha1(text.encode()).hexdigest()}.kv"

    @staticmethod
    def payload(text: str, tokens: int) -> list[bytes]:
        """Counts, tokens, logits, then rows, where a longer prefix begins with the same ones."""
        rows = [noise((text.split("|")[0], layer), tokens * 512) for layer in range(6)]
        fields = u32(PAYLOAD_MAGIC, 1, tokens, *[0] * 10)
        return [fields, noise("ids", 4 * tokens), noise("logits", 4 * 4096), *rows]

    def store(self, text: str, tokens: int) -> Path:
        """Write to `.tmp.<pid>` with every result checked, rename, then evict by score."""
        path = self.path(text)
        temporary = path.with_name(f"{path.name}.tmp.{os.getpid()}")
        payload = self.payload(text, tokens)
        with FileWriter(temporary) as out:
            out.fwrite(Header(tokens, sum(map(len, payload))).pack())
            out.fwrite(u32(len(text.encode())))
            out.fwrite(text.encode())
            for field in payload:
                for start in range(0, len(field), CHUNK):
                    out.fwrite(field[start : start + CHUNK])
            out.fflush()
            out.fclose()
        os.rename(temporary, path)
        self.evict(keep=path)
        return path

    def load(self, text: str, now: int) -> bytes:
        """A hit: the whole file, then its header again with one hit more; large files go instead."""
        path = self.path(text)
        with FileReader(path) as file:
            header = Header.read(file.fread(HEADER.size))
            (length,) = struct.unpack("<I", file.fread(4))
            assert file.fread(length).decode() == text
            payload = file.fread(header.payload)
        if header.payload > self.cold:
            os.unlink(path)
        else:
            header.hits, header.last_used = header.hits + 1, now
            self.rewrite_header(path, header)
        return payload

    @staticmethod
    def rewrite_header(path: Path, header: Header) -> None:
        """fopen "r+b", fwrite 48 bytes, fclose."""
        fd = os.open(path, os.O_RDWR)
        os.fstat(fd)
        write_all(fd, header.pack())
        os.close(fd)

    @staticmethod
    def update_trailer(path: Path, trailer: bytes) -> None:
        """fopen "r+b": cut what follows the payload, append the new trailer, rewrite the header."""
        fd = os.open(path, os.O_RDWR)
        block = buffer_size(fd)
        head = os.read(fd, block)
        header = Header.read(head[: HEADER.size])
        (length,) = struct.unpack_from("<I", head, HEADER.size)
        end = HEADER.size + 4 + length + header.payload
        os.lseek(fd, end - end % block, os.SEEK_SET)
        os.read(fd, block)
        os.ftruncate(fd, end)
        os.lseek(fd, end, os.SEEK_SET)
        write_all(fd, trailer)
        header.extension = 1
        os.lseek(fd, 0, os.SEEK_SET)
        write_all(fd, header.pack())
        os.close(fd)

    def headers(self) -> dict[Path, tuple[Header, int]]:
        """Rescan: stat and read the header of every file."""
        out = {}
        for path, size, _ in regular_files(self.directory):
            if path.suffix == ".kv":
                with FileReader(path) as file:
                    out[path] = (Header.read(file.fread(HEADER.size)), size)
        return out

    def evict(self, keep: Path) -> None:
        """Lowest (hits + 1) · tokens / bytes first."""
        files = self.headers()
        total = sum(size for _, size in files.values())
        score = {path: (header.hits + 1) * header.tokens / size for path, (header, size) in files.items()}
        for path in sorted(score, key=score.__getitem__):
            if total > self.limit and path != keep:
                total -= files[path][1]
                remove(path)
