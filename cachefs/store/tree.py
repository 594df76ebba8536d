"""The tree: inodes, dirents, extended attributes, and each file's recipe.

Every change goes into the index's pending layer, so a call either changes
everything it should or nothing, and takes microseconds. Called from the event
loop's thread only. Errors are OSError with the errno that the caller sees.

An inode that was unlinked while the kernel still knows it stays as an *orphan*
until `release_orphan`, or until the next start.
"""

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterator
from typing import NamedTuple

from cachefs.store.index import Index
from cachefs.store.recipe import Recipe
from cachefs.store.records import Dirent, Inode, be, be_pair, of_be

ROOT = 1
NAME_MAX = 255
PIN = b"user.cachefs.pin"
RECORDS_A_PAGE = 680
"""24-byte records a recipe page: with LMDB's header it fills four disk pages to the byte."""

_END = b"\xff" * 9


_REALTIME_COARSE = 5  # linux/time.h; the time module has no name for it


def clock() -> int:
    """Now, in ns, by the clock that the kernel stamps files with; up to 4 ms behind `time.time_ns`.

    A client may have the kernel set one time and cachefs the next, and must not see them go back.
    """
    return time.clock_gettime_ns(_REALTIME_COARSE)


def private(mode: int) -> int:
    """A mode without any bit for group and others, setuid, setgid or sticky."""
    return stat.S_IFMT(mode) | mode & 0o700


class Child(NamedTuple):
    cookie: int
    name: bytes
    ino: int
    kind: int


class Tree:
    """Files and directories of a store."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.pinned: set[int] = set()
        self.pin_changes = 0
        """How often a file was pinned or let go, or a pinned one changed, since the start."""
        with index.snapshot() as txn:
            cursor = txn.cursor(index.dbs["inodes"])
            self._next_ino = of_be(cursor.key()) + 1 if cursor.last() else ROOT + 1
            for key in txn.cursor(index.dbs["xattrs"]).iternext(values=False):
                if key[8:] == PIN:
                    self.pinned.add(of_be(key[:8]))
        if not index.readonly and index.get("inodes", be(ROOT)) is None:
            now = clock()
            root = Inode(
                stat.S_IFDIR | 0o700, os.getuid(), os.getgid(), 2, 0, now, now, now, now, now, 0, ROOT, 0
            )
            self.put(ROOT, root)

    # -- inodes

    def get(self, ino: int) -> Inode:
        value = self.index.get("inodes", be(ino))
        if value is None:
            raise OSError(errno.ESTALE, "no such inode")
        return Inode.unpack(value)

    def put(self, ino: int, inode: Inode) -> None:
        self.index.put("inodes", be(ino), inode.pack())

    def change(self, ino: int, **fields: int) -> Inode:
        inode = self.get(ino)._replace(**fields)
        self.put(ino, inode)
        return inode

    def touch(self, ino: int) -> None:
        """Note a use now; it orders eviction."""
        self.set_use(ino, time.time_ns())

    def set_use(self, ino: int, when: int) -> None:
        """Note a use at ``when`` (ns), as utimensat does. The latest use counts."""
        inode = self.get(ino)
        if when > inode.last_use:
            self._use(ino, inode, when)

    def _use(self, ino: int, inode: Inode, when: int) -> None:
        if stat.S_ISREG(inode.mode) and inode.nlink:
            self.index.delete("uses", be_pair(inode.last_use, ino))
            self.index.put("uses", be_pair(when, ino), b"")
        self.put(ino, inode._replace(last_use=when))

    # -- dirents

    def lookup(self, parent: int, name: bytes) -> Dirent | None:
        value = self.index.get("dirents", be(parent) + name)
        return Dirent.unpack(value) if value else None

    def require(self, parent: int, name: bytes) -> Dirent:
        dirent = self.lookup(parent, name)
        if dirent is None:
            raise OSError(errno.ENOENT, "no such name")
        return dirent

    def name_of(self, inode: Inode) -> bytes:
        value = self.index.get("cookies", be_pair(inode.parent, inode.cookie))
        if value is None:
            raise OSError(errno.ENOENT, "not linked")
        return value[20:]

    def children(self, parent: int, after: int = 0) -> Iterator[Child]:
        """Entries whose cookie is greater than ``after``, in the order they were made."""
        for key, value in self.index.scan("cookies", be_pair(parent, after + 1), be(parent) + _END):
            dirent = Dirent.unpack(value[:20])
            yield Child(of_be(key[8:]), value[20:], dirent.ino, dirent.kind)

    def walk(self, parent: int = ROOT, prefix: bytes = b"") -> Iterator[tuple[bytes, int]]:
        """(path, inode number) of every file below a directory."""
        # No recursion: a tree may be deeper than Python's stack.
        above = [(prefix, self.children(parent))]
        while above:
            prefix, children = above[-1]
            child = next(children, None)
            if child is None:
                above.pop()
            elif child.kind == stat.S_IFDIR:
                above.append((prefix + child.name + b"/", self.children(child.ino)))
            else:
                yield prefix + child.name, child.ino

    def _link(self, parent: int, name: bytes, ino: int, inode: Inode, cookie: int = 0) -> Inode:
        """Give an inode its name; ``cookie`` is one that just became free, 0 for a new one."""
        cookie = cookie or time.time_ns()
        while self.index.get("cookies", be_pair(parent, cookie)) is not None:
            cookie += 1
        kind = stat.S_IFMT(inode.mode)
        dirent = Dirent(ino, cookie, kind).pack()
        self.index.put("dirents", be(parent) + name, dirent)
        self.index.put("cookies", be_pair(parent, cookie), dirent + name)
        return inode._replace(parent=parent, cookie=cookie)

    def _unlink(self, parent: int, name: bytes, cookie: int) -> None:
        self.index.delete("dirents", be(parent) + name)
        self.index.delete("cookies", be_pair(parent, cookie))

    def _changed(self, parent: int, subdirs: int = 0) -> None:
        inode, now = self.get(parent), clock()
        self.put(parent, inode._replace(mtime=now, ctime=now, nlink=inode.nlink + subdirs))

    def create(self, parent: int, name: bytes, mode: int, uid: int, gid: int) -> tuple[int, Inode]:
        """A new empty file or directory, by the type bits of ``mode``; it is made private."""
        if len(name) > NAME_MAX:
            raise OSError(errno.ENAMETOOLONG, "name too long")
        if not self.get(parent).nlink:
            raise OSError(errno.ENOENT, "directory was removed")
        if self.lookup(parent, name) is not None:
            raise OSError(errno.EEXIST, "name exists")
        ino, now = self._next_ino, clock()
        self._next_ino += 1
        is_dir = stat.S_ISDIR(mode)
        inode = Inode(private(mode), uid, gid, 2 if is_dir else 1, 0, now, now, now, now, now, 0, parent, 0)
        inode = self._link(parent, name, ino, inode)
        self.put(ino, inode)
        if not is_dir:
            self._count(inode, 1)
            self.index.put("uses", be_pair(now, ino), b"")
        self._changed(parent, subdirs=int(is_dir))
        return ino, inode

    def _count(self, inode: Inode, sign: int) -> None:
        counters = self.index.active.counters
        counters["entries"] += sign
        counters["logical_bytes"] += sign * inode.size
        counters["row_bytes"] += sign * inode.row_bytes

    def unlink(self, parent: int, name: bytes) -> int:
        """Take a file's name away; its inode number, now an orphan."""
        dirent = self.require(parent, name)
        if dirent.kind == stat.S_IFDIR:
            raise OSError(errno.EISDIR, "is a directory")
        self._unlink(parent, name, dirent.cookie)
        self._orphan(dirent.ino)
        self._changed(parent)
        return dirent.ino

    def rmdir(self, parent: int, name: bytes) -> int:
        dirent = self.require(parent, name)
        self._check_empty_dir(dirent)
        self._unlink(parent, name, dirent.cookie)
        self._orphan(dirent.ino)
        self._changed(parent, subdirs=-1)
        return dirent.ino

    def _check_empty_dir(self, dirent: Dirent) -> None:
        if dirent.kind != stat.S_IFDIR:
            raise OSError(errno.ENOTDIR, "not a directory")
        if next(self.children(dirent.ino), None) is not None:
            raise OSError(errno.ENOTEMPTY, "directory not empty")

    def _orphan(self, ino: int) -> None:
        inode = self.get(ino)
        if stat.S_ISREG(inode.mode):
            self._count(inode, -1)
            self.index.delete("uses", be_pair(inode.last_use, ino))
        self._unpin(ino)
        self.put(ino, inode._replace(nlink=0, ctime=clock()))
        self.index.put("orphans", be(ino), b"")

    def rename(self, parent: int, name: bytes, to_parent: int, to_name: bytes, *,
               replace: bool = True, exchange: bool = False) -> int | None:  # fmt: skip
        """Move a name; the inode number it replaced, now an orphan, or None."""
        if len(to_name) > NAME_MAX:
            raise OSError(errno.ENAMETOOLONG, "name too long")
        source = self.require(parent, name)
        if not self.get(to_parent).nlink:
            raise OSError(errno.ENOENT, "directory was removed")
        target = self.lookup(to_parent, to_name)
        if exchange:
            self._exchange(parent, name, source, to_parent, to_name, self.require(to_parent, to_name))
            return None
        if target is not None:
            if not replace:
                raise OSError(errno.EEXIST, "name exists")
            if target.ino == source.ino:
                return None
            if source.kind == stat.S_IFDIR:
                self._check_empty_dir(target)
            elif target.kind == stat.S_IFDIR:
                raise OSError(errno.EISDIR, "is a directory")
            self._unlink(to_parent, to_name, target.cookie)
            self._orphan(target.ino)
        # Who is listing the directory must not meet a name or a file twice.
        cookie = target.cookie if target is not None else source.cookie if parent == to_parent else 0
        self._move(parent, name, source, to_parent, to_name, cookie)
        is_dir = int(source.kind == stat.S_IFDIR)
        self._changed(parent, subdirs=-is_dir)
        self._changed(to_parent, subdirs=is_dir - (is_dir if target is not None else 0))
        return target.ino if target is not None else None

    def _move(self, parent: int, name: bytes, dirent: Dirent, to_parent: int, to_name: bytes,
              cookie: int) -> None:  # fmt: skip
        self._unlink(parent, name, dirent.cookie)
        inode = self._link(to_parent, to_name, dirent.ino, self.get(dirent.ino), cookie)
        self.put(dirent.ino, inode._replace(ctime=clock()))

    def _exchange(self, parent: int, name: bytes, one: Dirent, to_parent: int, to_name: bytes,
                  other: Dirent) -> None:  # fmt: skip
        if one.ino == other.ino:
            return
        self._unlink(to_parent, to_name, other.cookie)
        self._move(parent, name, one, to_parent, to_name, other.cookie)
        inode = self._link(parent, name, other.ino, self.get(other.ino), one.cookie)
        self.put(other.ino, inode._replace(ctime=clock()))
        gain = int(one.kind == stat.S_IFDIR) - int(other.kind == stat.S_IFDIR)
        self._changed(parent, subdirs=-gain)
        self._changed(to_parent, subdirs=gain)

    # -- orphans

    def empty_orphan(self, ino: int) -> None:
        """Let go of an unlinked file's blocks; its attributes stay."""
        if self.index.get("orphans", be(ino)) is not None and stat.S_ISREG(self.get(ino).mode):
            self._replace_recipe(ino, Recipe())

    def release_orphan(self, ino: int) -> None:
        """Forget an unlinked inode and its content."""
        if self.index.get("orphans", be(ino)) is None:
            return
        inode = self.get(ino)
        if stat.S_ISREG(inode.mode):
            self._replace_recipe(ino, Recipe())
        for table in ("xattrs",):
            for key, _ in list(self.index.scan(table, be(ino), be(ino) + b"\xff" * 256)):
                self.index.delete(table, key)
        for table in ("inodes", "about", "orphans"):
            self.index.delete(table, be(ino))

    def orphans(self) -> list[int]:
        return [of_be(key) for key, _ in self.index.scan("orphans", b"", _END)]

    def renew(self, ino: int) -> int:
        """Give a file's name and all it has to a new inode; the old number, now an orphan."""
        old = self.get(ino)
        name = self.name_of(old)
        self._unlink(old.parent, name, old.cookie)
        self._orphan(ino)
        new = self._next_ino
        self._next_ino += 1
        inode = self._link(old.parent, name, new, old._replace(size=0, row_bytes=0), old.cookie)
        self.put(new, inode)
        self._count(inode, 1)
        self.index.put("uses", be_pair(inode.last_use, new), b"")
        self.set_content(new, self.recipe(ino), old.row_bytes, self.about(ino))
        for xattr in self.xattrs(ino):
            self.set_xattr(new, xattr, self.xattr(ino, xattr) or b"")
        self.put(new, self.get(new)._replace(ctime=old.ctime))
        return ino

    # -- content

    def recipe(self, ino: int) -> Recipe:
        return Recipe.from_pages([value for _, value in self.index.scan("recipes", be(ino), be(ino) + _END)])

    def set_content(self, ino: int, recipe: Recipe, row_bytes: int, about: bytes | None) -> None:
        """Make ``recipe`` the file's content. ``about``: JSON for `cachefs ls`, None for none."""
        self._replace_recipe(ino, recipe)
        old = self.get(ino)
        new = old._replace(size=recipe.size, row_bytes=row_bytes)
        self.put(ino, new)
        self.pin_changes += ino in self.pinned
        if old.nlink:
            self._count(old, -1)
            self._count(new, 1)
        if about is not None:
            self.index.put("about", be(ino), about)
        elif self.index.get("about", be(ino)) is not None:
            self.index.delete("about", be(ino))

    def _replace_recipe(self, ino: int, recipe: Recipe) -> None:
        refs = self.index.active.refs
        try:
            old = self.recipe(ino)
        except OSError:  # what it named stays counted, until a repair
            old = Recipe()
            self._drop_pages(ino)
        for source, sign in ((old, -1), (recipe, 1)):
            ids, counts = source.blocks()
            for block, count in zip(ids.tolist(), counts.tolist(), strict=True):
                refs[block] += sign * count
        pages = recipe.pages(RECORDS_A_PAGE)
        for number, page in enumerate(pages):
            key = be(ino) + number.to_bytes(4, "big")
            if self.index.get("recipes", key) != page:
                self.index.put("recipes", key, page)
        had = -(-len(old) // RECORDS_A_PAGE)
        for number in range(len(pages), had):
            self.index.delete("recipes", be(ino) + number.to_bytes(4, "big"))

    def _drop_pages(self, ino: int) -> None:
        """Delete a recipe that cannot be read."""
        for number in range(1 << 32):
            key = be(ino) + number.to_bytes(4, "big")
            with contextlib.suppress(OSError):
                if self.index.get("recipes", key) is None:
                    return
            self.index.delete("recipes", key)

    def about(self, ino: int) -> bytes | None:
        return self.index.get("about", be(ino))

    # -- extended attributes

    def xattr(self, ino: int, name: bytes) -> bytes | None:
        return self.index.get("xattrs", be(ino) + name)

    def set_xattr(self, ino: int, name: bytes, value: bytes) -> None:
        if len(name) > NAME_MAX or len(value) > 65536:
            raise OSError(errno.ERANGE, "attribute too large")
        self.get(ino)
        self.index.put("xattrs", be(ino) + name, value)
        if name == PIN:
            self.pinned.add(ino)
            self.pin_changes += 1

    def _unpin(self, ino: int) -> None:
        if ino in self.pinned:
            self.pinned.discard(ino)
            self.pin_changes += 1

    def remove_xattr(self, ino: int, name: bytes) -> None:
        if self.xattr(ino, name) is None:
            raise OSError(errno.ENODATA, "no such attribute")
        self.index.delete("xattrs", be(ino) + name)
        if name == PIN:
            self._unpin(ino)

    def xattrs(self, ino: int) -> list[bytes]:
        return [key[8:] for key, _ in self.index.scan("xattrs", be(ino), be(ino) + b"\xff" * 256)]
