"""What a process of a check is to do."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from pathlib import Path

ROLES = ("ranks", "reference", "again", "perturbed")


@dataclass(frozen=True)
class Plan:
    """The role of a run of the script, and what it needs to know of the ranks' run before it.

    Of the roles "ranks" is the run on N ranks; "reference" is one process, "again" the same a
    second time, and "perturbed" the same with inputs and parameters changed by an ulp.
    """

    role: str
    ranks: int  # N, in every role
    steps: int
    # Whether the reference is N processes, each of which takes itself for the only one.
    copies: bool = False
    # Of each step: the ranks that have a sample, by the sample's id.
    owners: dict[int, dict[int, list[int]]] = field(default_factory=dict)
    start: str = ""  # file with the parameters of rank 0 before its first step
    torch: bool = False  # whether the script imports PyTorch
    seed: int = 1

    @property
    def processes(self) -> int:
        """Number of processes of this run."""
        return self.ranks if self.copies or self.role == "ranks" else 1

    def save(self, folder: Path) -> None:
        """Write the plan for the processes of a run."""
        (folder / "plan").write_bytes(pickle.dumps(self))

    @classmethod
    def load(cls, folder: Path) -> Plan:
        """Read the plan in a folder of this check."""
        plan = pickle.loads((folder / "plan").read_bytes())
        assert isinstance(plan, cls)
        return plan
