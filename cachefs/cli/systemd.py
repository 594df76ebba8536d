"""``cachefs systemd``: unit files that start a mount at boot."""

import re
import shlex
import sys
from pathlib import Path

import click

from cachefs.config import MountConfig
from cachefs.errors import UsageError
from cachefs.mount import mountpoint as places
from cachefs.sizes import parse_max_size

HELP = """\
Print a systemd unit that mounts STORE at MOUNTPOINT, with the commands that
install it in its first lines.

\b
  service   runs the daemon under systemd, which restarts it when it fails
  mount     what an fstab line becomes; other units can require the path

Enable one of the two, not both. The mountpoint must exist. --user is for a
service of your own, without root.

\b
Examples:
  cachefs systemd /var/lib/cachefs /mnt/kv
  cachefs systemd --user --max-size 20G ~/kv-store ~/kv
  cachefs systemd --unit mount /var/lib/cachefs /mnt/kv
"""


@click.command("systemd", help=HELP, short_help="Print unit files.")
@click.argument("store")
@click.argument("mountpoint")
@click.option("--unit", type=click.Choice(["service", "mount", "both"]), default="service", show_default=True)
@click.option("--max-size", metavar="SIZE", help="As for cachefs mount.")
@click.option("--user", is_flag=True, help="A service of the user's own systemd.")
def command(store: str, mountpoint: str, unit: str, max_size: str | None, user: bool) -> None:
    if user and unit != "service":
        raise UsageError("mount units need root; with --user only --unit service works")
    config = MountConfig(places.absolute(store), places.absolute(mountpoint))
    if max_size is not None:
        parse_max_size(max_size)
    texts = []
    if unit in ("service", "both"):
        texts.append(service_unit(config, max_size, user))
    if unit in ("mount", "both"):
        texts.append(mount_unit(config, max_size))
    print("\n".join(texts), end="")


def this_cachefs() -> list[str]:
    """The command that starts this very installation."""
    script = Path(sys.executable).parent / "cachefs"
    return [str(script)] if script.is_file() else [sys.executable, "-m", "cachefs"]


def service_unit(config: MountConfig, max_size: str | None, user: bool) -> str:
    name = f"cachefs-{escape_path(config.mountpoint)}.service"
    words = [*this_cachefs(), "mount", "--foreground"]
    words += ["--max-size", max_size] if max_size is not None else []
    words += ["--", str(config.store), str(config.mountpoint)]
    folder = "~/.config/systemd/user" if user else "/etc/systemd/system"
    return f"""\
{_heading(folder, name, user)}
[Unit]
Description=cachefs at {_literal(str(config.mountpoint))}
{_needs(config)}
[Service]
Type=notify
ExecStart={" ".join(_quoted(word) for word in words)}
Restart=on-failure
RestartSec=2
# The daemon unmounts on SIGTERM, after taking in what clients have written.
KillMode=mixed
TimeoutStopSec=180
UMask=0077
{_sandbox(user)}
[Install]
WantedBy={"default.target" if user else "multi-user.target"}
"""


def mount_unit(config: MountConfig, max_size: str | None) -> str:
    name = f"{escape_path(config.mountpoint)}.mount"
    options = ["nodev", "nosuid", *([f"max_size={max_size}"] if max_size is not None else [])]
    return f"""\
{_heading("/etc/systemd/system", name, False)}
#   # mount(8) looks for cachefs in the usual places only:
#   sudo ln -sf {shlex.join(this_cachefs()[:1])} /usr/local/bin/cachefs
[Unit]
Description=cachefs at {_literal(str(config.mountpoint))}
{_needs(config)}
[Mount]
What={_literal(str(config.store))}
Where={_literal(str(config.mountpoint))}
Type=fuse.cachefs
Options={_literal(",".join(options))}
TimeoutSec=180

[Install]
WantedBy=multi-user.target
"""


def _heading(folder: str, name: str, user: bool) -> str:
    ctl, sudo = ("systemctl --user", "") if user else ("sudo systemctl", "sudo ")
    file = f"{folder}/{shlex.quote(name)}"
    kind = "service" if name.endswith(".service") else "mount"
    again = f"cachefs systemd --unit {kind}{' --user' if user else ''} …"
    return f"""\
# {folder}/{name}
#
# Install:
#   {again} | {sudo}tee {file}
#   {ctl} daemon-reload
#   {ctl} enable --now {shlex.quote(name)}
#"""


def _needs(config: MountConfig) -> str:
    # The mountpoint itself must not be named: a service that requires the mount which
    # it makes would wait for itself.
    places_needed = dict.fromkeys([config.store, config.mountpoint.parent])
    return f"RequiresMountsFor={' '.join(_quoted(str(place)) for place in places_needed)}\n"


def _sandbox(user: bool) -> str:
    if user:
        return """\
# No sandbox here: it would switch on NoNewPrivileges, and fusermount3 is setuid.
"""
    return f"""\
# Only what needs no mount namespace of the service's own: in one (ProtectSystem,
# PrivateTmp, PrivateDevices, …) the mount would be invisible to everybody else.
NoNewPrivileges=yes
CapabilityBoundingSet=CAP_SYS_ADMIN CAP_DAC_OVERRIDE CAP_DAC_READ_SEARCH CAP_CHOWN CAP_FOWNER
DevicePolicy=closed
DeviceAllow={places.FUSE_DEVICE} rw
RestrictAddressFamilies=AF_UNIX
IPAddressDeny=any
RestrictNamespaces=yes
RestrictRealtime=yes
LockPersonality=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service @mount
SystemCallErrorNumber=EPERM
"""


def escape_path(path: Path) -> str:
    """``systemd-escape --path``, which need not be installed here."""
    text = str(path).strip("/")
    if not text:
        return "-"
    escaped = "".join(
        "-" if c == 0x2F else chr(c) if re.match(rb"[a-zA-Z0-9:_.]", bytes([c])) else f"\\x{c:02x}"
        for c in text.encode("utf-8", "surrogateescape")
    )
    return "\\x2e" + escaped[1:] if escaped.startswith(".") else escaped


def _literal(text: str) -> str:
    return text.replace("%", "%%")


def _quoted(word: str) -> str:
    word = _literal(word).replace("$", "$$")
    if re.fullmatch(r"[\w@%+=:,./$-]+", word, re.ASCII):
        return word
    escaped = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
