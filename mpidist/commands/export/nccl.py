"""``mpidist export nccl``: a table for NCCL's example tuner plugin."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from ...measure import counted
from ..console import examples, make_console
from ..options import Count
from .library import predicted_rules, print_rules, rule_options


@click.command(
    "nccl",
    short_help="A table for NCCL's example tuner plugin.",
    epilog=examples(
        "mpidist export nccl allreduce --ranks 16 --predict 5e-6,5e-11 -o tuner.csv",
    ),
)
@rule_options
@click.option(
    "--protocol",
    type=click.Choice(["ll", "ll128", "simple"]),
    default="simple",
    show_default=True,
    help="Protocol of each rule, of which the cost model knows nothing.",
)
@click.option("--nodes", type=Count(), help="Number of nodes that the rules are for; default any.")
@click.option(
    "--channels",
    type=Count(),
    help="Number of channels of each rule.  Without it NCCL 2.30's plugin asks for one channel.",
)
def nccl_command(
    collectives: tuple[str, ...],
    ranks: list[int],
    sizes: list[int],
    model: Mapping[str, float] | None,
    output: str,
    protocol: str,
    nodes: int | None,
    channels: int | None,
) -> int:
    """Write a table by which NCCL's example tuner plugin chooses between its tree and its ring.

    The cost model compares our schedules of the same name, with the constants of --predict.  A rule
    is written where one is faster than the other by more than the model's error.

    That plugin, as NCCL 2.30 has it, asks for one channel in every call for which no rule gives
    another number: there, change its default to 0, or give rules for all calls.
    """
    from ...interchange.nccl import COLLECTIVES, export_nccl

    if model is None:
        raise click.UsageError("--predict is missing: NCCL's algorithms are not measured here")
    rules, about = predicted_rules("NCCL", COLLECTIVES, collectives, ranks, sizes, model)
    console = make_console()
    if not rules:
        console.print(f"no algorithm is ahead of the others: {output} is not written")
        return 0
    print_rules(console, rules)
    text = export_nccl(rules, protocol, nodes or -1, channels or -1, about)
    Path(output).write_text(text, encoding="ascii")
    console.print(f"{counted(len(rules), 'rule')} written to {output}")
    return 0
