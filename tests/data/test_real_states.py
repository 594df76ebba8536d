"""The committed states are what their README says, read by the oracle's own parser."""

from pathlib import Path

import pytest
from kvparse import NotAState, parse
from position_oracle import oracle

from .load import real_states

STATES = real_states()
STRUCTURES = {
    "dense": "kv",
    "dense-fa-off": "kv/T",
    "mrope": "kv/ext12",
    "swa": "kv+kv",
    "mla": "kv/K",
    "mla-indexer": "kv/K+kv/K",
    "mla-indexer-swa": "kv/K+kv/K+kv/K",
    "hybrid": "kv+recurrent",
    "hybrid-swa": "kv+kv+recurrent",
    "hybrid-indexer": "kv/K+recurrent+kv/K",
    "hybrid-indexer-ple": "kv/ext12+recurrent+kv/K/ext12",
    "deepseek4": "dsv4+kv+kv/K+csa+csa+csa+state+state+state",
    "session": "kv",
    "recurrent": "recurrent",
}


@pytest.mark.parametrize("name", STATES)
def test_structure(name: str) -> None:
    """Each state is read to its last byte, and a shortened or lengthened one is refused."""
    data = STATES[name]
    assert parse(data).family == STRUCTURES[name.split("/")[0]]
    for wrong in (data[:-1], data + b"\0", data[:-100]):
        with pytest.raises(NotAState):
            parse(wrong)


@pytest.mark.parametrize("pack", ["dense", "dense-fa-off", "mrope", "mla", "mla-indexer"])
def test_oracle_stores_a_grown_state_once(pack: str, tmp_path: Path) -> None:
    """.c is .a and three tokens: together they have the rows of .c, and each its own other bytes."""
    paths = [tmp_path / letter for letter in "ac"]
    for path in paths:
        path.write_bytes(
            next(
                data
                for name, data in STATES.items()
                if name.startswith(pack + "/") and f".{path.name}." in name
            )
        )
    both, longer = oracle(paths), oracle(paths[1:])
    assert not both.errors
    assert both.distinct_row_bytes == longer.distinct_row_bytes == longer.row_bytes
    assert both.stored == longer.row_bytes + both.other_bytes
    assert both.total == sum(path.stat().st_size for path in paths)


def test_oracle_names_what_it_does_not_understand(tmp_path: Path) -> None:
    """A foreign file is an error, and in none of the sums."""
    path = tmp_path / "foreign.bin"
    path.write_bytes(b"\0" * 5000)
    result = oracle([path])
    assert [where for where, _ in result.errors] == [path]
    assert result.total == 0
