"""``mpidist export msccl``: an algorithm as an MSCCL file, for RCCL."""

from __future__ import annotations

import click

from ...measure import counted
from ..console import examples
from ..options import Count, groups_of, integer_ranges, load_option, named_algorithm
from .output import output_option, save


@click.command(
    "msccl",
    short_help="An algorithm as an MSCCL file, for RCCL.",
    epilog=examples(
        "mpidist export msccl allreduce ring --ranks 8 -o ring.xml",
        "mpidist export msccl allgather bruck --ranks 8 --protocol LL -o bruck.xml",
    ),
)
@click.argument("collective")
@click.argument("algorithm")
@click.option("--ranks", type=Count(), required=True, help="Number of ranks: GPUs.")
@click.option("--nodes", type=integer_ranges(1), help="Ranks on each node; by default one node.")
@click.option(
    "--segments", type=Count(), default=1, show_default=True, help="Segments of each block."
)
@click.option(
    "--protocol",
    default="Simple",
    show_default=True,
    help="NCCL's protocol of the messages: Simple, LL or LL128.",
)
@output_option
@load_option
def msccl_command(
    collective: str,
    algorithm: str,
    ranks: int,
    nodes: list[int] | None,
    segments: int,
    protocol: str,
    output: str,
) -> None:
    """Write an ALGORITHM of a COLLECTIVE as an MSCCL file, after its proof.

    The file is proved too, as `mpidist prove FILE.xml` does.  It is for calls of any size that the
    number of chunks divides: minBytes and maxBytes are 0, to be set as RCCL should choose.
    """
    from ...interchange.msccl.text import export_msccl

    choice = named_algorithm(collective, algorithm)
    text = export_msccl(
        collective,
        choice,
        ranks,
        groups=groups_of(nodes, ranks),
        segments=segments,
        protocol=protocol,
    )
    save(text, output, f"{collective} {choice.name} on {counted(ranks, 'rank')}")
