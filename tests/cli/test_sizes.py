"""Sizes as people write them."""

import os
from pathlib import Path

import pytest

from cachefs.errors import UsageError, UserError
from cachefs.sizes import GIB, MIB, default_max_bytes, format_size, parse_max_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1234", 1234),
        ("12B", 12),
        ("300M", 300 * MIB),
        ("300m", 300 * MIB),
        ("300MB", 300 * MIB),
        ("300 MiB", 300 * MIB),
        ("1.5GiB", 3 * GIB // 2),
        ("50g", 50 * GIB),
        ("2T", 2048 * GIB),
        ("4k", 4096),
    ],
)
def test_parse(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "M", "-5M", "1,5G", "12X", "1e9", "5 5", "0x10", "G5", "1..5M", "300Mi B", "٣M"]
)
def test_refuse(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize("text", ["0", "63M", "9999999999G"])
def test_unfit_for_a_store(text: str) -> None:
    with pytest.raises(UsageError, match="maximum size"):
        parse_max_size(text)


def test_smallest_bound() -> None:
    assert parse_max_size("64M") == 64 * MIB


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (300 * MIB, "300 MiB"),
        (GIB - 1, "1 GiB"),
        (3 * GIB // 2, "1.5 GiB"),
    ],
)
def test_format(size: int, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize("size", [1, 1000, 4096, 123 * MIB, 50 * GIB, 5 << 50])
def test_what_is_printed_can_be_read_back(size: int) -> None:
    assert parse_size(format_size(size)) == pytest.approx(size, rel=0.05)


def test_default_is_a_part_of_the_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def free(size: int) -> None:
        disk = os.statvfs_result((4096, 4096, 0, 0, size // 4096, 0, 0, 0, 0, 255))
        monkeypatch.setattr(os, "statvfs", lambda _: disk)

    new = tmp_path / "not" / "there"
    free(4 * GIB)
    assert default_max_bytes(new) == GIB
    free(4096 * GIB)
    assert default_max_bytes(new) == 50 * GIB
    free(200 * MIB)
    with pytest.raises(UserError, match="only 200 MiB free"):
        default_max_bytes(new)
