"""``cachefs explain``: what is recognised in a file, and nothing of what is in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from struct import pack
from typing import Any

import pytest

from ..data.load import real_states
from ..running import Mounted, environment, run_cachefs
from ..states import build

P = list(range(300))


def explain(path: Path) -> dict[str, Any]:
    done = run_cachefs("explain", "--json", path)
    assert (done.returncode, done.stderr) == (0, "")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def lines(path: Path) -> list[str]:
    done = run_cachefs("explain", path)
    assert (done.returncode, done.stderr) == (0, "")
    return [" ".join(line.split()) for line in done.stdout.splitlines()]


def test_a_state(tmp_path: Path) -> None:
    path = tmp_path / "chat.bin"
    path.write_bytes(
        build.ggsq(build.packed(P), build.kv(P, layers=30, width=68, type_id=8, ext=12), build.recurrent())
    )
    shown = lines(path)
    assert f"file {path}, {path.stat().st_size:,} bytes" in shown
    assert "container sequence state file (ggsq), version 4" in shown
    assert "tokens 300" in shown
    assert "modules kv + recurrent" in shown
    assert any(line.startswith("KV rows 1,224,000 bytes (98.") for line in shown)
    assert "stopped nowhere: recognised to the end" in shown
    table = shown[shown.index("") + 1 :]
    assert table[0] == "at byte what layers type cells row rows size"
    assert table[1] == "1,228 kv (ext 12, rotations) 30 layers 300"
    assert table[2] == "8,452 K × 30 0–29 q8_0 300 68 B 598 KiB"
    assert table[3].startswith("620,812 V × 30 0–29 q8_0 300 68 B")
    assert [line.split()[1] for line in table[4:]] == ["recurrent", "R", "S"]


def test_json(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    data = build.ggsn(P, build.kv(P, layers=2, width=512, v="transposed"), architecture="qwen3-next")
    path.write_bytes(data)
    found = explain(path)
    assert found["file"] == str(path)
    assert found["size"] == found["row_bytes"] + found["chunk_bytes"] == len(data)
    assert found["row_bytes"] == 4 * 300 * 512
    assert found["row_groups"]
    assert found["chunks"]
    assert (found["container"], found["version"], found["tokens"]) == ("ggsn", 11, 300)
    assert (found["architecture"], found["torn"], found["stopped"]) == ("qwen3-next", False, None)
    (module,) = found["modules"]
    assert (module["kind"], module["cells"], module["layers"]) == ("kv", 300, 2)
    section = module["sections"][3]
    at = section.pop("offset")
    assert section == {"layer": 1, "kind": "VT", "type": "f16", "row_bytes": 2, "cells": 300, "rows": 256}
    assert data[at : at + 12] == pack("<iII", 1, 2, 256)


def test_layers_that_differ_are_folded_by_kind(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(build.ggsq(P, build.kv(P, layers=40, width=[64, 128] * 20, v_layers=[0, 1, 2, 7])))
    shown = [line.split(" ", 1)[1] for line in lines(path) if " B " in line]
    assert shown == [
        "K × 20 some of 0–38 f16 300 64 B 375 KiB",
        "K × 20 some of 1–39 f16 300 128 B 750 KiB",
        "V × 2 0, 2 f16 300 64 B 37.5 KiB",
        "V × 2 1, 3 f16 300 128 B 75 KiB",
    ]


def test_where_and_why_it_stopped(tmp_path: Path) -> None:
    state = build.ggsq(P, build.kv(P, layers=3, width=64))
    broken = bytearray(state)
    second = 12 + 1200 + 8 + 3600 + 16 + 12 + 300 * 64
    broken[second : second + 12] = pack("<iQ", 7, 1 << 23)
    path = tmp_path / "x.bin"
    path.write_bytes(broken)
    assert (
        f"stopped at byte {second:,}: no header of K section 1 of 3: type 7, a row of 8388608 bytes"
        in lines(path)
    )
    assert explain(path)["stopped"]["offset"] == second
    path.write_bytes(state[:-50])
    assert "torn the headers promise 50 B more at least: the save was cut off" in lines(path)
    path.write_bytes(build.noise(200_000))
    assert "container none recognised" in lines(path)
    assert "stopped at byte 0: no module starts here" in lines(path)
    path.write_bytes(b"")
    assert f"file {path}, 0 bytes" in lines(path)


def test_other_containers(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(build.blob(build.kv(P)) + build.blob(build.recurrent()) * 2)
    shown = lines(path)
    assert "container sequence blob without a file header" in shown
    assert "modules kv + 2 recurrent, in 3 states" in shown
    path.write_bytes(build.kv(P))
    assert "container none, modules from the first byte on" in lines(path)


def test_no_tokens_and_no_content(tmp_path: Path) -> None:
    """Not even where a header should stand and something else does."""
    path = tmp_path / "x.bin"
    secret = b"my secret words, again and again "
    tokens = [77_001 + 13 * i for i in range(50)]
    inputs = [
        build.ggsq(build.packed(tokens), build.kv(P)),
        build.ggsn(tokens, build.kv(P), architecture="my secret words"),
        build.ggsq(tokens, build.kv(P)[: 4 + 4 + 3600 + 16 + 12 + 128 * 300 + 12], secret * 300),
        secret * 3000,
    ]
    for data in inputs:
        path.write_bytes(data)
        for options in ([], ["--json"]):
            shown = run_cachefs("explain", *options, path).stdout
            assert "secret" not in shown
            assert not any(str(token) in shown.replace(",", "") for token in tokens)
            assert str(int.from_bytes(secret[:4], "little")) not in shown


@pytest.mark.parametrize(
    "pack", ["dense-fa-off", "mla-indexer", "hybrid-indexer-ple", "deepseek4", "session"]
)
def test_real_states(pack: str, tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(next(data for name, data in real_states().items() if name.startswith(pack + "/")))
    shown = lines(path)
    assert "stopped nowhere: recognised to the end" in shown
    assert len(shown) < 40


def test_on_a_mount(mount: Callable[..., Mounted]) -> None:
    m = mount("--max-size", "64M")
    path = m.path / "chat.bin"
    path.write_bytes(build.ggsq(P, build.kv(P)))
    assert "container sequence state file (ggsq), version 4" in lines(path)


# Not wait4's figure: that is at least what the parent had when it forked.
EXPLAIN_AND_MEASURE = """
import re, sys
from cachefs.cli import main
sys.argv = ["cachefs", "explain", sys.argv[1]]
try:
    main()
except SystemExit as end:
    assert not end.code
print(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1], file=sys.stderr)
"""


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "big.bin"
    n = 4096
    with path.open("wb") as file:
        file.write(build.ggsq(range(n), pack("<II", 1, n), build.cell_table(range(n), [[0]] * n, 0)))
        file.write(pack("<IIII", 0, 10, 0, 0))
        row = build.noise(4096) * n
        for _ in range(20):
            file.write(pack("<iQ", 1, 4096) + row)
    assert path.stat().st_size > 300 << 20
    done = subprocess.run(
        [sys.executable, "-c", EXPLAIN_AND_MEASURE, path], capture_output=True, text=True, env=environment()
    )
    path.unlink()
    assert int(done.stderr) < 150 * 1024


def refused(*arguments: object, status: int = 1) -> str:
    done = run_cachefs("explain", *arguments)
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.startswith("cachefs: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_bad_input(tmp_path: Path) -> None:
    assert "No such file" in refused(tmp_path / "missing")
    assert "is a directory" in refused(tmp_path)
    assert "no regular file" in refused("/dev/null")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "no regular file" in refused(pipe)
    assert "Missing argument" in refused(status=2)
    (tmp_path / "file").write_bytes(b"")
    assert "Not a directory" in refused(tmp_path / "file" / "x")
    assert "File name too long" in refused(tmp_path / ("x" * 300))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"1")
    path.chmod(0)
    assert "Permission denied" in refused(path)
