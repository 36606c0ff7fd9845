"""What a process of a check is to do."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from pathlib import Path

ROLES = ("ranks", "reference", "again", "perturbed")


@dataclass(frozen=True)
class StageForm:
    """One stage of a pipeline as its ranks have it.

    `layers` are the first of its layers and the one after its last, if a Partition of a Sequential
    made it.
    """

    layers: tuple[int, int] | None
    shapes: tuple[tuple[int, ...], ...]  # of its parameters
    rank: int  # the lowest rank that holds it


@dataclass(frozen=True)
class Stages:
    """The pipeline of the ranks' run."""

    microbatches: int
    replicas: int
    first: tuple[int, ...]  # the stages of the rank that holds the first one, by chunk
    forms: dict[int, StageForm]  # by number of the stage


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
    start: str = ""  # folder of the ranks' run, with the parameters before the first step
    torch: bool = False  # whether the script imports PyTorch
    stages: Stages | None = None  # of the ranks' pipeline
    seed: int = 1

    @property
    def processes(self) -> int:
        """Number of processes of this run."""
        return self.ranks if self.copies or self.role == "ranks" else 1

    @property
    def shares(self) -> int:
        """Number of parts into which the ranks divide a batch."""
        return self.ranks if self.stages is None else self.stages.replicas

    def save(self, folder: Path) -> None:
        """Write the plan for the processes of a run."""
        (folder / "plan").write_bytes(pickle.dumps(self))

    @classmethod
    def load(cls, folder: Path) -> Plan:
        """Read the plan in a folder of this check."""
        plan = pickle.loads((folder / "plan").read_bytes())
        assert isinstance(plan, cls)
        return plan
