"""What a mount is asked to be: the command line and ``-o`` options as one value."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cachefs.errors import UsageError, UserError

# Options of `mount -o` that mean something to cachefs, and whether they take a value.
KNOWN = {
    "allow_other": False,
    "compress": True,
    "debug": False,
    "foreground": False,
    "fsname": True,
    "keep_torn": False,
    "log_file": True,
    "max_size": True,
    "noexec": False,
    "scrub": True,
    "writeback": True,
}

WRITEBACK = ("auto", "on", "off")

SCRUB_AGE = "30d"
"""As often as distributions scrub btrfs and ZFS: bits rot over months, and a pass reads everything."""

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

# What mount(8), fstab and systemd add for themselves, and what cachefs does anyway
# (default_permissions, nodev, nosuid, noatime). mount.fuse3 run by root always
# appends "dev,suid"; the mount stays nodev and nosuid all the same.
_IGNORED = frozenset(
    """
    rw defaults auto noauto nofail _netdev user nouser users nousers owner group
    exec dev nodev suid nosuid atime noatime diratime nodiratime relatime norelatime
    strictatime nostrictatime lazytime nolazytime sync async dirsync default_permissions
    """.split()  # noqa: SIM905
)
_IGNORED_VALUES = ("x-", "X-", "comment=", "user=", "uhelper=", "helper=", "subtype=")


@dataclass(frozen=True, slots=True)
class MountConfig:
    """One mount. Paths are absolute; ``max_bytes`` None means what the store remembers."""

    store: Path
    mountpoint: Path
    max_bytes: int | None = None
    foreground: bool = False
    debug: bool = False
    allow_other: bool = False
    keep_torn: bool = False
    noexec: bool = False
    writeback: str = "auto"
    """Whether the kernel gathers small writes: one of `WRITEBACK`."""
    compress: str = "idle"
    """When blocks are compressed: ``idle``, ``always`` (when they are written) or ``off``."""
    compress_level: int = 1
    fsname: str = ""
    log_file: Path | None = None
    scrub_seconds: int = 0

    def fuse_options(self) -> set[str]:
        """What libfuse is given. Never max_read: libfuse 3 refuses the mount with it."""
        options = {
            "default_permissions",  # without it the kernel checks nothing at all
            "nodev",
            "nosuid",
            "noatime",
            "subtype=cachefs",
            f"fsname={_escape(self.fsname or str(self.store))}",
        }
        if self.allow_other:
            options.add("allow_other")
        if self.noexec:
            options.add("noexec")
        return options


def parse_compress(text: str) -> tuple[str, int]:
    """(mode, level) of ``MODE[:LEVEL]``. Raises UsageError."""
    mode, colon, level = text.partition(":")
    if mode not in ("idle", "always", "off"):
        raise UsageError(f"'{text}' is no way to compress: give idle, always or off, e.g. --compress=idle:3")
    if not colon:
        return mode, 1
    if not level.isascii() or not level.isdigit() or not 1 <= int(level) <= 19 or mode == "off":
        raise UsageError(f"'{text}': the level is a number from 1 to 19, for idle and always only")
    return mode, int(level)


def parse_age(text: str) -> int:
    """``7d``, ``12h`` or ``off`` in seconds; UsageError for anything else."""
    if text == "off":
        return 0
    number, unit = text[:-1], text[-1:]
    if not (number.isascii() and number.isdigit() and unit in _UNITS and 0 < int(number) < 10**6):
        raise UsageError(f"'{text}' is not an age; write it like 7d, 12h or off")
    return int(number) * _UNITS[unit]


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace(",", "\\,")


def split_options(text: str) -> list[str]:
    """Split ``a,b=c`` at commas; a backslash keeps the next character, as in libfuse."""
    parts, part, characters = [], "", iter(text)
    for character in characters:
        if character == "\\":
            part += next(characters, "\\")
        elif character == ",":
            parts.append(part)
            part = ""
        else:
            part += character
    return [part for part in [*parts, part] if part]


def parse_mount_options(texts: Iterable[str]) -> dict[str, str]:
    """The options of all ``-o`` that cachefs knows; a flag's value is ''. The last one wins."""
    found: dict[str, str] = {}
    for option in (option.strip() for text in texts for option in split_options(text)):
        key, equals, value = option.partition("=")
        if key == "ro":
            raise UserError("mounting read-only (-o ro) is not supported yet; leave out ro")
        if key in KNOWN:
            if KNOWN[key] and not value:
                raise UsageError(f"-o {key} needs a value: -o {key}=…")
            if equals and not KNOWN[key]:
                raise UsageError(f"-o {key} takes no value")
            found[key] = value
        elif option not in _IGNORED and not option.startswith(_IGNORED_VALUES):
            raise UsageError(f"unknown mount option '{key}'; known are {', '.join(KNOWN)}")
    return found
