"""``mpidist.run``: a function on MPI processes of its own, from a script or notebook."""

from __future__ import annotations

import fcntl
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any

from .. import arguments
from ..errors import LaunchError, MpidistError, RankFailed, unpicklable
from ..measure import plural
from .allocation import SlurmAllocation, kill_wait, whole_job
from .failures import from_the_cause
from .job import JobOptions, check_not_nested, make_launch, monitors, own_environment
from .mpi import TERMINAL, find_library
from .supervisor import Supervisor

PREFIX = "mpidist-run-"  # of the temporary folders
LINES, KEPT = 15, 10_000  # lines and characters of the output that an error of the launch quotes


def run(
    fn: Callable[..., Any],
    n: int | None = None,
    *args: Any,
    timeout: float | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Start MPI processes, run ``fn(comm, *args, **kwargs)`` on each rank, and return the results.

    Every call starts processes of its own, by the same launcher as ``mpidist run``, also in a
    SLURM allocation.  What the ranks print appears in the caller's output.  They end when their
    launcher does, also if processes that they started go on, and when this process ends.

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
    if n is not None:
        n = arguments.whole("n", n)
    arguments.function("fn", fn, "a communicator")
    check_not_nested(os.environ)
    payload = _pickled(fn, args, kwargs)
    allocation = SlurmAllocation.find()
    allocation = None if allocation is None else whole_job(allocation)
    launch = make_launch(find_library(), allocation, JobOptions(ranks=n))
    base = _shared(allocation) or tempfile.gettempdir()
    _remove_ownerless(base)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=base) as folder, _owned(folder, payload):
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)  # "" in a notebook
        environ = {**own_environment(os.environ), **launch.settings, TERMINAL: "0"}
        environ["PYTHONPATH"], output = path, _Output()
        job = Supervisor(
            monitors(launch, environ),
            kill_wait=kill_wait() if launch.allocated else None,
            limit=timeout,
            stdin=subprocess.DEVNULL,
            write=output.write,
        )
        program = [sys.executable, "-m", __name__, folder]
        job.run([*launch.launcher, *job.reports.command(program)], environ)
        if job.late:
            raise LaunchError(f"run: the processes took longer than timeout={timeout:g} s")
        if not job.interrupted:
            return _results(Path(folder), launch.ranks, job.told, output.last_lines)
    signal.raise_signal(job.interrupted)  # as if it had come now, when the ranks have ended
    raise LaunchError(f"run: ended by {signal.Signals(job.interrupted).name}")


def _shared(allocation: SlurmAllocation | None) -> str | None:
    """Return the folder for the temporary folder of a job; None for the system's default.

    On several nodes it is the current folder, which they are assumed to share.
    """
    return None if allocation is None or allocation.nodes == 1 else os.getcwd()


@contextmanager
def _owned(folder: str, payload: bytes) -> Iterator[None]:
    """Write the call's file, and hold its lock, which ends with this process however it ends."""
    with open(Path(folder, "new"), "wb") as file:
        with suppress(OSError):  # a file system without locks: then nobody gets it, nor removes
            fcntl.flock(file, fcntl.LOCK_EX)
        file.write(payload)
        file.flush()
        os.rename(file.name, Path(folder, "call"))  # it has this name only with the lock
        yield


def _remove_ownerless(base: str) -> None:
    """Remove the folders of this user's processes that were killed in a run."""
    for path in Path(base).glob(f"{PREFIX}*/call"):
        with suppress(OSError):
            if path.parent.lstat().st_uid == os.geteuid() and path.parent.is_dir():
                with open(path, "rb") as file:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    shutil.rmtree(path.parent)


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


class _Output:
    """The output of a job: printed as it comes by this process; its end is kept for an error."""

    def __init__(self) -> None:
        self._end, self._printing = "", Lock()
        self._decoders = {k: getincrementaldecoder("utf-8")("replace") for k in (1, 2)}

    def write(self, screen: int, data: bytes) -> None:
        """Print a part of standard output (1) or standard error (2)."""
        text = self._decoders[screen].decode(data)
        with self._printing:
            self._end = (self._end + text)[-KEPT:]
            # The caller's own streams, which in a notebook are no file descriptors.
            file = sys.stdout if screen == 1 else sys.stderr
            encoding = getattr(file, "encoding", None) or "utf-8"
            text = text.encode(encoding, "backslashreplace").decode(encoding)
            print(text, end="", flush=True, file=file)

    @property
    def last_lines(self) -> str:
        """The last lines."""
        return "\n".join(self._end.splitlines()[-LINES:])


def _results(folder: Path, ranks: int, told: str, last_lines: str) -> list[Any]:
    """Return the results of all ranks; raise the error of the rank that failed first.

    If results are missing without an error, the LaunchError quotes what was `told` of a rank's end
    and the `last_lines` of the output.
    """
    # Written by processes that this one started.
    paths = sorted(folder.glob("error-*"), key=lambda path: path.stat().st_mtime_ns)
    errors = {int(path.name.partition("-")[2]): pickle.loads(path.read_bytes()) for path in paths}
    results = {rank: folder / f"result-{rank}" for rank in range(ranks)}
    missing = [rank for rank, path in results.items() if rank not in errors and not path.exists()]
    # That another rank is lost is no rank's own failure.
    own = [rank for rank, error in errors.items() if not isinstance(error, RankFailed)]
    if own or (errors and not missing):
        rank = min(own or errors, key=lambda rank: from_the_cause(type(errors[rank]).__name__))
        if sys.version_info >= (3, 11):
            errors[rank].add_note(f"on rank {rank} of {ranks}")
        raise errors[rank]
    if missing:
        raise LaunchError(
            f"run: {plural(len(missing), 'rank')} {', '.join(map(str, missing))} of {ranks} "
            f"left no result{told and f': {told}'}; last lines:\n{last_lines}"
        )
    return [pickle.loads(path.read_bytes()) for path in results.values()]


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
