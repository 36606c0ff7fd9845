"""``mpidist export goal``: an algorithm for the simulators LogGOPSim and ATLAHS."""

from __future__ import annotations

import click

from ...measure import counted
from ...schedule.contract import COLLECTIVES
from ..console import examples
from ..options import (
    Count,
    Seconds,
    byte_count,
    groups_of,
    integer_ranges,
    load_option,
    named_algorithm,
)
from .output import output_option, save


@click.command(
    "goal",
    short_help="An algorithm for the simulators LogGOPSim and ATLAHS.",
    epilog=examples(
        "mpidist export goal allreduce ring --ranks 64 --bytes 1M -o ring.goal",
        "mpidist export goal reduce tree:4 --ranks 16 --bytes 64K --alpha 2e-6 -o tree.goal",
    ),
)
@click.argument("collective")
@click.argument("algorithm")
@click.option("--ranks", type=Count(), required=True, help="Number of ranks.")
@click.option(
    "--bytes", "nbytes", type=byte_count(), required=True, help="Size of the whole buffer."
)
@click.option("--root", type=int, default=0, show_default=True, help="Root of rooted collectives.")
@click.option("--nodes", type=integer_ranges(1), help="Ranks on each node; by default one node.")
@click.option(
    "--segments", type=Count(), default=1, show_default=True, help="Segments of each block."
)
@click.option(
    "--alpha", type=Seconds(), default=1e-6, show_default=True, help="Seconds of a message."
)
@click.option(
    "--beta", type=Seconds(True), default=1e-10, show_default=True, help="Seconds of a byte sent."
)
@click.option(
    "--gamma", type=Seconds(), default=0.0, show_default=True, help="Seconds of a byte combined."
)
@output_option
@load_option
def goal_command(
    collective: str,
    algorithm: str,
    ranks: int,
    nbytes: int,
    root: int,
    nodes: list[int] | None,
    segments: int,
    alpha: float,
    beta: float,
    gamma: float,
    output: str,
) -> None:
    """Write an ALGORITHM of a COLLECTIVE as a GOAL text, after its proof.

    Comments at its head have the commands of txt2bin and LogGOPSim with the parameters that stand
    for --alpha and --beta, and the time that mpidist expects for them.
    """
    from ...interchange.goal import export_goal

    choice = named_algorithm(collective, algorithm)
    if COLLECTIVES[collective].idempotent and nbytes:
        raise click.UsageError(f"--bytes {nbytes}: {collective} has no data: expected 0")
    text = export_goal(
        collective,
        choice,
        ranks,
        nbytes,
        alpha=alpha,
        beta=beta,
        gamma=gamma,
        root=root,
        groups=groups_of(nodes, ranks),
        segments=segments,
    )
    save(text, output, f"{collective} {choice.name} on {counted(ranks, 'rank')}")
