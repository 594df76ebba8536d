"""The command line: one small file a subcommand, errors as one line, exit statuses kept."""

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import click

from cachefs import __version__
from cachefs.cli.overview import OVERVIEW
from cachefs.errors import UserError

INTERRUPTED = 130

# Subcommand → what it does. Its module, of the same name, is imported only when it runs.
COMMANDS = {
    "mount": "Mount a store, in the background by default.",
    "umount": "Unmount, and wait until everything is on disk.",
    "stats": "How much is stored, shared, evicted.",
    "ls": "The entries: size, what each shares, last use.",
    "pin": "Keep files from being evicted.",
    "unpin": "Let pinned files be evicted again.",
    "rm": "Remove files from a mount or a store.",
    "check": "Check a store, and repair it.",
    "explain": "What is recognised in a file; for bug reports.",
    "systemd": "Print unit files for a store and mountpoint.",
}


class _Commands(click.Group):
    """Loads subcommands when they are called for; takes mount(8)'s way of calling too."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"cachefs.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[Any, Any, list[str]]:
        # `mount -t fuse.cachefs STORE MOUNTPOINT -o …` makes mount.fuse3 run
        # `cachefs STORE MOUNTPOINT -o …`, and so does an fstab line.
        if args and args[0] not in COMMANDS and ("/" in args[0] or "-o" in args):
            args = ["mount", *args]
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # Nobody reads any more; the interpreter must not try again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            raise click.exceptions.Exit(INTERRUPTED) from None


@click.group(
    cls=_Commands,
    help=OVERVIEW,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--debug", is_flag=True, help="Show where an unexpected error came from (also: CACHEFS_DEBUG=1)."
)
@click.version_option(__version__, "-V", "--version", prog_name="cachefs", message="%(prog)s %(version)s")
def commands(debug: bool) -> None:
    pass


def main(args: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. Never a traceback, unless asked for."""
    own_process = args is None
    args = list(sys.argv[1:] if args is None else args)
    debug = "--debug" in args or os.environ.get("CACHEFS_DEBUG", "0") not in ("", "0")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # names need not be UTF-8
            stream.reconfigure(errors="backslashreplace")
    try:
        status = commands.main(args, prog_name="cachefs", standalone_mode=False, obj=own_process)
        return status if isinstance(status, int) else 0
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return error.exit_code
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "cachefs"
        return _fail(f"{error.format_message()} (see {where} --help)", 2)
    except click.ClickException as error:
        return _fail(error.format_message(), error.exit_code)
    except UserError as error:
        return _fail(str(error), error.status)
    except OSError as error:
        if debug:
            traceback.print_exc()
        where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
        return _fail(where + (error.strerror or str(error)), 1)
    except Exception as error:
        if debug:
            traceback.print_exc()
        return _fail(f"unexpected {type(error).__name__}: {error} (CACHEFS_DEBUG=1 shows where)", 1)


def _fail(message: str, status: int) -> int:
    print("cachefs:", " ".join(message.split()), file=sys.stderr)
    return status
