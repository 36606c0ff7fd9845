"""The nodes of a job, of which those that are down are left out of its next start."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from .allocation import SlurmAllocation, host_names, nodes_down
from .mpi import INTEL, MPICH, OPEN_MPI, find_launcher
from .processes import run_limited

ATTEMPTS = 10.0, 20.0  # seconds that a node has for a small program, in each attempt
AT_ONCE = 16  # nodes that are asked at the same time
# The variables that name a file with the nodes, one a line.
HOST_FILES = {
    OPEN_MPI: ("PRTE_MCA_prte_default_hostfile", "OMPI_MCA_orte_default_hostfile"),
    MPICH: ("HYDRA_HOST_FILE",),
    INTEL: ("I_MPI_HYDRA_HOST_FILE", "HYDRA_HOST_FILE"),
}


@dataclass
class Nodes:
    """The nodes on which a job runs: of an allocation, or of a file that the environment names."""

    names: list[str]
    vendor: str
    environ: Mapping[str, str]  # of the launcher
    allocation: SlurmAllocation | None = None
    host_file: str = ""  # the variable
    lines: dict[str, str] = field(default_factory=dict)  # of that file, by node
    left_out: list[str] = field(default_factory=list)
    _file: int = -1

    @classmethod
    def find(
        cls, vendor: str, allocation: SlurmAllocation | None, environ: Mapping[str, str]
    ) -> Nodes | None:
        """Return the nodes of a job; None if nobody here knows them, or it has one of SLURM's.

        `environ` is the environment of the launcher.
        """
        if allocation is not None:
            names = host_names(allocation.node_list) if allocation.nodes > 1 else []
            known = len(names) == allocation.nodes > 1
            return cls(names, vendor, environ, allocation) if known else None
        name = next((name for name in HOST_FILES.get(vendor, ()) if environ.get(name)), "")
        try:
            text = Path(environ[name]).read_text(encoding="utf-8") if name else ""
        except (OSError, UnicodeDecodeError):
            return None  # the launcher says what is wrong with it
        lines: dict[str, str] = {}
        for line in text.splitlines():
            words = line.partition("#")[0].split()
            if words:
                node = words[0].partition(":")[0]
                lines[node] = f"{lines.get(node, '')}{line}\n"  # a line for each rank, perhaps
        return cls(list(lines), vendor, environ, None, name, lines) if lines else None

    def ask(self, *command: str, within: Sequence[float] = ATTEMPTS) -> dict[str, str | None]:
        """Run a small program on each node; return what it prints, None if it did not end well.

        It is tried once for each of the seconds `within` which it is to end.
        It should not end at once: then Open MPI 5.0.11 hangs now and then (11 of 80 launches).
        Nodes of which SLURM knows that they are down are not asked.
        """
        down = nodes_down(self.names) if self.allocation is not None else set()
        environ = {name: text for name, text in self.environ.items() if name != self.host_file}

        def output(node: str) -> str | None:
            if node in down:
                return None
            for seconds in within:
                done = run_limited([*self._one(node), *command], seconds, environ)
                if done.status == 0:
                    return done.output
            return None

        with ThreadPoolExecutor(AT_ONCE) as pool:
            return dict(zip(self.names, pool.map(output, self.names)))

    def _one(self, node: str) -> list[str]:
        """Return the launcher of one process on a node."""
        if self.allocation is not None:
            one = ["--overlap", "--nodes=1", "--ntasks=1", "--mpi=none", "--export=ALL"]
            return ["srun", "--quiet", *one, f"--nodelist={node}"]
        where = (
            ["--host", node, "--map-by", "slot"] if self.vendor == OPEN_MPI else ["-hosts", node]
        )
        return [find_launcher(self.vendor), "-n", "1", *where]

    def leave_out(self, nodes: Sequence[str]) -> None:
        """Leave nodes out of the starts that follow."""
        kept = [k for k, name in enumerate(self.names) if name not in nodes]
        self.left_out += nodes
        self.names = [self.names[k] for k in kept]
        if self.allocation is None:
            return
        cpus, tasks = self.allocation.cpus, self.allocation.tasks
        self.allocation = replace(
            self.allocation,
            node_list=",".join(self.names),
            cpus=tuple(cpus[k] for k in kept),
            tasks=tuple(tasks[k] for k in kept) if tasks else (),
        )

    @property
    def settings(self) -> dict[str, str]:
        """The environment variables by which a launcher leaves nodes out."""
        if not self.left_out:
            return {}
        if self.allocation is None:
            if self._file < 0:
                self._file = os.memfd_create("hosts")  # nothing is left of it after a kill
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, "".join(self.lines[name] for name in self.names).encode(), 0)
            return {self.host_file: f"/proc/{os.getpid()}/fd/{self._file}"}
        cpus = ",".join(map(str, self.allocation.cpus))
        return {
            # Of an mpiexec, that reads the allocation here.
            **dict.fromkeys(("SLURM_JOB_NODELIST", "SLURM_NODELIST"), self.allocation.node_list),
            **dict.fromkeys(("SLURM_JOB_NUM_NODES", "SLURM_NNODES"), str(len(self.names))),
            "SLURM_JOB_CPUS_PER_NODE": cpus,
            "SLURM_TASKS_PER_NODE": ",".join(map(str, self.allocation.tasks)) or cpus,
            # The step that the lost node has ended may hold the others' processors for a while.
            "SLURM_OVERLAP": "1",
        }


def short(host: str) -> str:
    """Return the name of a host without its domain; an address is left as it is."""
    return host if host.replace(".", "").isdigit() else host.partition(".")[0]
