"""``-o`` as mount(8), fstab and people give it."""

from pathlib import Path

import pytest

from cachefs.config import MountConfig, parse_age, parse_compress, parse_mount_options, split_options
from cachefs.errors import UsageError, UserError


def test_known_options_and_values() -> None:
    assert parse_mount_options(["allow_other,max_size=300M", "keep_torn,fsname=a b"]) == {
        "allow_other": "",
        "max_size": "300M",
        "keep_torn": "",
        "fsname": "a b",
    }


def test_the_last_one_wins() -> None:
    assert parse_mount_options(["max_size=1G,max_size=2G", "max_size=3G"]) == {"max_size": "3G"}


@pytest.mark.parametrize(
    "text",
    [
        "rw,noauto,nofail,_netdev,user,users,dev,suid",
        "defaults,noatime,relatime,exec,nodev,nosuid,auto",
        "x-systemd.automount,x-systemd.idle-timeout=60,comment=hello",
        "",
        ",,",
    ],
)
def test_what_others_add_is_ignored(text: str) -> None:
    assert parse_mount_options([text]) == {}


def test_read_only_is_refused() -> None:
    with pytest.raises(UserError, match="read-only"):
        parse_mount_options(["noauto,ro"])


@pytest.mark.parametrize("text", ["max_read=4096", "bogus", "maxsize=3G", "x"])
def test_unknown_options_are_refused_with_the_known_ones(text: str) -> None:
    with pytest.raises(UsageError, match=r"known are allow_other.*max_size"):
        parse_mount_options([text])


@pytest.mark.parametrize("text", ["max_size", "max_size=", "fsname", "log_file="])
def test_a_value_is_needed(text: str) -> None:
    with pytest.raises(UsageError, match="needs a value"):
        parse_mount_options([text])


def test_a_flag_takes_no_value() -> None:
    with pytest.raises(UsageError, match="takes no value"):
        parse_mount_options(["allow_other=yes"])


def test_commas_can_be_escaped() -> None:
    assert split_options(r"fsname=a\,b\\c,rw") == [r"fsname=a,b\c", "rw"]


def test_fuse_options() -> None:
    config = MountConfig(Path("/a,b\\c"), Path("/m"), allow_other=True)
    assert r"fsname=/a\,b\\c" in config.fuse_options()
    assert {
        "allow_other",
        "default_permissions",
        "nodev",
        "nosuid",
        "subtype=cachefs",
    } < config.fuse_options()
    assert not any("max_read" in option for option in config.fuse_options())
    assert "allow_other" not in MountConfig(Path("/s"), Path("/m")).fuse_options()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("idle", ("idle", 1)), ("always:19", ("always", 19)), ("idle:3", ("idle", 3)), ("off", ("off", 1))],
)
def test_compress(text: str, expected: tuple[str, int]) -> None:
    assert parse_compress(text) == expected


@pytest.mark.parametrize(
    "text", ["", "on", "idle:", "idle:0", "idle:20", "always:x", "off:3", "idle:-1", "IDLE"]
)
def test_bad_compress(text: str) -> None:
    with pytest.raises(UsageError, match="idle"):
        parse_compress(text)


@pytest.mark.parametrize(("text", "seconds"), [("7d", 604800), ("12h", 43200), ("30m", 1800), ("off", 0)])
def test_ages(text: str, seconds: int) -> None:
    assert parse_age(text) == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "-1d", "0d", "1.5h", "7 d", "never", "9999999d"])
def test_what_is_no_age(text: str) -> None:
    with pytest.raises(UsageError, match="7d, 12h or off"):
        parse_age(text)
