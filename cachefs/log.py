"""Where the daemon's log goes: a file of bounded size, or standard error for a supervisor."""

import errno
import faulthandler
import io
import logging
import os
import sys
import threading
import types
from logging.handlers import MemoryHandler, RotatingFileHandler
from pathlib import Path

# The log lies in the store by default and so counts against the store's bound:
# it and its one predecessor never pass LOG_BYTES together.
LOG_BYTES = 1 << 20
LOG_NAME = "cachefs.log"

_PLAIN = "%(asctime)s %(levelname)s %(message)s"
_PRIORITY = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}

log = logging.getLogger("cachefs")


class _JournalFormatter(logging.Formatter):
    """The journal adds time and unit itself and reads the level from a ``<n>`` before each line."""

    def format(self, record: logging.LogRecord) -> str:
        prefix = f"<{_PRIORITY.get(record.levelno, 5)}>"
        return "\n".join(prefix + line for line in super().format(record).splitlines())


def _stderr_is_journal() -> bool:
    device, _, inode = os.environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        status = os.fstat(2)
        return (int(device), int(inode)) == (status.st_dev, status.st_ino)
    except (ValueError, OSError):
        return False


_held = MemoryHandler(capacity=10_000, flushLevel=logging.CRITICAL + 1, flushOnClose=False)


def hold() -> None:
    """Keep what is logged until `start` says where it goes."""
    logging.getLogger().addHandler(_held)
    logging.getLogger().setLevel(logging.INFO)


def start(file: Path | None, debug: bool) -> None:
    """Send all logging to ``file``, or to standard error; uncaught exceptions as well.

    A log that cannot be written (full disk, closed terminal) is lost in silence:
    the mount matters more.
    """
    logging.raiseExceptions = False
    handler: logging.Handler
    if file is None:
        handler = logging.StreamHandler(sys.stderr)
        journal = _stderr_is_journal()
        handler.setFormatter(_JournalFormatter("%(message)s") if journal else logging.Formatter(_PLAIN))
    else:
        handler = RotatingFileHandler(
            file, maxBytes=LOG_BYTES // 2, backupCount=1, encoding="utf-8", errors="backslashreplace"
        )
        handler.setFormatter(logging.Formatter(_PLAIN))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    _held.setTarget(handler)
    _held.flush()
    root.setLevel(logging.DEBUG if debug else logging.INFO)
    fuse = logging.getLogger("pyfuse3")
    fuse.setLevel(logging.INFO)  # its debug log is a line a request
    fuse.addFilter(_was_awaited)
    faulthandler.enable(file=stream(), all_threads=True)
    sys.excepthook = _uncaught
    sys.unraisablehook = _unraisable
    threading.excepthook = _uncaught_in_thread


def _was_awaited(record: logging.LogRecord) -> bool:
    """False for an answer that the kernel no longer waited for: it was unmounted during a last close."""
    text = record.getMessage()
    return not ("fuse_reply_* failed" in text and text.endswith(os.strerror(errno.ENOENT)))


def stream() -> io.TextIOBase:
    """The open log itself, for what must be written when Python cannot run."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is not None:
            return handler.stream  # type: ignore[no-any-return]
    return sys.__stderr__  # type: ignore[return-value]


def _uncaught(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    log.critical("uncaught exception", exc_info=(kind, error, trace))


def _uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None:
        name = args.thread.name if args.thread else "a thread"
        log.critical("uncaught exception in %s", name, exc_info=args.exc_value)


def _unraisable(args: "sys.UnraisableHookArgs") -> None:
    log.error("%s %r", args.err_msg or "exception ignored in", args.object, exc_info=args.exc_value)
