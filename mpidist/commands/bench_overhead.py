"""``mpidist bench --overhead``: what mpidist itself costs."""

from __future__ import annotations

from .common import make_console, make_table, show


def print_overhead() -> int:
    """Print the engine's cost of a round and native's beside the bare call."""
    import mpidist

    from ..bench.overhead import engine_overhead, native_overhead

    comm = mpidist.init()
    costs = [*(engine_overhead() if comm.rank == 0 else []), *native_overhead(comm)]
    console = make_console()
    table = make_table(console, "what", ">deadline", ">µs", ">more than bare µs")
    bare = next(c.microseconds for c in costs if c.what.startswith("mpi4py"))
    for cost in costs:
        more = f"{cost.microseconds - bare:.2f}" if cost.what.startswith("native") else ""
        deadline = "none" if cost.timeout is None else f"{cost.timeout:g} s"
        table.add_row(cost.what, deadline, f"{cost.microseconds:.2f}", more)
    show(console, table)
    return 0
