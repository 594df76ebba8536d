"""Payload codecs. Chunks are compressed where a sample says that it pays; KV rows are kept raw."""

import threading

import zstandard

from cachefs.states.pieces import Buffer
from cachefs.store.records import RAW, ZSTD

_LEVEL = 1
_SAMPLE = 8192
_WORTH = 0.9
_local = threading.local()


class Broken(Exception):
    """A payload that does not decode."""


def _compressor() -> zstandard.ZstdCompressor:
    # One a thread: the contexts are not safe to share.
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(level=_LEVEL)
        _local.decompressor = zstandard.ZstdDecompressor()
    found: zstandard.ZstdCompressor = _local.compressor
    return found


def encode(raw: Buffer) -> tuple[int, Buffer]:
    """Codec and payload for ``raw``."""
    if len(raw) < 128:
        return RAW, raw
    compressor = _compressor()
    if len(raw) > 2 * _SAMPLE and len(compressor.compress(raw[:_SAMPLE])) > _WORTH * _SAMPLE:
        return RAW, raw
    packed = compressor.compress(raw)
    return (ZSTD, packed) if len(packed) < _WORTH * len(raw) else (RAW, raw)


def decode(payload: Buffer, codec: int, raw: int) -> Buffer:
    """The raw bytes, ``raw`` of them. Raises Broken."""
    if codec == RAW:
        return payload
    if codec != ZSTD:
        raise Broken(f"unknown codec {codec}")
    _compressor()
    try:
        out: bytes = _local.decompressor.decompress(payload, max_output_size=raw)
    except zstandard.ZstdError as error:
        raise Broken(str(error)) from None
    return out
