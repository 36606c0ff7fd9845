"""A real Slurm on emulated nodes: slurmctld on "head", a slurmd on each of "n1", "n2", …

For tests.  It needs what minicluster.py needs, and Debian's packages slurm-wlm and libpmix2::

    with SlurmCluster(nodes=3) as cluster:
        job = cluster.submit("--nodes=2", "slurm/train_ddp.sbatch")
        print(cluster.wait(job).output)
"""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from tests.support import processes
from tests.support.jobs import PYTHONS
from tests.support.minicluster import LIBC, PR_SET_PDEATHSIG, Cluster, Refused, words_of

ROOT = Path(__file__).resolve().parents[2]
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol")
PACKAGES = "slurm-wlm libpmix2 iproute2"
PORT = 16817
LONG = os.environ.get("MPIDIST_TEST_SLURM") == "long"  # `make test-slurm`; `make test` is short
NO_GPUS = ("null", "zero", "full")  # files that stand for devices
PENDING = ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "REQUEUED", "unknown")
# No daemons for authentication, accounting or mail; nothing of systemd or control groups.  A node
# that does not answer for 30 s is down: long after `mpidist run` has ended the job by itself.
SETTINGS = """ClusterName=mini
SlurmctldHost=head({head})
SlurmctldPort={port}
SlurmdPort={slurmd}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
TmpFS={folder}/tmp.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
InactiveLimit=0
KillWait=2
SlurmdTimeout=30
GresTypes=gpu
{nodes}
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName={name} NodeHostname={name} NodeAddr={address} CPUs={cpus} RealMemory=4000{gres}"


@dataclass
class Job:
    """A job that has ended: its state as Slurm names it, its exit code, and what it wrote."""

    number: str
    state: str
    exit_code: str
    output: str

    @property
    def completed(self) -> bool:
        return self.state == "COMPLETED" and self.exit_code == "0:0"


def user_environment(mpi: str) -> dict[str, str]:
    """Give the environment of a user who works with this MPI."""
    beside = str(Path(PYTHONS[mpi]).parent)
    return {"PATH": f"{beside}:{PATH}", "PYTHONPATH": str(ROOT)}


def why_not() -> str:
    """Say why there can be no Slurm here; empty if there can."""
    missing = [name for name in PROGRAMS if not shutil.which(name, path=PATH)]
    if missing:
        return f"needs Slurm: there is no {missing[0]}; apt-get install {PACKAGES}"
    return ""


class SlurmCluster(Cluster):
    """Emulated nodes with a Slurm.

    Parameters
    ----------
    nodes, rate, delay
        As of :class:`~minicluster.Cluster`.
    cpus : int
        That each node says it has.
    gpus : int
        That each node says it has, at most 3: there is no device behind them.
    """

    def __init__(self, nodes=3, rate=1e10, delay=20e-6, cpus=2, gpus=0):
        super().__init__(nodes, rate, delay)
        self.cpus, self.gpus, self._daemons = cpus, gpus, []

    # -- starting and ending --------------------------------------------------------------------

    def _start(self) -> None:
        if reason := why_not():
            raise Refused(reason)
        super()._start()
        for name in ("state", *(f"{kind}.{n}" for kind in ("spool", "tmp") for n in self.names)):
            os.mkdir(f"{self.folder}/{name}")
        self._write("slurm.conf", self._settings())
        devices = [f"Name=gpu File=/dev/{name}\n" for name in NO_GPUS[: self.gpus]]
        self._write("gres.conf", "".join(devices))
        self._daemon("head", "slurmctld", "-D", "-i")
        for name in self.names:
            self.boot(name)
        self._until(lambda: self._idle() == len(self.names), "every node is idle")

    def _settings(self) -> str:
        lines = Path(self.folder, "hosts").read_text().splitlines()[1:]
        address = {name: number for number, name in map(str.split, lines)}
        gres = f" Gres=gpu:{self.gpus}" if self.gpus else ""
        nodes = [
            NODE.format(name=name, address=address[name], cpus=self.cpus, gres=gres)
            for name in self.names
        ]
        return SETTINGS.format(
            head=address["head"],
            port=PORT,
            slurmd=PORT + 1,
            folder=self.folder,
            nodes="\n".join(nodes),
        )

    def boot(self, node: str) -> None:
        """Start the slurmd of a node, for instance after a crash."""
        self._daemon(node, "slurmd", "-D", "-N", node)

    def _daemon(self, node: str, program: str, *options: str) -> None:
        command = self.inside(node, str(shutil.which(program, path=PATH)), *options)
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=self.environment(),
            preexec_fn=lambda: LIBC.prctl(PR_SET_PDEATHSIG, 9),
        )
        self._daemons.append(child)

    def stop(self) -> None:
        """End every job, daemon and node."""
        super().stop()
        for child in self._daemons:
            child.kill()
            child.wait()
        self._daemons.clear()

    def _own(self) -> set[int]:
        """Give the processes of the cluster: the daemons, and those that they started for good."""
        mine = super()._own() | {child.pid for child in self._daemons}
        return mine | {pid for pid in self._inhabitants() if "slurmscriptd" in words_of(pid)}

    def _idle(self) -> int:
        text = self.run("sinfo", "-h", "-t", "idle", "-o", "%D").output.strip()
        return int(text) if text.isdigit() else 0

    def _until(self, holds, what: str, limit: float = 20.0) -> None:
        deadline = time.monotonic() + limit
        while not holds():
            if time.monotonic() > deadline:
                logs = [Path(log).read_text()[-800:] for log in glob.glob(f"{self.folder}/*.log")]
                raise TimeoutError(f"not within {limit:g} s: {what}\n" + "\n".join(logs))
            time.sleep(0.05)

    # -- use ------------------------------------------------------------------------------------

    def environment(self, **env: str) -> dict[str, str]:
        """Give the environment of a user's login: Slurm is found, and starts both MPI libraries."""
        mine = super().environment(
            **{"SLURM_CONF": f"{self.folder}/slurm.conf", "PATH": PATH, **env}
        )
        for name in ("PRTE_MCA_plm_ssh_agent", "HYDRA_LAUNCHER", "HYDRA_LAUNCHER_EXEC"):
            mine.pop(name)
        for name in processes.OVERSUBSCRIBED:  # `mpidist run` is to find these out
            if not name.startswith("OMPI_ALLOW") and name not in env:
                mine.pop(name, None)
        return mine

    def submit(self, *arguments: str, folder: str | os.PathLike | None = None, **env: str) -> str:
        """Submit a batch script with options of sbatch before it; give the job's number."""
        number = len(os.listdir(self.folder))
        output = f"{self.folder}/job.{number}.{time.monotonic_ns()}.%j.out"
        options = ["--parsable", "--open-mode=append", f"--output={output}"]
        if folder is not None:
            options.append(f"--chdir={folder}")
        done = self.run("sbatch", *options, *arguments, **env)
        if done.status != 0:
            raise RuntimeError(done.output)
        return done.output.split()[-1].partition(";")[0]

    def show(self, job: str) -> dict[str, str]:
        """Give what scontrol says of a job."""
        text = self.run("scontrol", "-o", "show", "job", job).output
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def wait(self, job: str, limit: float = 60.0, completing: bool = False) -> Job:
        """Wait until a job has ended; past the limit it is cancelled.

        With `completing`, until its batch script has ended: SLURM waits longer for a lost node.
        """
        deadline = time.monotonic() + limit
        while True:
            said = self.show(job)
            state = said.get("JobState", "unknown")
            if state not in PENDING or (completing and state == "COMPLETING"):
                break
            if time.monotonic() > deadline:
                self.run("scancel", "--signal=KILL", job)
                state = f"{state}, not ended within {limit:g} s"
                break
            time.sleep(0.1)
        return Job(job, state, said.get("ExitCode", ""), self.output(said))

    def output(self, said: dict[str, str]) -> str:
        """Give what a job has written so far."""
        path = Path(said.get("StdOut", ""))
        return path.read_text(errors="replace").replace("\0", "") if path.is_file() else ""

    def sbatch(self, *arguments: str, limit: float = 60.0, **env: str) -> Job:
        """Submit a batch script and wait for its end."""
        return self.wait(self.submit(*arguments, **env), limit)


ONE_TASK_A_CORE = ("--nodes=2", "--ntasks-per-node=2", "--no-requeue")
DEADLINE = 40.0  # seconds in which a job begins, and in which one that fails ends
RUNS = {"srun": "mpidist run", "mpiexec": "mpidist run --launcher mpiexec"}
WAIT = """import os, sys
import numpy as np
import mpidist
comm = mpidist.init()
comm.barrier()
open(sys.argv[2] + f".{comm.rank}", "w").close()
if sys.argv[1] == "killed" and comm.rank == 3:
    os.kill(os.getpid(), 9)
if sys.argv[1] == "leaves" and comm.rank == 3:
    os._exit(5)
if sys.argv[1] == "raises" and comm.rank == 3:
    raise ValueError("boom")
comm.recv(np.zeros(1), (comm.rank + 1) % comm.size)
"""


def submit(cluster, user, folder, how, launcher):
    """Submit such a job; give its number, and the files that its ranks make once they run."""
    (folder / "wait.py").write_text(WAIT)
    mark, script = folder / f"{how}.{launcher}", folder / f"{how}.{launcher}.sh"
    script.write_text(f"#!/bin/bash\nexec {RUNS[launcher]} {folder}/wait.py {how} {mark}\n")
    job = cluster.submit(*ONE_TASK_A_CORE, str(script), **user)
    return job, [mark.with_name(f"{mark.name}.{rank}") for rank in range(4)]


def all_begun(cluster, job, marks):
    """Wait until every rank of a job has begun."""
    deadline = time.monotonic() + DEADLINE
    while not all(mark.exists() for mark in marks):
        said = cluster.show(job)
        state = said.get("JobState")
        assert time.monotonic() < deadline and state in ("PENDING", "RUNNING"), (
            f"{state}\n{cluster.output(said)}"
        )
        time.sleep(0.1)  # a file of another node: nothing to wait on
