"""The same collectives over 1, 2, 4 … of the nodes, in one run: rows, and curves of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import Unsupported
from ..measure import format_size
from .records import Results
from .runner import Step, measure
from .series import Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALGORITHMS = ("auto",)  # beside the bare mpi4py call
_STYLES = {"mpi4py": "--", "auto": "-"}


def node_counts(nodes: int) -> list[int]:
    """Give 1, 2, 4, … and all `nodes`."""
    powers = [1 << k for k in range(nodes.bit_length()) if 1 << k < nodes]
    return [*powers, nodes]


def measure_scaling(
    comm: Any,
    collectives: Sequence[str],
    settings: Settings,
    on_step: Step = lambda collective, nbytes: None,
) -> Results:
    """Measure collectives on all ranks of the first 1, 2, 4, … and all nodes; collective.

    Ranks of the other nodes wait, without a deadline, and look for messages rarely.

    Returns
    -------
    Results
        On rank 0 the rows of all node counts, which ``header["nodes"]`` has by ranks.
    """
    found, nodes = Results(), {}
    timeout, comm.timeout = comm.timeout, None
    for count in node_counts(comm.topology.num_nodes):
        members = [rank for group in comm.topology.groups[:count] for rank in group]
        part = comm.split(0 if comm.rank in members else None)
        if part is not None:
            part.timeout = timeout
            some = measure(part, collectives, settings, on_step)
            nodes[str(part.size)] = count
            found.rows += some.rows
            found.unsupported += some.unsupported
            found.iterations |= {f"{part.size} ranks {k}": n for k, n in some.iterations.items()}
            part.free()
        comm.barrier()
    comm.timeout = timeout
    found.header["nodes"] = nodes
    return found


def draw_scaling(results: Results) -> Figure:
    """Draw time over bytes, a panel for each collective, a colour for each number of nodes."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row.collective for row in results.rows))
    if not names:
        raise Unsupported("nothing was measured, so there is nothing to draw")
    across = min(3, len(names))
    down = -(-len(names) // across)
    figure = Figure(figsize=(5 * across, 3.8 * down), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).ravel()
    for axes, name in zip(panels, names):
        _panel(axes, [row for row in results.rows if row.collective == name], results)
        axes.set_title(name)
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    panels[0].legend(frameon=False, fontsize=8)
    return figure


def _panel(axes: Any, rows: list[Any], results: Results) -> None:
    nodes = results.header["nodes"]
    for colour, (ranks, count) in enumerate(nodes.items()):
        for algorithm in dict.fromkeys(row.algorithm for row in rows):
            line = [r for r in rows if r.ranks == int(ranks) and r.algorithm == algorithm]
            axes.plot(
                [row.bytes for row in line],
                [row.time_us for row in line],
                linestyle=_STYLES.get(algorithm, ":"),
                marker="o",
                markersize=4,
                color=f"C{colour}",
                label=f"{count} node{'s' * (count > 1)}, {ranks} ranks, {algorithm}",
            )
    sizes = sorted({row.bytes for row in rows})
    axes.set(xlabel="bytes of the whole buffer", ylabel="time (µs)", yscale="log")
    if sizes[0] > 0:
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [format_size(n) for n in sizes])
        axes.minorticks_off()
    axes.grid(True, alpha=0.3)
