"""SQLite on the mount, killed: its file is sound, and what it said is committed is there."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing

import pytest

from ..running import Mounted
from .sound import complaints

pytestmark = pytest.mark.crash

CLIENT = """
import random, sqlite3, sys
path, journal, synchronous, seed, first = sys.argv[1], sys.argv[2], sys.argv[3], *map(int, sys.argv[4:])
db = sqlite3.connect(path, timeout=60, isolation_level=None)
assert db.execute(f"PRAGMA journal_mode = {journal}").fetchone() == (journal,)
db.execute(f"PRAGMA synchronous = {synchronous}")
db.execute("PRAGMA cache_size = 20")  # pages: so dirty ones are written in the middle of a transaction
db.execute("CREATE TABLE IF NOT EXISTS rows (number INTEGER, part INTEGER, parts INTEGER, data BLOB)")
db.execute("CREATE INDEX IF NOT EXISTS by_number ON rows (number, part)")
chance = random.Random(seed)
print("begun", flush=True)
number = first
while True:
    parts = chance.choice([1, 2, 30])
    db.execute("BEGIN IMMEDIATE")
    for part in range(parts):
        data = random.Random(number * 100 + part).randbytes(chance.choice([10, 3_000, 20_000]))
        db.execute("INSERT INTO rows VALUES (?, ?, ?, ?)", (number, part, parts, data))
    db.execute("DELETE FROM rows WHERE number < ?", (number - 60,))
    db.execute("COMMIT")
    print(number, flush=True)
    number += 1
"""
KEPT = 50
"""Transactions that a client never deletes again before it is looked at."""


class Database:
    """A database on a mount, and the last transaction that was acknowledged."""

    def __init__(self, m: Mounted, journal: str, synchronous: str) -> None:
        self.m = m
        self.path = m.path / "db"
        self.journal = journal
        self.synchronous = synchronous
        self.last = 0

    def run(self, seed: int, seconds: float, kill: Callable[[subprocess.Popen[str]], None]) -> None:
        """Let a client commit for a while, end it, and note what it had been told."""
        arguments = [self.path, self.journal, self.synchronous, seed, self.last + 1]
        child = subprocess.Popen(
            [sys.executable, "-S", "-c", CLIENT, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == "begun\n"
            time.sleep(seconds)
            assert child.poll() is None, "the client ended by itself"
            kill(child)
        finally:
            child.kill()
        told = [int(line) for line in child.stdout.read().splitlines()]
        child.wait()
        child.stdout.close()
        self.last = max([self.last, *told])

    def check(self, may_miss: int = 0) -> None:
        """The file is sound, transactions are whole, and all but ``may_miss`` acknowledged ones are there."""
        with closing(sqlite3.connect(self.path, timeout=60)) as db:
            assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            rows = db.execute("SELECT number, part, parts, data FROM rows").fetchall()
        found = Counter(number for number, _, _, _ in rows)
        for number, part, parts, data in rows:
            assert found[number] == parts, f"transaction {number}: {found[number]} of {parts} rows"
            assert data == random.Random(number * 100 + part).randbytes(len(data))
        expected = range(max(1, self.last - KEPT), self.last + 1 - may_miss)
        missing = [number for number in expected if number not in found]
        assert not missing, f"{missing} of {self.last} acknowledged transactions are not there"
        self.last = max(found, default=0)


ROUNDS = [2, pytest.param(20, marks=pytest.mark.soak)]


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("journal", ["delete", "wal"])
def test_the_client_is_killed(mount: Callable[..., Mounted], journal: str, rounds: int) -> None:
    m = mount("--max-size", "300M")
    database = Database(m, journal, "FULL")
    for seed in range(rounds):
        database.run(seed, random.Random(seed).uniform(0.2, 1.0), lambda child: child.kill())
        database.check()
    print(f"\n{journal}: {rounds} clients killed, {database.last} transactions")
    assert database.last > 2 * rounds
    m.umount()
    assert complaints(m.store) == []


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize(
    ("journal", "synchronous"), [("delete", "EXTRA"), ("delete", "FULL"), ("wal", "FULL")]
)
def test_the_daemon_is_killed(
    mount: Callable[..., Mounted], journal: str, synchronous: str, rounds: int
) -> None:
    """With a rollback journal SQLite commits by removing it, and syncs its directory only for EXTRA.

    With FULL the last transaction, and only that, may be rolled back, as its manual says.
    """
    m = mount("--max-size", "300M")
    database = Database(m, journal, synchronous)

    def kill(child: subprocess.Popen[str]) -> None:
        os.kill(child.pid, signal.SIGSTOP)  # what it is told after this is not looked at
        m.kill()

    for seed in range(rounds):
        database.run(seed, random.Random(seed).uniform(0.2, 1.0), kill)
        assert complaints(m.store) == []
        m.mount()
        database.check(may_miss=int((journal, synchronous) == ("delete", "FULL")))
    print(f"\n{journal}, {synchronous}: {rounds} daemons killed, {database.last} transactions")
    assert database.last > 2 * rounds
