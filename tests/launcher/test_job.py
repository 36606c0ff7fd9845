"""What mpidist run starts: where it is refused, once more, and with which terminal."""

import sys
from types import SimpleNamespace

import pytest

from mpidist.commands.run import run_command
from mpidist.errors import InvalidArgument, LaunchError
from mpidist.launcher import job as running
from mpidist.launcher.job import JobOptions, check_log_dir, check_not_nested, own_environment
from mpidist.launcher.program import Program
from mpidist.launcher.signals import Signals
from tests.support.launcher_kits import PTY


@pytest.mark.parametrize(
    ("environ", "elsewhere"),
    [({}, False), ({"PBS_NODEFILE": "f"}, True), ({"PRTE_MCA_prte_default_hostfile": "f"}, True)],
)
def test_may_be_elsewhere(environ, elsewhere):
    assert running.may_be_elsewhere(environ) is elsewhere


@pytest.mark.parametrize(
    ("options", "begun", "lines"),
    [([], False, ["--mpi=pmi2", "mpiexec"]), ([], True, ["--mpi=pmi2"])]
    + [(["--launcher", "srun"], False, ["--mpi=pmi2"])],
)
def test_run_job_once_more_without_pmi2(monkeypatch, options, begun, lines):
    """Only where no rank came through MPI_Init, and nobody asked for srun by name."""
    started = []

    def make_launch(library, allocation, options, nodes=None):
        chosen = ["mpiexec"] if options.launcher == "mpiexec" else ["srun", "--mpi=pmi2"]
        return running.Launch(2, chosen, {}, True)

    def start(launch, *_):
        started.append(launch.launcher[-1])
        good = launch.launcher == ["mpiexec"]
        return not good, SimpleNamespace(never_started=not (good or begun))

    monkeypatch.setattr(running, "make_launch", make_launch)
    monkeypatch.setattr(running, "start", start)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "2(x2)")
    status = run_command.main([*options, "true"], standalone_mode=False)
    assert started == lines and status == (lines[-1] != "mpiexec")


@pytest.mark.parametrize(("label", "logs", "drawn"), [(0, None, 1), (1, None, 0), (0, "x", 0)])
def test_start_terminal_only_where_bars_can_be_drawn(monkeypatch, label, logs, drawn):
    """With --label and --log-dir lines are carried, not what a bar writes."""
    seen = []

    def run(self, command, environ):
        seen.append(int(environ["MPIDIST_TERMINAL"]) > 0)
        self.reports.close()
        return 0

    monkeypatch.setattr(running.Supervisor, "run", run)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    launch = running.Launch(1, ["mpiexec"], {}, False)
    options = JobOptions(label=bool(label), log_dir=logs, watch=True)
    status, job = running.start(launch, Program([], ["true"]), options, Signals())
    assert status == 0 and not job.never_started
    assert seen == [bool(drawn)]


@pytest.mark.parametrize(
    ("more", "refused"),
    [
        ({}, False),
        ({"PMIX_RANK": "0"}, False),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, False),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, True),  # of mpiexec, its proxy alone on that node
        ({"PMIX_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, True),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, True),
    ],
)
def test_check_not_nested_shell_of_one_task(more, refused):
    environ = {**PTY, **more}
    if refused:
        with pytest.raises(LaunchError, match="as rank 1: every rank"):
            check_not_nested(environ)
    else:
        check_not_nested(environ)
        assert not [name for name in own_environment(environ) if name.startswith("PMI")]


def test_check_log_dir(tmp_path):
    check_log_dir(str(tmp_path / "a" / "b"))
    (tmp_path / "file").write_text("")
    for wrong, why in ((str(tmp_path / "file" / "logs"), "Not a directory"), ("", "No such file")):
        with pytest.raises(InvalidArgument) as caught:
            check_log_dir(wrong)
        assert str(caught.value).startswith(f"--log-dir {wrong!r}: cannot create {wrong!r}: {why}")
        assert "expected a folder" in str(caught.value) and "Errno" not in str(caught.value)
