"""Changing files by name: on the mount while a daemon runs, in the store while none does."""

from collections.abc import Callable, Iterable
from contextlib import closing
from typing import TYPE_CHECKING

import click

from cachefs.cli.target import Target, find
from cachefs.errors import UserError

if TYPE_CHECKING:
    from cachefs.store import Store


def change(
    targets: Iterable[Target], mounted: Callable[[Target], None], offline: Callable[["Store", str], None]
) -> int:
    """Do it to every target, those after a failure too; 1 if any failed, each with its line."""
    status = 0
    for target in targets:
        try:
            if target.mount is not None:
                mounted(target)
            else:
                from cachefs.store import Store

                with closing(Store.open(target.store)) as store:
                    offline(store, target.name)
        except UserError as error:
            click.echo(f"cachefs: {error}", err=True)
            status = error.status
        except OSError as error:
            click.echo(f"cachefs: {target}: {error.strerror}", err=True)
            status = 1
    return status


def files(paths: Iterable[str]) -> list[Target]:
    """The targets of paths that must each name something in a mount or store."""
    targets = [find(path) for path in paths]
    for target in targets:
        if not target.name:
            raise UserError(f"{target} is a whole mount or store; name a file in it")
    return targets
