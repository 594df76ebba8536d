"""What cannot work is refused in one line that helps, with the right status, and changes nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.errors import UserError
from cachefs.mount import mountpoint as places
from cachefs.store import Store

from ..running import command, environment, run_cachefs

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can prepare this")


def picture(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Everything below ``folder`` that a refused command could have changed."""
    found = {}
    for path in [folder, *folder.rglob("*")]:
        status = path.lstat()
        found[str(path)] = (status.st_mode, status.st_size if path.is_file() else 0, status.st_mtime_ns)
    return found


def refused(*arguments: object, status: int = 1, unchanged: Path | None = None, **options: object) -> str:
    """The one line with which cachefs refuses the command."""
    paths = {str(argument) for argument in arguments}

    def state() -> object:
        mounts = [mount for mount in places.mounts() if {str(mount.path), mount.source} & paths]
        return mounts, picture(unchanged) if unchanged else None

    before = state()
    done = run_cachefs(*arguments, **options)
    assert state() == before
    assert done.returncode == status, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("cachefs: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


@pytest.fixture
def mnt(tmp_path: Path) -> Path:
    path = tmp_path / "mnt"
    path.mkdir()
    return path


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A small file system of another kind."""
    path = tmp_path / "tmpfs"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "little", path], check=True)
    yield path
    subprocess.run(["umount", path], check=True)


# --- mount: the mountpoint


def test_mountpoint_missing(tmp_path: Path) -> None:
    line = refused("mount", tmp_path / "store", tmp_path / "mnt", unchanged=tmp_path)
    assert f"{tmp_path}/mnt does not exist; create it: mkdir -p" in line


def test_mountpoint_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "no directory" in refused("mount", tmp_path / "store", tmp_path / "file/mnt", unchanged=tmp_path)


def test_mountpoint_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "mnt").touch()
    assert "is not a directory" in refused("mount", tmp_path / "store", tmp_path / "mnt", unchanged=tmp_path)


def test_mountpoint_not_empty(tmp_path: Path, mnt: Path) -> None:
    (mnt / "precious").write_text("data")
    assert "not empty" in refused("mount", tmp_path / "store", mnt, unchanged=tmp_path)


def test_mountpoint_is_the_store(mnt: Path) -> None:
    assert "same directory" in refused("mount", mnt, mnt, unchanged=mnt)


def test_mountpoint_in_the_store(tmp_path: Path) -> None:
    (tmp_path / "store/mnt").mkdir(parents=True)
    assert "inside the store" in refused(
        "mount", tmp_path / "store", tmp_path / "store/mnt", unchanged=tmp_path
    )


def test_store_in_the_mountpoint(tmp_path: Path, mnt: Path) -> None:
    assert "inside the mountpoint" in refused("mount", mnt / "store", mnt, unchanged=tmp_path)


def test_nested_through_a_link(tmp_path: Path, mnt: Path) -> None:
    (tmp_path / "link").symlink_to(mnt)
    assert "same directory" in refused("mount", tmp_path / "link", mnt, unchanged=tmp_path)


@needs_root
def test_mountpoint_of_another_filesystem(tmp_path: Path, tmpfs: Path) -> None:
    line = refused("mount", tmp_path / "store", tmpfs)
    assert "is already the mountpoint of little (tmpfs)" in line
    assert not (tmp_path / "store").exists()


def test_mountpoint_of_another_user(mnt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UserError, match="belongs to another user"):
        places.check_directory(mnt)


# --- mount: the store


def test_store_without_parent(tmp_path: Path, mnt: Path) -> None:
    line = refused("mount", tmp_path / "no/store", mnt, unchanged=tmp_path)
    assert f"{tmp_path}/no" in line


def test_store_is_a_file(tmp_path: Path, mnt: Path) -> None:
    (tmp_path / "store").write_text("mine")
    assert "not a directory" in refused("mount", tmp_path / "store", mnt, unchanged=tmp_path)


def test_store_holds_something_else(tmp_path: Path, mnt: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store/thesis.txt").write_text("mine")
    assert "not a cachefs store" in refused("mount", tmp_path / "store", mnt, unchanged=tmp_path)


def test_store_of_a_newer_version(tmp_path: Path, mnt: Path) -> None:
    store = tmp_path / "store"
    Store.open(store, 64 << 20).close()
    mark = json.loads((store / "format").read_text())
    (store / "format").write_text(json.dumps({**mark, "cachefs": 1000}))
    line = refused("mount", store, mnt, unchanged=tmp_path)
    assert "newer cachefs" in line
    assert "1000" in line


@needs_root
def test_store_of_another_user(tmp_path: Path, mnt: Path) -> None:
    store = tmp_path / "store"
    Store.open(store, 64 << 20).close()
    os.chown(store, 12345, 12345)
    assert "another user" in refused("mount", store, mnt, unchanged=tmp_path)


@needs_root
def test_store_on_a_full_disk(mnt: Path, tmpfs: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        (tmpfs / "ballast").write_bytes(bytes(1 << 20))
    line = refused("mount", tmpfs / "store", mnt, unchanged=tmpfs)
    assert "free; make room there" in line
    line = refused("mount", "--max-size", "64M", tmpfs / "store", mnt)
    assert "disk is full" in line


# --- mount: the machine


@needs_root
def test_no_fuse_device(tmp_path: Path, mnt: Path) -> None:
    """In a mount namespace of its own, where something else hides /dev/fuse."""
    (tmp_path / "empty").touch()
    script = f'mount --make-rprivate / && mount --bind {tmp_path}/empty /dev/fuse && exec "$@"'
    before = picture(tmp_path)
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", *command("mount", tmp_path / "store", mnt)],
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert picture(tmp_path) == before
    assert done.returncode == 1
    assert done.stderr.startswith("cachefs: /dev/fuse is missing; load the module")
    assert done.stderr.count("\n") == 1


@pytest.fixture
def as_user(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """What the checks see when it is not root who asks."""
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setattr(os, "access", lambda path, mode: True)
    return monkeypatch


def test_fuse_device_not_permitted(as_user: pytest.MonkeyPatch) -> None:
    as_user.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UserError, match="may not be opened by you"):
        places.check_fuse(allow_other=False)


def test_no_fusermount(as_user: pytest.MonkeyPatch, tmp_path: Path) -> None:
    as_user.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="fusermount3 is missing; install it: apt-get install fuse3"):
        places.check_fuse(allow_other=False)


@pytest.mark.parametrize(
    ("text", "permitted"), [("", False), ("#user_allow_other\n", False), (" user_allow_other \n", True)]
)
def test_allow_other(as_user: pytest.MonkeyPatch, tmp_path: Path, text: str, permitted: bool) -> None:
    (tmp_path / "fuse.conf").write_text(text)
    as_user.setattr(places, "FUSE_CONF", str(tmp_path / "fuse.conf"))
    as_user.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    places.check_fuse(allow_other=False)
    if permitted:
        places.check_fuse(allow_other=True)
    else:
        with pytest.raises(UserError, match="put the line user_allow_other into"):
            places.check_fuse(allow_other=True)


# --- the command line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["mount", "--max-size", "lots", "S", "M"], "'lots' is not a size"),
        (["mount", "--max-size", "3M", "S", "M"], "too small; give at least 64 MiB"),
        (["mount", "-o", "max_size=3X", "S", "M"], "'3X' is not a size"),
        (["mount", "-o", "bogus", "S", "M"], "unknown mount option 'bogus'; known are"),
        (["mount", "-o", "max_read=4096", "S", "M"], "unknown mount option 'max_read'"),
        (["mount", "S"], "MOUNTPOINT"),
        (["mount"], "STORE"),
        (["mount", "", "M"], "STORE is empty"),
        (["mount", "S", "M", "more"], "more"),
        (["mount", "--bogus", "S", "M"], "--bogus"),
        (["umount"], "MOUNTPOINT"),
        (["mout", "S", "M"], "mout"),
        (["ls", "--sort", "colour"], "colour"),
        (["rm"], "name the files"),
        (["rm", "--all", "a", "b"], "one PATH"),
        (["pin"], "FILE"),
        (["systemd", "S"], "MOUNTPOINT"),
        (["S/", "M", "-o", "bogus"], "unknown mount option 'bogus'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_usage(arguments: list[str], says: str, tmp_path: Path) -> None:
    for name in ("S", "M"):
        (tmp_path / name).mkdir()
    assert says in refused(*arguments, status=2, unchanged=tmp_path, cwd=tmp_path)


def test_read_only(tmp_path: Path, mnt: Path) -> None:
    assert "read-only" in refused("mount", "-o", "ro", tmp_path / "store", mnt, unchanged=tmp_path)


# --- the other commands


def test_umount_of_what_is_not_mounted(mnt: Path) -> None:
    assert "nothing is mounted at" in refused("umount", mnt)
    assert "nothing is mounted at" in refused("umount", mnt / "missing")


@needs_root
def test_umount_of_another_filesystem(tmpfs: Path) -> None:
    assert "is no cachefs mount but little (tmpfs)" in refused("umount", tmpfs)


@pytest.mark.parametrize("name", ["stats", "ls", "pin", "unpin", "rm"])
def test_neither_mount_nor_store(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "neither in a cachefs mount nor in a store" in refused(name, tmp_path / "file", unchanged=tmp_path)
    assert "does not exist" in refused(name, tmp_path / "no/thing", unchanged=tmp_path)


@pytest.mark.parametrize("name", ["pin", "unpin", "rm"])
def test_no_such_entry(name: str, tmp_path: Path) -> None:
    store = tmp_path / "store"
    Store.open(store, 64 << 20).close()
    assert "no such entry" in refused(name, store / "nothing.bin")
    assert "name a file in it" in refused(name, store)


def test_rm_all_asks(tmp_path: Path) -> None:
    store = tmp_path / "store"
    Store.open(store, 64 << 20).close()
    done = run_cachefs("rm", "--all", store)
    assert (done.returncode, done.stderr) == (0, "")


def test_unexpected_errors_are_one_line(tmp_path: Path) -> None:
    code = (
        "import sys; import cachefs.cli.stats as s; from cachefs.cli import main\n"
        "def collect(path): raise KeyError('oh\\nno')\n"
        "s.collect = collect; sys.exit(main(['stats']))"
    )

    def run(**extra: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env={**environment(), **extra}
        )

    done = run()
    assert done.returncode == 1
    assert done.stderr.startswith("cachefs: unexpected KeyError")
    assert done.stderr.count("\n") == 1
    assert "Traceback" in run(CACHEFS_DEBUG="1").stderr


def test_a_closed_pipe_is_silent(tmp_path: Path) -> None:
    code = (
        "import sys; import cachefs.cli.stats as s; from cachefs.cli import main\n"
        "s.collect = lambda path: {str(i): i for i in range(100000)}\n"
        "sys.exit(main(['stats', '--json']))"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    )
    assert writer.stdout is not None
    assert writer.stderr is not None
    writer.stdout.close()
    assert writer.wait(30) == 130
    assert writer.stderr.read() == b""
    writer.stderr.close()


# --- help


def test_help_tells_how_to_start() -> None:
    done = run_cachefs("--help")
    assert done.returncode == 0
    for word in ("Quick start", "cachefs mount", "--slot-save-path", "fstab", "Exit status", "systemd"):
        assert word in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


@pytest.mark.parametrize("name", ["mount", "umount", "stats", "ls", "pin", "unpin", "rm", "systemd"])
def test_each_command_has_examples(name: str) -> None:
    done = run_cachefs(name, "--help")
    assert done.returncode == 0
    assert f"cachefs {name} " in done.stdout.split("Examples:")[1]


def test_version() -> None:
    import cachefs

    assert run_cachefs("--version").stdout == f"cachefs {cachefs.__version__}\n"
