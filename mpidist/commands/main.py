"""The group of commands, which prints an error of mpidist as one line and sets the exit code."""

from __future__ import annotations

import errno
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from ..errors import CommunicationError, InvalidArgument, LaunchError, MpidistError
from ..launcher.mpi import launched_rank
from .console import COMPLETE

if TYPE_CHECKING:
    from ..communicator.communicator import Communicator

AGREE_SECONDS = 5.0
REPORT_SECONDS = 3.0


class Main(click.Group):
    """The group of commands; prints an error of mpidist as one line and sets the exit code.

    The exit code is 2 for wrong options or arguments and for a job that cannot be started, and 1
    for other failures.
    """

    def main(self, *arguments: Any, standalone_mode: bool = True, **extra: Any) -> Any:  # type: ignore[override]
        """Run a command and exit with its code; return its result if not `standalone_mode`.

        See :meth:`click.Command.main`.
        """
        if not standalone_mode:
            return self._main(arguments, extra)
        _open_closed_streams()
        if launched_rank():
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (for the rest of the process)
        try:
            status = self._main(arguments, extra)
        except click.ClickException as error:
            if not launched_rank():
                _print_click(error)
            status = error.exit_code
        except click.Abort:
            status = 1
        except MpidistError as error:
            status = report(error)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.ENOSPC):
                raise
            if error.errno != errno.EPIPE:  # as of `mpidist list | head`
                _print_error(f"output cannot be written: {error.strerror}")
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            status = 1
        status = status if isinstance(status, int) else 0
        if status and launched_rank():
            # The launcher ends the job with the first failed rank: let rank 0 print first.
            time.sleep(REPORT_SECONDS)
        sys.exit(status)

    def _main(self, arguments: tuple[Any, ...], extra: dict[str, Any]) -> Any:
        if COMPLETE in os.environ:
            from . import completion  # noqa: F401  (registers its shells)
        return super().main(*arguments, standalone_mode=False, **extra)  # type: ignore[call-overload]


def _open_closed_streams() -> None:
    """Have /dev/null for each standard stream that is closed.

    Python has None for it, and the next file or socket that is opened would get its number, and
    with it what is written there.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            file = open(os.devnull, mode)  # noqa: SIM115  (to the end of the process)
            os.set_inheritable(file.fileno(), True)  # Open MPI's launcher hangs without an input
            setattr(sys, name, file)


def report(error: MpidistError) -> int:
    """Print an error as one line, by rank 0 alone if all ranks failed; return the exit code.

    If only some ranks failed, or for a CommunicationError, each failed rank prints its error and
    ends the job, as other ranks may wait for it.
    """
    from ..communicator import launch

    comm = launch._default
    status = 2 if isinstance(error, (InvalidArgument, LaunchError)) else 1
    if comm is None or comm.size == 1:
        if not launched_rank():
            _print_error(error)
        return status
    if not isinstance(error, CommunicationError) and _all_failed(comm):
        if comm.rank == 0:
            _print_error(error)
        return status
    _print_error(error, f" on rank {comm.rank} of {comm.size}")
    comm.backend.abort(1)
    return 1


def _all_failed(comm: Communicator) -> bool:
    """Return whether all ranks failed: only failed ranks enter this barrier, for 5 s at most."""
    comm.timeout = AGREE_SECONDS
    try:
        comm.barrier()
    except MpidistError:
        return False
    return True


def _print_error(error: object, where: str = "") -> None:
    line = " ".join(str(error).split())
    click.echo(f"mpidist: error{where}: {line}", err=True)


def _print_click(error: click.ClickException) -> None:
    """Print an error of click's as those of mpidist are, and the help that tells more."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return
    more = ""
    if isinstance(error, click.UsageError) and error.ctx is not None:
        more = f" (see {error.ctx.command_path} --help)"
    _print_error(error.format_message().rstrip(".") + more)
