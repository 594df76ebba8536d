"""Unit files: clean in systemd's own eyes, whatever the paths."""

import shutil
import subprocess
from pathlib import Path

import pytest

from cachefs.cli.systemd import escape_path

from ..running import run_cachefs

needs_analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)

PATHS = ["/mnt/kv", "/", "/a b/c-d_e:f.g", "/.hidden/x", "/%h/$HOME/ü\\q", "/mnt/kv/"]


@pytest.mark.skipif(shutil.which("systemd-escape") is None, reason="systemd-escape is not installed")
@pytest.mark.parametrize("path", PATHS)
def test_names_are_escaped_as_systemd_does(path: str) -> None:
    done = subprocess.run(["systemd-escape", "--path", path], capture_output=True, text=True, check=True)
    assert escape_path(Path(path)) == done.stdout.strip()


def files_of(text: str, folder: Path) -> list[Path]:
    """Save each printed unit under the name its first line gives."""
    files: list[Path] = []
    for line in text.splitlines(keepends=True):
        if line.startswith(("# /etc/systemd/system/", "# ~/.config/systemd/user/")):
            files.append(folder / line.strip().rpartition("/")[2])
            files[-1].write_text("")
        with files[-1].open("a") as file:
            file.write(line)
    return files


@needs_analyze
@pytest.mark.parametrize(
    ("store", "mountpoint"),
    [("store", "kv"), ("a store, 100%", "my kv"), ("$HOME'", 'quote"back\\slash'), ("stör", "kv-ü")],
)
@pytest.mark.parametrize(
    "options",
    [["--unit", "both"], ["--unit", "both", "--max-size", "20G"], ["--user"]],
    ids=["plain", "size", "user"],
)
def test_units_verify(store: str, mountpoint: str, options: list[str], tmp_path: Path) -> None:
    done = run_cachefs("systemd", *options, tmp_path / store, tmp_path / mountpoint)
    assert done.returncode == 0, done.stderr
    files = files_of(done.stdout, tmp_path)
    assert len(files) == (1 if "--user" in options else 2)
    for file in files:
        kind = ["--user"] if "--user" in options else []
        verify = subprocess.run(
            ["systemd-analyze", *kind, "verify", "--man=no", file],
            capture_output=True,
            text=True,
            env={"XDG_RUNTIME_DIR": str(tmp_path), "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
        )
        assert (verify.returncode, verify.stderr) == (0, ""), file.read_text()


def test_a_mount_unit_is_not_for_users(tmp_path: Path) -> None:
    done = run_cachefs("systemd", "--user", "--unit", "mount", tmp_path, tmp_path / "m")
    assert done.returncode == 2
    assert "need root" in done.stderr


def test_the_service_starts_this_installation(tmp_path: Path) -> None:
    text = run_cachefs("systemd", "--max-size", "20G", tmp_path / "s", tmp_path / "m").stdout
    (line,) = (line for line in text.splitlines() if line.startswith("ExecStart="))
    command = line.removeprefix("ExecStart=").split()
    assert Path(command[0]).is_file()
    assert command[-6:] == [
        "--foreground",
        "--max-size",
        "20G",
        "--",
        str(tmp_path / "s"),
        str(tmp_path / "m"),
    ]
    assert "Type=notify" in text
