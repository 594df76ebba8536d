"""The place where the filesystem appears: is it fit, what is mounted there, take it away."""

import ctypes
import errno
import os
import shutil
import stat
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path

from cachefs.errors import UserError

FUSE_DEVICE = "/dev/fuse"
FUSE_CONF = "/etc/fuse.conf"
FSTYPE = "fuse.cachefs"
COMMIT = "user.cachefs.commit"
"""Setting this attribute has the daemon commit, and keeps nothing. Unlike a sync it leaves the
news of a file that was lost behind a close to the client whom it concerns."""

_YOUR_OWN = "choose a directory of your own"
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
_ANSWER_WITHIN = 10.0
# What a filesystem without a daemon answers: gone, or cut off through /sys/fs/fuse.
_DEAD = (errno.ENOTCONN, errno.ECONNABORTED)


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of /proc/self/mountinfo."""

    device: str  # "0:52"; no two live mounts share it
    path: Path
    fstype: str
    source: str
    options: str

    @property
    def user(self) -> int | None:
        """Who mounted it, as FUSE knows."""
        for option in self.options.split(","):
            if option.startswith("user_id="):
                return int(option.removeprefix("user_id="))
        return None


def _unescape(field: bytes) -> str:
    r"""mountinfo writes blank, tab, newline, # and backslash as \ooo."""
    head, *rest = field.split(b"\\")
    return os.fsdecode(head + b"".join(bytes([int(part[:3], 8)]) + part[3:] for part in rest))


def mounts() -> list[Mount]:
    """All mounts, lower before upper."""
    found = []
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        left, _, right = line.partition(b" - ")
        fields, tail = left.split(b" "), right.split(b" ")
        fstype, source, options = (_unescape(field) for field in tail[:3])
        found.append(Mount(fields[2].decode(), Path(_unescape(fields[4])), fstype, source, options))
    return found


def mounted_at(path: Path) -> Mount | None:
    """The uppermost mount exactly at ``path``."""
    return next((mount for mount in reversed(mounts()) if mount.path == path), None)


def mount_above(path: Path) -> Mount | None:
    """The cachefs mount that ``path`` lies in, if it lies in one."""
    return max(
        (mount for mount in mounts() if mount.fstype == FSTYPE and path.is_relative_to(mount.path)),
        key=lambda mount: len(mount.path.parts),
        default=None,
    )


def absolute(path: str | Path) -> Path:
    """Absolute, without asking the last name's filesystem: behind it may be a dead mount."""
    given = Path(os.path.abspath(path))
    if any(mount.path == given for mount in mounts()):
        return given
    parent = Path(os.path.realpath(given.parent))
    candidate = parent / given.name
    if any(mount.path == candidate for mount in mounts()):
        return candidate
    return Path(os.path.realpath(given))


def is_dead(mount: Mount) -> bool:
    """Whether the daemon behind ``mount`` is gone. UserError if it is there and does not answer."""
    answers: list[int] = []

    def ask() -> None:
        try:
            os.statvfs(mount.path)  # never answered from the kernel's cache
            answers.append(0)
        except OSError as error:
            answers.append(error.errno or errno.EIO)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_ANSWER_WITHIN)
    if not answers:
        raise UserError(f"the mount at {mount.path} does not answer; end its daemon, then try again")
    return answers[0] in _DEAD


def check(mountpoint: Path, store: Path) -> Mount | None:
    """Refuse a mountpoint that is not fit; return the dead cachefs mount that must go first.

    Changes nothing. What lies under a dead mount can only be seen when that is
    gone: call check_directory then.
    """
    if mountpoint == store:
        raise UserError("the store and the mountpoint are the same directory; give two")
    if mountpoint.is_relative_to(store):
        raise UserError(f"the mountpoint {mountpoint} lies inside the store; choose one outside {store}")
    if store.is_relative_to(mountpoint):
        raise UserError(f"the store {store} lies inside the mountpoint; choose one outside {mountpoint}")
    mount = mounted_at(mountpoint)
    if mount is None:
        check_directory(mountpoint)
        return None
    if not is_dead(mount):
        raise UserError(describe_live(mount))
    if mount.fstype != FSTYPE:
        raise UserError(
            f"{mountpoint} is a dead {mount.fstype} mount of {mount.source}; "
            f"unmount it first: fusermount3 -u {mountpoint}"
        )
    return mount


def describe_live(mount: Mount) -> str:
    if mount.fstype == FSTYPE:
        return (
            f"{mount.path} is already a cachefs mount of {mount.source}; "
            f"unmount it first: cachefs umount {mount.path}"
        )
    return (
        f"{mount.path} is already the mountpoint of {mount.source} ({mount.fstype}); choose another directory"
    )


def check_directory(mountpoint: Path) -> None:
    """Refuse what cannot be mounted on, and a directory whose files the mount would hide."""
    try:
        status = mountpoint.stat()
        if not stat.S_ISDIR(status.st_mode):
            raise UserError(f"the mountpoint {mountpoint} is not a directory")
        with os.scandir(mountpoint) as entries:
            if next(entries, None) is not None:
                raise UserError(
                    f"the mountpoint {mountpoint} is not empty and the mount would hide what is there; "
                    "choose an empty directory"
                )
    except FileNotFoundError:
        raise UserError(
            f"the mountpoint {mountpoint} does not exist; create it: mkdir -p {mountpoint}"
        ) from None
    except NotADirectoryError:
        raise UserError(
            f"the mountpoint {mountpoint} does not exist: a part of its path is no directory"
        ) from None
    except PermissionError:
        raise UserError(
            f"the mountpoint {mountpoint} cannot be read by you; choose a directory of your own"
        ) from None
    # fusermount3 asks for the same two things, in less helpful words.
    sticky_of_another = status.st_mode & stat.S_ISVTX and status.st_uid != os.geteuid()
    if os.geteuid() != 0 and (sticky_of_another or not os.access(mountpoint, os.W_OK)):
        raise UserError(
            f"the mountpoint {mountpoint} belongs to another user; choose a directory of your own"
        )


def check_fuse(allow_other: bool) -> None:
    """Refuse a machine on which no FUSE mount is possible for this user."""
    try:
        device = os.stat(FUSE_DEVICE)
    except OSError:
        device = None
    if device is None or not stat.S_ISCHR(device.st_mode):
        raise UserError(
            f"{FUSE_DEVICE} is missing; load the module (modprobe fuse), "
            f"or start the container with --device {FUSE_DEVICE} --cap-add SYS_ADMIN"
        )
    if not os.access(FUSE_DEVICE, os.R_OK | os.W_OK):
        raise UserError(f"{FUSE_DEVICE} may not be opened by you; ask for read and write permission on it")
    if os.geteuid() == 0:
        return
    if shutil.which("fusermount3") is None:
        raise UserError("fusermount3 is missing; install it: apt-get install fuse3")
    if allow_other and not _user_allow_other():
        raise UserError(
            f"allow_other is not permitted; put the line user_allow_other into {FUSE_CONF}, or leave it out"
        )


def _user_allow_other() -> bool:
    try:
        lines = Path(FUSE_CONF).read_text(errors="replace").splitlines()
    except OSError:
        return False
    return any(line.strip() == "user_allow_other" for line in lines)


def unmount(path: Path, *, lazy: bool = False) -> None:
    """Take the uppermost mount at ``path`` away; OSError EBUSY while files there are open."""
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.umount2(os.fsencode(path), _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0)) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(path))
        return
    fusermount = shutil.which("fusermount3")
    if fusermount is None:
        raise UserError("fusermount3 is missing; install it: apt-get install fuse3")
    command = [fusermount, "-u", *(["-z"] if lazy else []), "--", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env={"LC_ALL": "C"})
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "fusermount3 failed"
        code = errno.EBUSY if "busy" in reason else errno.EPERM
        raise OSError(code, reason.rpartition("fusermount3: ")[2], str(path))


def clear_dead(mount: Mount) -> Mount | None:
    """Take away a dead cachefs mount and dead ones stacked below it; what is left at its place."""
    left: Mount | None = mount
    while left is not None and left.fstype == FSTYPE and (left == mount or is_dead(left)):
        gone = left
        try:
            unmount(mount.path, lazy=True)
        except OSError as error:
            raise UserError(
                f"the dead mount at {mount.path} cannot be taken away ({error.strerror}); "
                f"as root: umount -l {mount.path}"
            ) from None
        left = mounted_at(mount.path)
        if left == gone:
            raise UserError(f"the dead mount at {mount.path} cannot be taken away; umount -l {mount.path}")
    return left
