"""llama.cpp PR #26408: states serialised through a shared mapping of `ckpt_<n>.bin`, kept until restored."""

from __future__ import annotations

import mmap
import os
import random
from dataclasses import dataclass
from pathlib import Path


@dataclass
class MappedCheckpoint:
    path: Path
    memory: mmap.mmap

    @classmethod
    def save(cls, path: Path, data: bytes, seed: int = 0) -> MappedCheckpoint:
        """Create, size, map, store in any order; the descriptor is closed and nothing is synced."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.ftruncate(fd, len(data))
        memory = mmap.mmap(fd, len(data), mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        os.close(fd)
        starts = list(range(0, len(data), 10_007))
        random.Random(seed).shuffle(starts)
        for start in starts:
            memory[start : start + 10_007] = data[start : start + 10_007]
        return cls(path, memory)

    def restore(self) -> bytes:
        """Copy out of the mapping, unmap, unlink."""
        data = self.memory[:]
        self.memory.close()
        os.unlink(self.path)
        return data
