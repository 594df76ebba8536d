"""States of SmolLM2-135M: chats, growing turns, branches, cache types, slots, shifts, session files."""

import random
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llama import Paths, Server, ServerError
from statekinds import Failed, Job, Result

# Words enough to make text that a model continues sensibly; the text itself does not matter.
SUBJECTS = (
    "the harbour master|an old engineer|the night librarian|a travelling cook|the town council|my neighbour"
)
VERBS = "repaired|described|forgot about|photographed|argued over|catalogued|painted|carried home|measured"
OBJECTS = (
    "the brass lantern|a box of letters|three broken clocks|the stone bridge|a map of the coast|the red boat"
)
WHERE = "before dawn|in the rain|near the station|after the festival|on the second floor|without any help"


def words(seed: int, sentences: int) -> str:
    """Deterministic English of about 12 tokens a sentence."""
    rng = random.Random(seed)
    return " ".join(
        f"{rng.choice(SUBJECTS.split('|')).capitalize()} {rng.choice(VERBS.split('|'))} "
        f"{rng.choice(OBJECTS.split('|'))} {rng.choice(WHERE.split('|'))}."
        for _ in range(sentences)
    )


@dataclass(frozen=True)
class Chats:
    """Prompts, as token ids, with a common prefix."""

    prefix: list[int]
    prompts: list[list[int]]


def chats(server: Server, prefix: int = 3000, tails: tuple[int, ...] = (500, 800, 1100)) -> Chats:
    """Prompts of chats that share their first ``prefix`` tokens (a long system prompt) exactly."""
    system = server.tokenize(f"<|im_start|>system\n{words(0, prefix // 8)}")[:prefix]
    if len(system) < prefix:
        raise ServerError(f"the system prompt has {len(system)} tokens, {prefix} are needed")
    prompts = []
    for seed, tail in enumerate(tails, 1):
        ask = server.tokenize("<|im_end|>\n<|im_start|>assistant\n")
        # The number in front makes the chats differ from their first own token on.
        own = server.tokenize(f"{seed}<|im_end|>\n<|im_start|>user\n{words(seed, tail // 8)}")
        prompts.append(system + own[: tail - len(ask)] + ask)
    return Chats(system, prompts)


def growing(server: Server, turns: int, system: int, user: int, answer: int) -> Iterator[list[int]]:
    """Play a chat at temperature 0; after each turn yield the tokens the slot was asked with."""
    prompt = server.tokenize(f"<|im_start|>system\n{words(0, system // 8)}")[:system]
    for turn in range(turns):
        prompt = prompt + server.tokenize(
            f"<|im_end|>\n<|im_start|>user\n{words(100 + turn, user // 12)}<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        reply = server.completion(prompt, n_predict=answer, return_tokens=True)
        yield prompt
        prompt = prompt + reply["tokens"]


def save_chats(server: Server, prompts: list[list[int]], slot: int = 0, n_predict: int = 16) -> Iterator[str]:
    """Run each prompt in one slot and save it as chatN.bin; yields the names."""
    for number, prompt in enumerate(prompts):
        server.completion(prompt, slot=slot, n_predict=n_predict)
        name = f"chat{number}.bin"
        server.save(name, slot)
        yield name


def _chats(job: Job, folder: str, prefix: int, tails: tuple[int, ...], *args: str) -> Iterator[Result]:
    out = job.folder(f"smol/{folder}")
    with Server(job.paths, job.smollm2, out, *args) as server:
        made = chats(server, prefix, tails)
        for name in save_chats(server, made.prompts):
            yield job.made(out / name, f"SmolLM2 chat, {' '.join(args)}, first {prefix} tokens common")


def common_prefix(job: Job) -> Iterator[Result]:
    """Three chats with a common prefix of 3,000 tokens, f16."""
    prefix, tails = (200, (40, 60, 80)) if job.small else (3000, (500, 800, 1100))
    yield from _chats(job, "chats", prefix, tails, "-fa", "on")


VARIANTS = {
    "fa-off": ("-fa", "off"),
    "q8_0": ("-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0"),
    "q4_0": ("-fa", "on", "-ctk", "q4_0", "-ctv", "q4_0"),
    "f32": ("-fa", "on", "-ctk", "f32", "-ctv", "f32"),
    "bf16": ("-fa", "on", "-ctk", "bf16", "-ctv", "bf16"),
    "q8_0-fa-off": ("-fa", "off", "-ctk", "q8_0"),
}


def variants(job: Job) -> Iterator[Result]:
    """Three chats with a common prefix of 600 tokens, with each cache type and with V transposed."""
    prefix, tails = (100, (20, 30, 40)) if job.small else (600, (100, 150, 200))
    for name, args in VARIANTS.items():
        yield from _chats(job, name, prefix, tails, *args)


def turns(job: Job) -> Iterator[Result]:
    """Ten turns of one chat, saved after each turn under a name of its own."""
    out = job.folder("smol/turns")
    count, system, user, answer = (3, 100, 24, 8) if job.small else (10, 1000, 120, 32)
    with Server(job.paths, job.smollm2, out, "-fa", "on") as server:
        for number, prompt in enumerate(growing(server, count, system, user, answer), 1):
            name = f"turn{number:02d}.bin"
            server.save(name)
            yield job.made(out / name, f"turn {number} of one chat, {len(prompt)} tokens asked")


def branches(job: Job) -> Iterator[Result]:
    """A chat and three continuations of it that differ."""
    out = job.folder("smol/branches")
    system, user, answer = (100, 24, 8) if job.small else (800, 120, 32)
    with Server(job.paths, job.smollm2, out, "-fa", "on") as server:
        *_, trunk = growing(server, 2, system, user, answer)
        server.save("trunk.bin")
        yield job.made(out / "trunk.bin", f"the trunk, {len(trunk)} tokens asked")
        for number in range(3):
            branch = trunk + server.tokenize(words(200 + number, user // 12))
            server.completion(branch, n_predict=answer)
            server.save(f"branch{number}.bin")
            yield job.made(out / f"branch{number}.bin", f"a continuation, {len(branch)} tokens asked")


def slots(job: Job) -> Iterator[Result]:
    """The same prefix in four slots of one server, with one cache for all and with one for each."""
    prefix, tails = (100, (10, 20, 30, 40)) if job.small else (600, (100, 150, 200, 250))
    for flag in ("--kv-unified", "--no-kv-unified"):
        out = job.folder(f"smol/slots{flag[1:]}")
        with Server(job.paths, job.smollm2, out, "-fa", "on", flag, parallel=4) as server:
            for slot, prompt in enumerate(chats(server, prefix, tails).prompts):
                server.completion(prompt, slot=slot, n_predict=8)
            # Saved when all slots are filled, so that every file carries what the others leave in it.
            for slot in range(4):
                server.save(f"slot{slot}.bin", slot)
                yield job.made(
                    out / f"slot{slot}.bin", f"-np 4 {flag}, slot {slot}, first {prefix} tokens common"
                )


def fragmented(job: Job) -> Iterator[Result]:
    """A chat whose cells are not in the order of its positions: a cache with a hole, filled last."""
    out = job.folder("smol/fragmented")
    with Server(job.paths, job.smollm2, out, "-fa", "on", "--kv-unified", context=1024, parallel=2) as server:
        prompt = chats(server, 100, (900,)).prompts[0]
        server.completion(prompt[:350], slot=0, n_predict=1)
        server.save("whole.bin", 0)
        yield job.made(out / "whole.bin", "350 tokens, cells in order")
        server.erase(0)
        server.completion(words(9, 25), slot=1, n_predict=1)
        server.completion(prompt[:350], slot=0, n_predict=1)
        server.erase(1)
        server.completion(prompt[:600], slot=0, n_predict=1)
        server.completion(prompt[:950], slot=0, n_predict=1)
        server.save("wrapped.bin", 0)
        yield job.made(
            out / "wrapped.bin", "950 tokens with the same prefix, the last of them in the first cells"
        )


def shift(job: Job) -> Iterator[Result]:
    """A chat before and after its context was shifted: half of it dropped, the rest moved down."""
    out = job.folder("smol/shift")
    context = 512
    with Server(
        job.paths, job.smollm2, out, "-fa", "on", "--context-shift", "--keep", "64", context=context
    ) as server:
        prompt = chats(server, 300, (150,)).prompts[0]
        server.completion(prompt, n_predict=1, n_keep=64)
        server.save("before.bin")
        yield job.made(out / "before.bin", f"{len(prompt)} tokens in a context of {context}")
        server.completion(prompt, n_predict=150, n_keep=64, ignore_eos=True)
        server.save("after.bin")
        yield job.made(out / "after.bin", "the same chat after 150 more tokens and a context shift")


def session_file(paths: Paths, model: Path, out: Path, prompt: str, *args: str) -> None:
    """Write a session file (every sequence of a context) with llama-completion --prompt-cache."""
    if paths.completion is None:
        raise ServerError("this build has no llama-completion, so no session files")
    command: list[str | Path] = [
        paths.completion,
        "-m",
        model,
        "-t",
        "2",
        "-n",
        "1",
        "--temp",
        "0",
        "-no-cnv",
        "--no-warmup",
    ]
    done = subprocess.run(
        [*command, "--prompt-cache", out, "-p", prompt, *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode or not out.exists():
        raise ServerError(f"llama-completion failed: {done.stdout.decode(errors='replace')[-500:]}")


def session(job: Job) -> Iterator[Result]:
    """Two session files with a common prefix, V in rows, and one with V transposed."""
    if job.paths.completion is None:
        yield Failed("smol/session", "this build has no llama-completion")
        return
    out = job.folder("smol/session")
    # Small ones are for test data: 4-bit K and V make 6.5 KB a token instead of 23.
    common = "A night in the harbour" if job.small else words(0, 80)
    more = ["and", "or two by"] if job.small else [words(1, 4), words(2, 10)]
    types = ("-ctk", "q4_0") if job.small else ()
    for name, tail, args in (
        ("session0", more[0], ("-fa", "on", "-ctv", "q4_0") if job.small else ("-fa", "on")),
        ("session1", more[1], ("-fa", "on", "-ctv", "q4_0") if job.small else ("-fa", "on")),
        ("session0-fa-off", more[0], ("-fa", "off")),
    ):
        path = out / f"{name}.bin"
        path.unlink(missing_ok=True)
        session_file(job.paths, job.smollm2, path, f"{common} {tail}", "-c", "4096", *types, *args)
        yield job.made(path, f"llama-completion --prompt-cache, {' '.join(args)}, prefix common")
