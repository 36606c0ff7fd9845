"""``mpidist bench pipeline``: what a pipeline costs, and its steps beside PyTorch's own."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from pathlib import Path
from typing import Any

from ..errors import InvalidArgument
from .bench_checks import check_only
from .bench_ddp import MISSING, given, print_rows
from .common import make_console, make_table, show
from .info import knobs, versions
from .options import check_writable

NAME = "pipeline"
OPTIONS = ("iterations", "json_file")
ITERATIONS = 40


def print_pipelines(iterations: int, json_file: str | None) -> int:
    """Measure and print."""
    import mpidist

    from ..bench.pipelines import engine_cost
    from ..bench.records import make_header

    iterations = checked(iterations, json_file)
    comm = mpidist.init()
    if comm.size < 2:
        raise InvalidArgument(
            "bench pipeline on 1 rank: allowed are 2 and more, as mpidist run -n 2 starts"
        )
    costs = engine_cost(comm, iterations)
    have, rows = beside(comm, iterations)
    library = {"torch": importlib.metadata.version("torch")} if have else {}
    header = make_header(comm, {**versions(), **library}, knobs())
    if comm.rank == 0:
        print_costs(costs, comm.size)
        if rows:
            print_rows(rows)
            print_shares(rows)
        if not have:
            make_console().print(MISSING)
        if json_file:
            write(json_file, header, costs, rows)
    return 0


def checked(iterations: int, json_file: str | None) -> int:
    """Check the options; give the number of iterations."""
    check_only(NAME, OPTIONS, "--iterations and --json")
    if not given("iterations"):
        iterations = ITERATIONS
    if iterations < 1:
        raise InvalidArgument(f"--iterations {iterations}: allowed are numbers >= 1")
    check_writable("--json", json_file)
    return iterations


def beside(comm: Any, iterations: int) -> tuple[bool, list[Any]]:
    """Time steps beside PyTorch's own, where rank 0 has it, and those of replicas on 4 ranks."""
    where = "torch.distributed.pipelining"
    have = importlib.util.find_spec("torch") is not None
    have = comm.broadcast_object(have and importlib.util.find_spec(where) is not None)
    rows: list[Any] = []
    if have:
        from ..bench.pipelines_torch import steps

        rows += steps(comm, iterations)
    if comm.size == 4:
        from ..bench.pipelines_replicas import replicas

        rows += replicas(comm, iterations)
    return have, rows


def write(json_file: str, header: dict[str, Any], costs: list[Any], rows: list[Any]) -> None:
    """Write what was measured as JSON."""
    content = {
        "header": header,
        "engine": [cost.as_json() for cost in costs],
        "rows": [row.as_json() for row in rows],
    }
    Path(json_file).write_text(json.dumps(content, indent=1), encoding="utf-8")


def print_costs(costs: list[Any], ranks: int) -> None:
    """Print what the engine takes, and, where there is one, the goal beside it."""
    from ..bench.pipelines import ENGINE_GOAL

    console = make_console()
    heads = ["identity stages", ">microbatches", ">µs a microbatch and stage"]
    table = make_table(console, *heads, *([">goal"] if ranks == 2 else []))
    for cost in costs:
        mark = "" if cost.seconds <= ENGINE_GOAL else "missed: "
        goal = [f"{mark}≤ {1e6 * ENGINE_GOAL:.0f}"] if ranks == 2 else []
        table.add_row(cost.schedule, str(cost.microbatches), f"{1e6 * cost.seconds:.1f}", *goal)
    show(console, table)


def print_shares(rows: list[Any]) -> None:
    """Print in how many of the races against PyTorch's own pipelining the goal was reached."""
    from ..bench.pipelines import SHARE_GOAL, THEIRS

    shares = [row.ratio for row in rows if row.name == THEIRS]
    if shares:
        reached = sum(share <= SHARE_GOAL for share in shares)
        make_console().print(
            f"goal ≤ {SHARE_GOAL:g} of {THEIRS}: reached at {reached} of {len(shares)} sizes, "
            f"worst {max(shares):.2f}"
        )
