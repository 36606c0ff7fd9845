"""What ``mpidist info`` says of arrays on a GPU: the path of every class of operations, and why."""

from __future__ import annotations

from typing import Any

from ..device.find import find_device, why_no_device
from ..gpu.paths import CLASSES, Path, table, this_rank
from .common import make_table, show


def show_paths(comm: Any, console: Any) -> None:
    """Show what arrays on a GPU would take on this communicator; collective."""
    native = comm.backend.native is not None
    reasons = comm.allgather_object(why_no_device())
    paths = table(comm.allgather_object(this_rank(native)), native, comm.topology.num_nodes)
    console.print(f"\narrays on a GPU: {_device(reasons)}", markup=False)
    show(console, tabulate(paths, console))


def _device(reasons: list[str | None]) -> str:
    """Say on which device, or why on none; of the ranks that have none the first counts."""
    without = [(rank, reason) for rank, reason in enumerate(reasons) if reason is not None]
    if not without:
        return find_device().describe() + (" (rank 0)" if len(reasons) > 1 else "")
    rank, reason = without[0]
    return f"none on rank {rank}: {reason}.  With one:"


def tabulate(paths: list[Path], console: Any) -> Any:
    """Tabulate every path that could serve a class, the one that is taken marked."""
    made = make_table(console, "=operations", "=path", "=taken", "why")
    for operations, names in CLASSES.items():
        first = f"{operations}: {', '.join(names)}"
        for path in (p for p in paths if p.operations == operations):
            made.add_row(first, path.name, "yes" if path.taken else "", path.why)
            first = ""
    return made
