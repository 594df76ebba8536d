"""The daemon's life: background or foreground, signals, unmounting, its last words.

Nothing heavy is imported before the fork: trio, LMDB and libfuse are loaded,
and their threads and locks made, only in the process that goes on to use them.
"""

import json
import logging
import os
import signal
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NoReturn

from cachefs import log as logs
from cachefs.config import MountConfig
from cachefs.errors import UserError
from cachefs.mount import mountpoint as places
from cachefs.mount.allocator import keep_memory
from cachefs.sizes import format_size

if TYPE_CHECKING:
    from cachefs.store import Store

log = logging.getLogger("cachefs.daemon")

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

Ready = Callable[[], None]


class Stopped(BaseException):
    """A signal to stop came before the filesystem ran."""


@dataclass
class Launch:
    """One start of the daemon: what was asked, and what to tell whoever asked."""

    config: MountConfig
    dead: places.Mount | None = None  # lies at the mountpoint and is to be replaced
    notes: list[str] = field(default_factory=list)

    def use_bound(self, max_bytes: int) -> None:
        self.config = replace(self.config, max_bytes=max_bytes)

    def note(self, text: str) -> None:
        log.info("%s", text)
        self.notes.append(text)


def spawn(launch: Launch) -> list[str]:
    """Start the daemon and return its notes when the mount is usable.

    UserError is what the daemon failed with before that.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            if os.fork() == 0:  # no session leader any more: can never get a terminal
                _in_background(launch, writer)
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with open(reader, "rb") as pipe:
        answer = pipe.read()
    if not answer:
        where = launch.config.log_file or launch.config.store / logs.LOG_NAME
        raise UserError(f"the daemon ended before the mount was usable; {where} may say why")
    report = json.loads(answer)
    if "error" in report:
        raise UserError(report["error"])
    notes: list[str] = report["notes"]
    return notes


def _in_background(launch: Launch, writer: int) -> NoReturn:
    status = 1
    try:
        os.dup2(writer, 3)
        os.set_inheritable(3, False)
        # Whatever the caller had open (pipes it waits on, a lock of flock(1)) is not ours to keep.
        os.closerange(4, 1 << 20)
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        if null > 2:  # it may be one of them, where the caller had closed all three
            os.close(null)

        def report(**answer: object) -> None:
            # A caller that was interrupted closed its end: BrokenPipeError, and the mount is undone.
            try:
                os.write(3, json.dumps(answer).encode())
            finally:
                os.close(3)

        try:
            status = serve(launch, lambda: report(notes=launch.notes))
        except UserError as error:
            report(error=str(error))
        except Stopped:
            report(error="stopped by a signal before the mount was usable")
        except Exception as error:
            log.exception("the daemon could not start")
            report(error=f"unexpected {type(error).__name__}: {error}")
    finally:
        os._exit(status)


def run(launch: Launch) -> int:
    """Serve in this very process until unmounted or told to stop; the exit status."""
    try:
        return serve(launch, lambda: None)
    except Stopped:
        return 0


def serve(launch: Launch, ready: Ready) -> int:
    """Mount and serve until unmounted or told to stop; the exit status.

    ``ready`` is called once, when the mount answers.
    """
    config = launch.config
    os.umask(0o077)
    os.chdir("/")
    keep_memory()
    if config.foreground:
        logs.start(config.log_file, config.debug)
    else:
        logs.hold()
    with _early_signals():
        from cachefs.store import Store

        store = Store.open(config.store, config.max_bytes, mountpoint=str(config.mountpoint))
        try:
            if not config.foreground:  # not earlier: until now the directory may not be ours
                logs.start(config.log_file or config.store / logs.LOG_NAME, config.debug)
            status = _serve_store(launch, store, ready)
        except BaseException:
            _close(store)
            raise
        return status if _close(store) else 1


def _close(store: "Store") -> bool:
    _ignore_signals()
    try:
        store.close()
    except Exception:
        log.exception("the last changes could not be written to %s", store.path)
        return False
    log.info("closed %s", store.path)
    return True


def _serve_store(launch: Launch, store: "Store", ready: Ready) -> int:
    import pyfuse3
    import trio

    from cachefs.mount.life import Life
    from cachefs.mount.operations import CacheFS

    config = launch.config
    # Threads that hash and compress must hand the interpreter back quickly: every
    # LMDB call and every request waits for it.
    sys.setswitchinterval(0.0005)
    if store.shrunk:
        launch.note(
            f"evicted {format_size(store.shrunk)}: more was stored than the bound of "
            f"{format_size(store.max_bytes)} allows"
        )
    if launch.dead:
        if (left := places.clear_dead(launch.dead)) is not None:
            raise UserError(places.describe_live(left))
        places.check_directory(config.mountpoint)
        launch.note(f"replaced the dead mount at {config.mountpoint}")
    operations = CacheFS(store, config)
    # A signal that comes now waits until Life listens: no mount may stay behind.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    _mount(operations, config)
    life = Life(config, store.max_bytes, ready, STOPPING)
    try:
        trio.run(life.run, operations)
        return 0
    except BaseException as error:
        log.critical("the filesystem failed", exc_info=error)
        return 1
    finally:
        _ignore_signals()
        # What lies at the mountpoint by now may be somebody else's mount.
        ours = life.mounted()
        pyfuse3.close(unmount=ours)
        try:
            if ours and life.mounted():  # the connection was cut: libfuse leaves such a mount
                places.unmount(config.mountpoint, lazy=True)
            log.info("unmounted %s", config.mountpoint)
        except (OSError, UserError) as error:
            log.warning("%s stays, as a dead mount: %s", config.mountpoint, error)


def _mount(operations: object, config: MountConfig) -> None:
    """pyfuse3.init, with what libfuse and fusermount3 print on standard error as the error."""
    import pyfuse3

    # RuntimeError says nothing but "failed"; the reason goes to file descriptor 2.
    failed, saved = False, os.dup(2)
    with open(os.memfd_create("libfuse"), "r+b") as output:
        os.dup2(output.fileno(), 2)
        try:
            pyfuse3.init(operations, str(config.mountpoint), config.fuse_options())  # type: ignore[arg-type]
        except RuntimeError:
            failed = True
        finally:
            os.dup2(saved, 2)
            os.close(saved)
        output.seek(0)
        lines = [line.strip() for line in output.read().decode(errors="replace").splitlines() if line.strip()]
    if failed:
        reason = lines[-1] if lines else "the kernel refused it"
        raise UserError(f"cannot mount at {config.mountpoint}: {reason}")
    for line in lines:
        log.warning("libfuse: %s", line)


@contextmanager
def _early_signals() -> Iterator[None]:
    """Until trio listens, a signal to stop unwinds: nothing stays half mounted."""

    def stop(number: int, frame: types.FrameType | None) -> NoReturn:
        raise Stopped

    for number in STOPPING:
        signal.signal(number, stop)
    yield


def _ignore_signals() -> None:
    """From here on the daemon is ending anyway; a second signal must not tear that."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
