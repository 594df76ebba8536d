"""Records and keys survive packing, at their largest numbers too, and keys sort as their numbers do."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cachefs.store import records
from cachefs.store.records import BlockRow, Dirent, Inode, Refs, VolumeRow

QUICK = settings(max_examples=100, deadline=None, derandomize=True)
U8, U16, U32, U64 = (st.integers(0, (1 << bits) - 1) for bits in (8, 16, 32, 64))
S64 = st.integers(-(1 << 63), (1 << 63) - 1)
DIGEST = st.binary(min_size=16, max_size=16)

BLOCKS = st.builds(BlockRow, DIGEST, U16, U8, U8, U32, U32, U32, U32, U16, U64, U64, U64)
INODES = st.builds(Inode, U32, U32, U32, U32, U64, S64, S64, S64, S64, U64, U64, U64, U64)
ALL = st.one_of(
    BLOCKS,
    INODES,
    st.builds(Refs, U32, U64),
    st.builds(Dirent, U64, U64, U32),
    st.builds(VolumeRow, U64, U64, U64),
)


@QUICK
@given(ALL)
def test_unpack_gives_what_was_packed(record: BlockRow | Inode | Refs | Dirent | VolumeRow) -> None:
    assert type(record).unpack(record.pack()) == record
    assert type(record).unpack(memoryview(record.pack())) == record


@QUICK
@given(U64, U64, U64, U64)
def test_keys(one: int, two: int, three: int, four: int) -> None:
    """`int_key` is LMDB's native integer key; big-endian keys sort like their numbers."""
    assert records.int_of(records.int_key(one)) == one
    assert records.of_be(records.be(one)) == one
    assert (records.be(one) < records.be(two)) == (one < two)
    pairs = records.be_pair(one, two), records.be_pair(three, four)
    assert (pairs[0] < pairs[1]) == ((one, two) < (three, four))
