"""Upstream's own test of saving and loading, on a mount."""

import subprocess
from pathlib import Path

import pytest
from llama import Paths

from .conftest import Mount

pytestmark = pytest.mark.llama


def test_save_load_state(llama: Paths, archs: Path, mount: Mount) -> None:
    """test-save-load-state passes for every architecture (75 s on two cores).

    It writes its dump file where it is started, again and again under one name.
    """
    mounted = mount()
    done = subprocess.run(
        [llama.save_load, "--models", archs],
        cwd=mounted.path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=400,
        check=False,
    )
    output = done.stdout.decode(errors="replace")
    assert done.returncode == 0, output[-3000:]
    table = [line for line in output.splitlines() if ".gguf " in line and "PASS" in line]
    assert len(table) == len(list(archs.glob("*.gguf")))
    assert not [line for line in table if "FAIL" in line]
    assert (mounted.path / "dump_state.bin").stat().st_size > 0
