"""Programs that look after llama-server's slot files (unsloth studio, hearth-llm, diskllm), and oMLX."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import random
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path

from .cxxfs import regular_files
from .llama_server import slot_restore, slot_save
from .payload import State, u64

GIB = 1 << 30


@dataclass
class Unsloth:
    """unsloth studio PR #7204: saves on unload, restores once, removes what it may have left at start."""

    root: Path
    reserve: int = GIB
    unknown: int = 11 * GIB

    def __post_init__(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        os.chmod(self.root, 0o700)
        for path in self.root.glob("resume-*.bin"):
            path.unlink(missing_ok=True)

    def save(self, state: State, estimate: int | None, slot: int = 0) -> Path | None:
        """Only when statvfs promises the estimate and a reserve; a short file is removed."""
        disk = os.statvfs(self.root)
        needed = self.unknown if estimate is None else estimate + self.reserve
        if disk.f_bavail * disk.f_frsize < needed:
            return None
        path = self.root / f"resume-{secrets.token_hex(4)}-slot{slot}.bin"
        if slot_save(path, state) != path.stat().st_size:
            path.unlink()
            return None
        return path

    def restore(self, path: Path) -> bytes:
        data, _ = slot_restore(path)
        path.unlink(missing_ok=True)
        return data


@dataclass
class Hearth:
    """hearth-llm 0.1.1: a manifest replaced beside the states, llama-server's log in the same directory."""

    root: Path
    limit: int = 20 * GIB
    manifest: dict[str, dict[str, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        os.chmod(self.root, 0o700)
        if (self.root / "manifest.json").exists():
            self.manifest = json.loads((self.root / "manifest.json").read_text())
        self.log = os.open(
            self.root / "llama-server.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666
        )

    def probe(self, state: State) -> bool:
        """Does saving work at all? One file saved, looked at, removed."""
        path = self.root / "hearth-probe.kv"
        os.write(self.log, b"probe\n")
        good = slot_save(path, state) == path.stat().st_size
        path.unlink()
        return good

    def save(self, text: str, state: State) -> Path:
        path = self.root / f"{hashlib.md5(text.encode()).hexdigest()}.kv"
        os.write(self.log, f"slot save {path.name}\n".encode())
        size = slot_save(path, state)
        self.manifest[path.name] = {"size": size, "used": time.time_ns()}
        while len(self.manifest) > 1 and sum(entry["size"] for entry in self.manifest.values()) > self.limit:
            oldest = min(self.manifest, key=lambda name: self.manifest[name]["used"])
            del self.manifest[oldest]
            (self.root / oldest).unlink()
        self._replace_manifest()
        return path

    def sweep(self) -> None:
        """Remove states that the manifest does not name and that were not written within five minutes."""
        for path in self.root.glob("*.kv"):
            if path.name not in self.manifest and time.time() - path.stat().st_mtime > 300:
                path.unlink()

    def close(self) -> None:
        os.close(self.log)

    def _replace_manifest(self) -> None:
        temporary = self.root / f"manifest.{os.getpid()}.tmp"
        temporary.write_text(json.dumps(self.manifest))
        os.replace(temporary, self.root / "manifest.json")


@dataclass
class DiskLlm:
    """diskllm 0.1.1: states replaced by name, and a row store of its own, written through a mapping."""

    root: Path

    def save(self, name: str, state: State) -> Path:
        temporary = self.root / f"{name}.mmap.{os.getpid()}.tmp"
        slot_save(temporary, state)
        os.replace(temporary, self.root / f"{name}.mmap")
        return self.root / f"{name}.mmap"

    def newest_first(self) -> list[str]:
        return [
            path.name
            for path in sorted(self.root.glob("*.mmap"), key=lambda p: p.stat().st_mtime_ns, reverse=True)
        ]

    def write_rows(self, rows: dict[int, bytes], count: int, size: int) -> Path:
        """open "w+b" the first time, "r+b" later, truncate to full size, store rows in any order, msync."""
        path = self.root / "rows.q8"
        with open(path, "r+b" if path.exists() else "w+b") as file:
            file.truncate(count * size)
            with mmap.mmap(file.fileno(), count * size) as memory:
                order = list(rows)
                random.Random(1).shuffle(order)
                for row in order:
                    memory[row * size : (row + 1) * size] = rows[row]
                memory.flush()
        return path


@dataclass
class Omlx:
    """oMLX: 16 directories of safetensors, mtime for the last access, free space from statvfs."""

    root: Path

    def __post_init__(self) -> None:
        for digit in "0123456789abcdef":
            (self.root / digit).mkdir(exist_ok=True)

    def save(self, tensors: bytes) -> Path:
        stem = hashlib.sha256(tensors).hexdigest()
        final = self.root / stem[0] / f"{stem}.safetensors"
        temporary = final.with_name(f"{stem}_tmp.safetensors")
        description = {"kv": {"dtype": "U8", "shape": [len(tensors)], "data_offsets": [0, len(tensors)]}}
        head = json.dumps(description).encode()
        head += b" " * (-len(head) % 8)
        with open(temporary, "wb") as file:
            file.write(u64(len(head)) + head)
            file.write(tensors)
        os.rename(temporary, final)
        return final

    def scan(self) -> list[tuple[Path, int, int]]:
        """Start: open every file for its header; oldest access first."""
        found = []
        for directory in sorted(self.root.iterdir()):
            for path, size, mtime in regular_files(directory):
                with open(path, "rb") as file:
                    length = int.from_bytes(file.read(8), "little")
                    assert json.loads(file.read(length))["kv"]["data_offsets"][1] == size - 8 - length
                found.append((path, size, mtime))
        return sorted(found, key=lambda item: item[2])
