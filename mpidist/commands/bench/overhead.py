"""``mpidist bench overhead``: the time that mpidist itself adds to a call."""

from __future__ import annotations

import click

from ..console import examples, make_console, make_table, show


@click.command(
    "overhead",
    short_help="Time that mpidist itself adds to a call.",
    epilog=examples("mpidist run -n 2 -- mpidist bench overhead"),
)
def overhead_command() -> int:
    """Measure the engine's time for a round, and native allreduce beside the bare mpi4py call."""
    import mpidist

    from ...bench.overhead import BARE, engine_overhead, native_overhead

    comm = mpidist.init()
    costs = [*(engine_overhead() if comm.rank == 0 else []), *native_overhead(comm)]
    console = make_console()
    table = make_table(console, "what", ">deadline", ">µs", ">more than bare µs")
    bare = next(c.microseconds for c in costs if c.what.startswith(BARE))
    for cost in costs:
        more = f"{cost.microseconds - bare:.2f}" if cost.what.startswith("native") else ""
        deadline = "none" if cost.timeout is None else f"{cost.timeout:g} s"
        table.add_row(cost.what, deadline, f"{cost.microseconds:.2f}", more)
    show(console, table)
    return 0
