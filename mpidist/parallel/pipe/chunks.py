"""What a rank holds of the model: its chunks, and the stages made of them."""

from __future__ import annotations

import sys
from typing import Any

from ...errors import InvalidArgument
from ...nn import Module
from ..ddp import DDP
from .averaging import Averaging
from .divided import Partition
from .recompute import Recomputing
from .stage import Stage, stage_of

ALLOWED = (
    "allowed are a module of PyTorch or mpidist.nn, an object with forward(x), backward(grad) and "
    "parameters(), or a list (a ModuleList, too) of these, the chunks of this rank"
)


class Chunks:
    """The chunks of a rank.

    Parameters
    ----------
    given : module or list of modules
        What the user gave.
    comm : Communicator
        Who will send for them.
    checkpoint : bool
        Whether they compute forward once more on the way back.

    Attributes
    ----------
    modules : list of module
        As given, in a DDP or not.
    workers : list of Stage
        One for each chunk.
    averaging : Averaging
        Of their replicas.

    Raises
    ------
    InvalidArgument
        If it is no module, and no list of modules.
    """

    def __init__(self, given: Any, comm: Any, checkpoint: bool):
        rank = comm.rank
        where = f"rank {rank}: Pipeline: stage"
        self.modules = modules = _listed(given, where)
        several = len(modules) > 1 or modules[0] is not given
        for k, module in enumerate(modules):
            _check(module, f"{where}[{k}]" if several else where)
        self.averaging = Averaging(modules, rank)
        workers = [stage_of(m, f"rank {rank}: chunk {k}", comm) for k, m in enumerate(modules)]
        self.workers: list[Stage] = [Recomputing(w) for w in workers] if checkpoint else workers

    def __len__(self) -> int:
        return len(self.workers)


def _listed(given: Any, where: str) -> list[Any]:
    """List the chunks."""
    if isinstance(given, Partition):
        raise InvalidArgument(
            f"{where} is a Partition, all stages of the model: allowed are those of this rank, as "
            "parts[comm.rank]"
        )
    torch = sys.modules.get("torch")
    lists = (list, tuple) if torch is None else (list, tuple, torch.nn.ModuleList)
    modules = list(given) if isinstance(given, lists) else [given]
    if not modules:
        raise InvalidArgument(f"{where}={given!r}: {ALLOWED}")
    return modules


def _check(module: Any, where: str) -> None:
    """Raise InvalidArgument for what cannot be a chunk whatever library it is of."""
    bare = module.module if isinstance(module, DDP) else module
    if bare is None:
        raise InvalidArgument(f"{where} is None: {ALLOWED}")
    if isinstance(bare, type):
        name = bare.__name__
        raise InvalidArgument(f"{where} is the class {name}, not an object as {name}(…): {ALLOWED}")
    torch, own = sys.modules.get("torch"), getattr(bare, "forward", None)
    bases = [Module] if torch is None else [Module, torch.nn.Module]
    if getattr(own, "__func__", None) in [base.forward for base in bases]:
        raise InvalidArgument(f"{where} is a {type(bare).__name__}, without a forward(): {ALLOWED}")
