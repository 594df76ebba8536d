"""The tree against a plain model: names, counts, cookies and figures are right after every step."""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cachefs.states.pieces import Chunk
from cachefs.store import Store
from cachefs.store.tree import PIN, ROOT, clock, private

from .filling import SMALL, add, content, fill, in_memory, make, noise
from .recount import assert_exact, assert_nothing_leaks

NAMES = st.sampled_from([b"a", b"b", b"a.meta", b"c" * 255, b"\xff\xfe"])
WHERE = st.integers(0, 30)


@dataclass
class Node:
    """A file or directory of the model; ``children`` in the order that they are listed.

    A new name comes last. A renamed file keeps its place, or takes that of the one it replaces.
    """

    is_dir: bool
    children: dict[bytes, int] = field(default_factory=dict)
    size: int = 0
    rows: int = 0
    xattrs: dict[bytes, bytes] = field(default_factory=dict)


class TreeMachine(RuleBasedStateMachine):
    """Inode numbers come from the tree; everything else is predicted."""

    def __init__(self) -> None:
        super().__init__()
        self.place = in_memory()
        self.store = Store.open(Path(self.place.name) / "store", SMALL)
        self.nodes: dict[int, Node] = {ROOT: Node(True)}
        self.orphans: set[int] = set()

    def teardown(self) -> None:
        self.store.close()
        self.place.cleanup()

    def directory(self, where: int) -> int:
        every = sorted(ino for ino, node in self.nodes.items() if node.is_dir and ino not in self.orphans)
        return every[where % len(every)]

    def any_inode(self, where: int) -> int:
        every = sorted(self.nodes)
        return every[where % len(every)]

    def expect(self, error: int, call: object, *arguments: object, **options: object) -> None:
        assert callable(call)
        with pytest.raises(OSError, match=rf"\[Errno {error}\]"):
            call(*arguments, **options)

    @rule(where=WHERE, name=NAMES, is_dir=st.booleans())
    def create(self, where: int, name: bytes, is_dir: bool) -> None:
        parent = self.directory(where)
        mode = stat.S_IFDIR | 0o755 if is_dir else stat.S_IFREG | 0o644
        create = self.store.tree.create
        if name in self.nodes[parent].children:
            self.expect(errno.EEXIST, create, parent, name, mode, 0, 0)
            return
        ino, inode = create(parent, name, mode, 0, 0)
        assert ino not in self.nodes
        assert inode == self.store.tree.get(ino)
        assert stat.S_IMODE(inode.mode) == (0o700 if is_dir else 0o600)
        self.nodes[parent].children[name] = ino
        self.nodes[ino] = Node(is_dir)

    @rule(where=WHERE, name=NAMES)
    def unlink(self, where: int, name: bytes) -> None:
        parent = self.directory(where)
        ino = self.nodes[parent].children.get(name)
        if ino is None:
            self.expect(errno.ENOENT, self.store.tree.unlink, parent, name)
        elif self.nodes[ino].is_dir:
            self.expect(errno.EISDIR, self.store.tree.unlink, parent, name)
        else:
            assert self.store.tree.unlink(parent, name) == ino
            self.orphaned(parent, name)

    @rule(where=WHERE, name=NAMES)
    def rmdir(self, where: int, name: bytes) -> None:
        parent = self.directory(where)
        ino = self.nodes[parent].children.get(name)
        if ino is None:
            self.expect(errno.ENOENT, self.store.tree.rmdir, parent, name)
        elif not self.nodes[ino].is_dir:
            self.expect(errno.ENOTDIR, self.store.tree.rmdir, parent, name)
        elif self.nodes[ino].children:
            self.expect(errno.ENOTEMPTY, self.store.tree.rmdir, parent, name)
        else:
            assert self.store.tree.rmdir(parent, name) == ino
            self.orphaned(parent, name)
            self.expect(errno.ENOENT, self.store.tree.create, ino, b"x", stat.S_IFREG, 0, 0)

    def orphaned(self, parent: int, name: bytes) -> None:
        self.orphans.add(self.nodes[parent].children.pop(name))

    def is_below(self, ino: int, top: int) -> bool:
        return ino == top or any(self.is_below(ino, c) for c in self.nodes[top].children.values())

    @rule(one=WHERE, name=NAMES, other=WHERE, to=NAMES, flag=st.sampled_from(["", "noreplace", "exchange"]))
    def rename(self, one: int, name: bytes, other: int, to: bytes, flag: str) -> None:
        parent, to_parent = self.directory(one), self.directory(other)
        options = {"replace": flag != "noreplace", "exchange": flag == "exchange"}
        rename = self.store.tree.rename
        here, there = self.nodes[parent].children, self.nodes[to_parent].children
        source, target = here.get(name), there.get(to)
        if source is not None and self.is_below(to_parent, source):
            return  # the kernel refuses that itself
        if flag == "exchange" and target is not None and self.is_below(parent, target):
            return
        error = 0
        if source is None or (flag == "exchange" and target is None):
            error = errno.ENOENT
        elif target is not None and flag == "noreplace":
            error = errno.EEXIST
        elif target is not None and target != source and not flag:
            if self.nodes[source].is_dir and not self.nodes[target].is_dir:
                error = errno.ENOTDIR
            elif self.nodes[source].is_dir and self.nodes[target].children:
                error = errno.ENOTEMPTY
            elif not self.nodes[source].is_dir and self.nodes[target].is_dir:
                error = errno.EISDIR
        if error:
            self.expect(error, rename, parent, name, to_parent, to, **options)
            return
        assert source is not None
        replaced = rename(parent, name, to_parent, to, **options)
        if flag == "exchange":
            assert target is not None
            assert replaced is None
            here[name], there[to] = target, source
        elif source != target:
            assert replaced == target
            if target is not None:
                self.orphans.add(target)
                there[to] = source
                del here[name]
            elif parent == to_parent:
                moved = [(to if key == name else key, ino) for key, ino in here.items()]
                here.clear()
                here.update(moved)
            else:
                there[to] = here.pop(name)

    @rule(where=WHERE, size=st.integers(0, 400_000), rows=st.integers(0, 100))
    def write(self, where: int, size: int, rows: int) -> None:
        ino = self.any_inode(where)
        if self.nodes[ino].is_dir:
            return
        fill(self.store, ino, [Chunk(noise(size, size))] if size else [], rows)
        self.nodes[ino].size, self.nodes[ino].rows = size, rows

    @rule(where=WHERE, name=st.sampled_from([b"user.x", PIN]), value=st.binary(max_size=4))
    def set_xattr(self, where: int, name: bytes, value: bytes) -> None:
        ino = self.any_inode(where)
        self.store.tree.set_xattr(ino, name, value)
        self.nodes[ino].xattrs[name] = value

    @rule(where=WHERE, name=st.sampled_from([b"user.x", PIN]))
    def remove_xattr(self, where: int, name: bytes) -> None:
        ino = self.any_inode(where)
        if name in self.nodes[ino].xattrs:
            self.store.tree.remove_xattr(ino, name)
            del self.nodes[ino].xattrs[name]
        else:
            self.expect(errno.ENODATA, self.store.tree.remove_xattr, ino, name)

    @rule()
    def forget_orphans(self) -> None:
        for ino in self.orphans:
            self.store.tree.release_orphan(ino)
            self.expect(errno.ESTALE, self.store.tree.get, ino)
            del self.nodes[ino]
        self.orphans.clear()

    @rule(where=WHERE)
    def use(self, where: int) -> None:
        self.store.tree.touch(self.any_inode(where))

    @rule()
    def commit(self) -> None:
        self.store.commit()
        assert_exact(self.store)
        assert_nothing_leaks(self.store)

    @rule()
    def reopen(self) -> None:
        """The next start is the same tree, without the orphans."""
        self.store.close()
        self.store = Store.open(Path(self.place.name) / "store")
        for ino in self.orphans:
            self.nodes.pop(ino)
        self.orphans.clear()
        assert_exact(self.store)

    @rule(where=WHERE, after=st.integers(0, 3))
    def list_from(self, where: int, after: int) -> None:
        """A listing continued at any cookie shows exactly the entries made after it."""
        every = list(self.store.tree.children(self.directory(where)))
        if every:
            at = every[min(after, len(every) - 1)].cookie
            assert list(self.store.tree.children(self.directory(where), at)) == [
                child for child in every if child.cookie > at
            ]

    @invariant()
    def names_agree(self) -> None:
        for ino, node in self.nodes.items():
            if not node.is_dir:
                continue
            children = list(self.store.tree.children(ino))
            assert [(child.name, child.ino) for child in children] == list(node.children.items())
            assert [child.cookie for child in children] == sorted({child.cookie for child in children})
            for child in children:
                inode = self.store.tree.get(child.ino)
                assert inode.parent == ino
                assert self.store.tree.name_of(inode) == child.name
                assert child.kind == stat.S_IFMT(inode.mode)

    @invariant()
    def inodes_agree(self) -> None:
        tree = self.store.tree
        for ino, node in self.nodes.items():
            subdirs = sum(self.nodes[child].is_dir for child in node.children.values())
            nlink = 0 if ino in self.orphans else 2 + subdirs if node.is_dir else 1
            assert tree.get(ino).nlink == nlink
            assert tree.get(ino).size == node.size
            assert {name: tree.xattr(ino, name) for name in tree.xattrs(ino)} == node.xattrs
        pinned = {ino for ino, node in self.nodes.items() if PIN in node.xattrs} - self.orphans
        assert tree.pinned - self.orphans == pinned
        assert set(tree.orphans()) == self.orphans

    @invariant()
    def figures_agree(self) -> None:
        files = [node for ino, node in self.nodes.items() if not node.is_dir and ino not in self.orphans]
        counters = self.store.counters()
        assert counters["entries"] == len(files)
        assert counters["logical_bytes"] == sum(node.size for node in files)
        assert counters["row_bytes"] == sum(node.rows for node in files)


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=25, stateful_step_count=30, deadline=None, derandomize=True)


def test_listing_goes_on_over_changes(store: Store) -> None:
    """Entries that stay are listed exactly once, however others come and go meanwhile."""
    made = {b"%04d" % number for number in range(1500)}
    for name in sorted(made):
        make(store, name)
    store.commit()
    seen: list[bytes] = []
    after = 0
    for step in range(len(made) // 2):
        page = list(islice(store.tree.children(ROOT, after), 7))
        seen += [child.name for child in page]
        after = page[-1].cookie
        store.tree.unlink(ROOT, b"%04d" % (2 * step + 1))
        make(store, b"new%d" % step)
        if step % 50 == 0:
            store.commit()
    assert [name for name in seen if name in made and int(name) % 2 == 0] == sorted(made)[::2]
    assert len(seen) == len(set(seen))


def test_names_and_attributes_that_are_too_long(store: Store) -> None:
    tree = store.tree
    ino = make(store, b"n" * 255)
    calls: list[Callable[[], object]] = [
        lambda: make(store, b"n" * 256),
        lambda: tree.rename(ROOT, b"n" * 255, ROOT, b"n" * 256),
        lambda: tree.set_xattr(ino, b"user." + b"x" * 251, b""),
        lambda: tree.set_xattr(ino, b"user.x", bytes(65537)),
    ]
    for call in calls:
        with pytest.raises(OSError, match="too l"):
            call()
    tree.set_xattr(ino, b"user." + b"x" * 250, bytes(65536))
    store.commit()
    assert tree.xattr(ino, b"user." + b"x" * 250) == bytes(65536)


def test_times_move_with_what_happens(store: Store) -> None:
    """A directory's mtime moves when a name in it does; a file's ctime when it is renamed."""
    tree = store.tree
    folder = tree.create(ROOT, b"d", stat.S_IFDIR | 0o700, 0, 0)[0]
    steps: list[Callable[[], object]] = [
        lambda: make(store, b"f", folder),
        lambda: tree.rename(folder, b"f", folder, b"g"),
        lambda: tree.unlink(folder, b"g"),
    ]
    for step in steps:
        tree.change(folder, mtime=0, ctime=0)
        before = clock()
        step()
        assert tree.get(folder).mtime >= before
        assert tree.get(folder).ctime >= before
    ino = make(store, b"f", folder)
    tree.change(ino, ctime=0)
    tree.rename(folder, b"f", ROOT, b"f")
    assert tree.get(ino).ctime > 0


def test_use_only_goes_forward(store: Store) -> None:
    ino = make(store, b"f")
    now = store.tree.get(ino).last_use
    store.tree.set_use(ino, now - 5)
    assert store.tree.get(ino).last_use == now
    store.tree.set_use(ino, now + 5)
    assert store.tree.get(ino).last_use == now + 5
    store.commit()
    assert_exact(store)


def test_modes_are_private() -> None:
    assert private(stat.S_IFREG | 0o4777) == stat.S_IFREG | 0o700
    assert private(stat.S_IFDIR | 0o1755) == stat.S_IFDIR | 0o700
    assert private(stat.S_IFREG | 0o644) == stat.S_IFREG | 0o600


def test_the_root(store: Store) -> None:
    root = store.tree.get(ROOT)
    assert (root.mode, root.nlink, root.parent) == (stat.S_IFDIR | 0o700, 2, ROOT)
    assert (root.uid, root.gid) == (os.getuid(), os.getgid())


def test_a_recipe_of_many_pages_grows_and_shrinks(store: Store) -> None:
    """Only as many pages are kept as the recipe has, and unchanged ones are not written again."""
    ino = add(store, b"f", [Chunk(bytes([n % 251]) * 40) for n in range(3000)])
    store.commit()
    assert_exact(store)
    whole = store.tree.recipe(ino)
    for size in (whole.size - 1, whole.size // 2, 40, 0):
        store.tree.set_content(ino, whole.cut(size), 0, None)
        assert store.tree.recipe(ino).size == size
        store.commit()
        assert_exact(store)
    store.tree.set_content(ino, whole, 0, None)
    store.commit()
    store.tree.set_content(ino, whole.append(whole.cut(40).records), 0, None)
    written = store.index.active.tables["recipes"]
    assert len(written) == 1


def test_a_file_renewed_is_the_same_under_another_number(store: Store) -> None:
    ino = add(store, b"f", [Chunk(noise(5000)), Chunk(noise(900, 1))])
    store.tree.set_xattr(ino, PIN, b"1")
    store.tree.set_xattr(ino, b"user.a", b"b")
    store.tree.change(ino, mtime=5)
    store.commit()
    before = store.tree.get(ino)
    assert store.tree.renew(ino) == ino
    new = store.tree.require(ROOT, b"f").ino
    assert new != ino
    assert store.tree.pinned == {new}
    after = store.tree.get(new)
    assert after == before
    assert store.tree.xattr(new, b"user.a") == b"b"
    assert content(store, new) == noise(5000) + noise(900, 1)
    assert store.tree.orphans() == [ino]
    store.tree.release_orphan(ino)
    store.commit()
    assert_exact(store)
    assert_nothing_leaks(store)


def test_a_tree_deeper_than_the_stack(store: Store) -> None:
    tree = store.tree
    parent, depth = ROOT, sys.getrecursionlimit() + 200
    for _ in range(depth):
        parent, _ = tree.create(parent, b"d", stat.S_IFDIR | 0o700, 0, 0)
    leaf, _ = tree.create(parent, b"leaf", stat.S_IFREG | 0o600, 0, 0)
    assert list(tree.walk()) == [(b"d/" * depth + b"leaf", leaf)]
