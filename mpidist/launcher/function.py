"""``mpidist.run``: a function on MPI processes of its own, from a script or notebook."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from threading import Timer
from typing import Any

from ..errors import InvalidArgument, LaunchError, MpidistError, unpicklable
from ..measure import plural
from .allocation import SlurmAllocation, whole_job
from .job import JobOptions, check_not_nested, make_launch, own_environment
from .mpi import TERMINAL, find_library

LINES = 15  # of the output that an error of the launch quotes


def run(
    fn: Callable[..., Any],
    n: int | None = None,
    *args: Any,
    timeout: float | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Start MPI processes, run ``fn(comm, *args, **kwargs)`` on each rank, and return the results.

    Every call starts processes of its own, by the same launcher as ``mpidist run``, also in a
    SLURM allocation.  What the ranks print appears in the caller's standard output.

    Parameters
    ----------
    fn : callable
        Function of the rank's :class:`Communicator`.  One that is defined in a notebook, in
        the script itself, or in a function is sent to the ranks by cloudpickle.
    n : int, optional
        Number of ranks; by default one per core, in a SLURM allocation one per task.
    *args, **kwargs
        Further arguments of `fn`, the same on every rank.
    timeout : float, optional
        Seconds after which the processes are ended; by default there is no limit.

    Returns
    -------
    list
        Results of `fn` in rank order; they must be picklable.

    Raises
    ------
    Exception
        The error of the first rank that failed, with a note (Python 3.11) that names the rank.
    LaunchError
        If the processes cannot be started, end without a result, or exceed `timeout`.
    InvalidArgument
        If `n` is no whole number >= 1, or `fn` cannot be pickled.

    See Also
    --------
    run_simulated : The same on threads of this process, without MPI.

    Examples
    --------
    >>> mpidist.run(lambda comm: comm.allreduce(comm.rank).item(), n=4)  # doctest: +SKIP
    [6, 6, 6, 6]
    """
    if n is not None and (not isinstance(n, int) or isinstance(n, bool) or n < 1):
        raise InvalidArgument(f"n={n!r}: expected a whole number of ranks >= 1")
    if not callable(fn):
        raise InvalidArgument(f"fn={fn!r}: expected a function that takes a communicator")
    check_not_nested(os.environ)
    payload = _pickled(fn, args, kwargs)
    allocation = SlurmAllocation.find()
    allocation = None if allocation is None else whole_job(allocation)
    launch = make_launch(find_library(), allocation, JobOptions(ranks=n))
    with tempfile.TemporaryDirectory(prefix="mpidist-run-", dir=_shared(allocation)) as folder:
        Path(folder, "call").write_bytes(payload)
        command = [*launch.launcher, sys.executable, "-m", __name__, folder]
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)  # "" in a notebook
        environ = {**own_environment(os.environ), **launch.settings, TERMINAL: "0"}
        output = _follow(command, environ | {"PYTHONPATH": path}, timeout)
        return _results(Path(folder), launch.ranks, output)


def _shared(allocation: SlurmAllocation | None) -> str | None:
    """Return the folder for the temporary folder of a job; None for the system's default.

    On several nodes it is the current folder, which they are assumed to share.
    """
    return None if allocation is None or allocation.nodes == 1 else os.getcwd()


def _pickled(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pickle a function and its arguments, by cloudpickle if ranks cannot import the function."""
    local = "<" in getattr(fn, "__qualname__", "<") or fn.__module__ == "__main__"
    if local:
        from cloudpickle import dumps
    else:
        from pickle import dumps
    try:
        return dumps((fn, args, kwargs))
    except Exception as error:
        positional = {f"args[{k}]": value for k, value in enumerate(args)}
        for name, value in {"fn": fn, **positional, **kwargs}.items():
            try:
                dumps(value)
            except Exception as own:
                raise unpicklable(f"run: {name}", value, own) from own
        raise unpicklable("run: fn with its arguments,", (fn, args, kwargs), error) from error


def _follow(command: list[str], environ: dict[str, str], timeout: float | None) -> list[str]:
    """Run a command and print its output as it comes; return the last lines of the output.

    Raise LaunchError after `timeout` seconds.
    """
    lines: list[str] = []
    late = False
    with subprocess.Popen(
        command,
        env=environ,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:

        def end() -> None:
            nonlocal late
            late = True
            process.terminate()

        timer = Timer(timeout, end) if timeout is not None else None
        if timer is not None:
            timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                lines = [*lines[1 - LINES :], line.rstrip("\n")]
                print(line, end="", flush=True)  # noqa: T201
        except BaseException:
            process.terminate()
            raise
        finally:
            if timer is not None:
                timer.cancel()
    if late:
        raise LaunchError(f"run: the processes took longer than timeout={timeout:g} s")
    return lines


def _results(folder: Path, ranks: int, output: list[str]) -> list[Any]:
    """Return the results of all ranks; raise the error of the rank that failed first.

    If results are missing without an error, the LaunchError quotes `output`, the last lines.
    """
    failed = sorted(folder.glob("error-*"), key=lambda path: path.stat().st_mtime_ns)
    if failed:
        rank = failed[0].name.partition("-")[2]
        error = pickle.loads(failed[0].read_bytes())  # of processes that this one started
        if sys.version_info >= (3, 11):
            error.add_note(f"on rank {rank} of {ranks}")
        raise error
    paths = [folder / f"result-{rank}" for rank in range(ranks)]
    missing = [rank for rank, path in enumerate(paths) if not path.exists()]
    if missing:
        raise LaunchError(
            f"run: {plural(len(missing), 'rank')} {', '.join(map(str, missing))} of {ranks} "
            "left no result; last lines:\n" + "\n".join(output)
        )
    return [pickle.loads(path.read_bytes()) for path in paths]


def main(folder: Path) -> None:
    """Run the pickled function in `folder` on this rank; write its result or error to a file."""
    import mpidist

    comm = mpidist.init()
    try:
        fn, args, kwargs = pickle.loads((folder / "call").read_bytes())
        content, kind = _pickled_result(fn(comm, *args, **kwargs), comm.rank), "result"
    except BaseException as error:
        kind, content = "error", _pickled_error(error)
        _write(folder / f"{kind}-{comm.rank}", content)
        raise
    _write(folder / f"{kind}-{comm.rank}", content)


def _pickled_result(result: Any, rank: int) -> bytes:
    try:
        return pickle.dumps(result)
    except Exception as error:
        raise unpicklable(f"rank {rank}: the result of fn,", result, error) from error


def _pickled_error(error: BaseException) -> bytes:
    """Return an error as bytes; one that cannot be pickled as an MpidistError with its text."""
    try:
        content = pickle.dumps(error)
        pickle.loads(content)
        return content
    except Exception:
        return pickle.dumps(MpidistError(f"{type(error).__name__}: {error}"))


def _write(path: Path, content: bytes) -> None:
    """Write a file atomically, by renaming it, so that a reader never sees a part of it."""
    beside = path.with_name(f".{path.name}")
    beside.write_bytes(content)
    beside.rename(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
