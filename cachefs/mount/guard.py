"""What stands around every handler."""

import errno
import functools
import logging
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from pyfuse3 import FUSEError

from cachefs.store import StoreFull

log = logging.getLogger("cachefs.operations")

P = ParamSpec("P")
T = TypeVar("T")


def guarded(handler: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """A handler that raises nothing but FUSEError: anything else would end the whole mount."""

    @functools.wraps(handler)
    async def guard(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await handler(*args, **kwargs)
        except FUSEError:
            raise
        except StoreFull:
            raise FUSEError(errno.ENOSPC) from None
        except OSError as error:
            raise FUSEError(error.errno or errno.EIO) from None
        except MemoryError:
            log.exception("%s: out of memory", handler.__name__)
            raise FUSEError(errno.ENOMEM) from None
        except Exception:
            # On a broken disk everything may fail, and the log has told so.
            quiet = getattr(args[0], "is_failed", False)
            log.log(logging.DEBUG if quiet else logging.ERROR, "%s failed", handler.__name__, exc_info=True)
            raise FUSEError(errno.EIO) from None

    return guard
