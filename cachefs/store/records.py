"""The fixed-size records of the index, and its keys.

Ids (blocks, inodes, cookies, victims' turns) are unsigned 64-bit numbers that
only grow and are never used twice. Keys that LMDB must keep in order are
big-endian; block ids are LMDB integer keys, native-endian.
"""

import struct
import sys
from typing import Any, NamedTuple

from cachefs.states.pieces import Buffer
from cachefs.store.errors import Damaged

_BE2 = struct.Struct(">QQ")
_BE1 = struct.Struct(">Q")
_BLOCK = struct.Struct("<16sHBBIIIIHQQQ")
_REFS = struct.Struct("<IQ")
_INODE = struct.Struct("<IIIIQqqqqQQQQ")
_DIRENT = struct.Struct("<QQI")
_VOLUME = struct.Struct("<QQQ")
INODE_BYTES = _INODE.size

CHUNK, ROWS, TILE = 0, 1, 2
"""Kinds of block."""

RAW, ZSTD, PLANES, KEPT = 0, 1, 2, 3
"""Codecs of a payload. KEPT is RAW, too: packing it was tried and saves too little."""


def int_key(number: int) -> bytes:
    """Native-endian key of an ``integerkey`` table."""
    return number.to_bytes(8, sys.byteorder)


def int_of(key: Buffer) -> int:
    return int.from_bytes(key, sys.byteorder)


def _unpack(record: struct.Struct, data: Buffer) -> tuple[Any, ...]:
    """Raises Damaged if the record has another length."""
    try:
        return record.unpack(data)
    except struct.error:
        raise Damaged("a record of the index is damaged") from None


def be(number: int) -> bytes:
    return _BE1.pack(number)


def be_pair(first: int, second: int) -> bytes:
    return _BE2.pack(first, second)


def of_be(key: Buffer) -> int:
    return int.from_bytes(key, "big")


class BlockRow(NamedTuple):
    """One stored block.

    ``raw`` and ``stored`` are bytes before and after the codec; ``width`` is bytes
    a row (ROWS) or an element (TILE), 0 for a CHUNK; ``rows`` a tile's embedding
    rows; ``parts`` how many values its payload was split into (0: it is one value);
    ``head`` and ``tail`` are the row keys it is found by (0: none). ``hint`` says
    where the payload lies in its volume's file, in bytes (0: not known). It is no more
    than a hint: what is read there counts only if the digest agrees.
    """

    digest: bytes
    volume: int
    codec: int
    kind: int
    raw: int
    stored: int
    width: int
    rows: int
    parts: int
    head: int
    tail: int
    hint: int

    def pack(self) -> bytes:
        return _BLOCK.pack(*self)

    @classmethod
    def unpack(cls, data: Buffer) -> "BlockRow":
        return cls._make(_unpack(_BLOCK, data))


class Refs(NamedTuple):
    """``number`` recipe records name the block; at 0 ``turn`` is its place among the victims."""

    number: int
    turn: int

    def pack(self) -> bytes:
        return _REFS.pack(*self)

    @classmethod
    def unpack(cls, data: Buffer) -> "Refs":
        return cls._make(_unpack(_REFS, data))


class Dirent(NamedTuple):
    ino: int
    cookie: int
    kind: int
    """S_IFREG or S_IFDIR."""

    def pack(self) -> bytes:
        return _DIRENT.pack(*self)

    @classmethod
    def unpack(cls, data: Buffer) -> "Dirent":
        return cls._make(_unpack(_DIRENT, data))


class VolumeRow(NamedTuple):
    """``map_bytes`` it may grow to, ``used`` bytes (footprints) and ``blocks`` it holds."""

    map_bytes: int
    used: int
    blocks: int

    def pack(self) -> bytes:
        return _VOLUME.pack(*self)

    @classmethod
    def unpack(cls, data: Buffer) -> "VolumeRow":
        return cls._make(_unpack(_VOLUME, data))


class Inode(NamedTuple):
    """What the tree keeps of a file or directory. Times in nanoseconds, sizes in bytes.

    ``last_use`` orders eviction; ``row_bytes`` is how much of the file was
    recognised as KV rows; ``parent`` and ``cookie`` find its one dirent.
    """

    mode: int
    uid: int
    gid: int
    nlink: int
    size: int
    atime: int
    mtime: int
    ctime: int
    birth: int
    last_use: int
    row_bytes: int
    parent: int
    cookie: int

    def pack(self) -> bytes:
        return _INODE.pack(*self)

    @classmethod
    def unpack(cls, data: Buffer) -> "Inode":
        return cls._make(_unpack(_INODE, data))
