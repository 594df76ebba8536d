"""A save under way, until the file's last writer has gone: what befell it, and what it may be undone to."""

from typing import NoReturn

from cachefs.mount import versions
from cachefs.mount.stream import Stream
from cachefs.mount.versions import Version
from cachefs.store import Store, StoreFailed


class Save:
    """What is known of the writing to one inode since its last writer before had gone."""

    def __init__(self, store: Store, ino: int) -> None:
        self._store = store
        self._ino = ino
        self._holds: list[int] = []
        self._refused = -1
        """Where a write was refused and not made good since; what came before it is not the whole."""
        self.base: Version | None = None
        """The version that comes back if this one turns out to be torn."""
        self.failed = 0
        """The errno of what could not be stored; nothing is taken after that."""
        self.torn = False
        """As the last close found it; what is written after that is to be judged anew."""
        self.killed = False
        """A signal ended a process that wrote."""
        self.answered = False
        """A close was answered before all was placed."""

    # -- what could not be stored

    def fail(self, error: int) -> NoReturn:
        self.failed = error
        raise OSError(error, "not stored")

    def check(self) -> None:
        """Raises OSError if nothing can be taken any more."""
        if self.failed:
            self.fail(self.failed)
        if self._store.writer.failed:
            raise StoreFailed(self._store.writer.failed)

    def note_refused(self, offset: int) -> None:
        self._refused = offset

    def note_taken(self, offset: int, size: int) -> None:
        if offset <= self._refused < offset + size:
            self._refused = -1

    @property
    def has_gap(self) -> bool:
        """Whether something that was written is not there."""
        return bool(self.failed) or self._refused >= 0

    def is_lost(self, size: int, end: int) -> bool:
        """After a failure: whether bytes ``size`` … ``end`` are missing, or the old version comes back."""
        return size < end or self.base is not None

    # -- the version of before

    def start_over(self) -> None:
        """The file is emptied: nothing failed yet, and what the tree has of it is the version of before."""
        tree = self._store.tree
        inode = tree.get(self._ino)
        if self.base is None and inode.size and inode.nlink:
            self.base = Version(tree.recipe(self._ino), inode.row_bytes, tree.about(self._ino), inode.mtime)
        self.failed, self._refused = 0, -1

    def is_torn(self, stream: Stream | None, size: int) -> bool:
        """`versions.is_torn`, over the version of before."""
        return versions.is_torn(stream, self.base, size)

    def hold_base(self) -> None:
        """Before the tree lets go of its blocks: it may be wanted back."""
        if self.base is not None and not self._holds:
            ids = self.base.recipe.blocks()[0].tolist()
            self._holds = [block for block in ids if self._store.blocks.hold(block)]

    def take_holds(self) -> list[int]:
        """The blocks held for the version of before; who takes them must release them."""
        holds, self._holds = self._holds, []
        return holds

    def give_up_base(self) -> None:
        """Let go of the version of before."""
        self._store.blocks.release(self.take_holds())
        self.base = None
