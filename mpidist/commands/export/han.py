"""``mpidist export han``: rules for Open MPI's component ``han``, on several nodes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from ...errors import InvalidArgument
from ..console import examples
from ..options import OUTPUT, SIZES, collective_name, groups_of, integer_ranges
from .library import MODEL, finish, predicted_rules


@click.command(
    "han",
    short_help="Rules by which Open MPI uses nodes, or does not.",
    epilog=examples(
        "mpidist export han allreduce --nodes 4,4 --predict 1e-6,1e-10 --link 2e-5,1e-9 -o han.txt",
    ),
)
@click.argument("collectives", nargs=-1, type=collective_name(), metavar="[COLLECTIVE]...")
@click.option(
    "--nodes", type=integer_ranges(1), required=True, help="Ranks on each node, such as 4,4."
)
@click.option(
    "--bytes",
    "sizes",
    type=SIZES,
    default="8-4M",
    show_default=True,
    help="Sizes of the whole buffer.",
)
@click.option(
    "--predict",
    "model",
    type=MODEL,
    required=True,
    help="Constants of the cost model: seconds of a message in a node, of a byte sent, of a byte "
    "combined.",
)
@click.option(
    "--link",
    type=MODEL,
    required=True,
    help="Seconds of a message between nodes, and of a byte; a node sends one at a time.",
)
@click.option("-o", "--output", type=OUTPUT, required=True, metavar="FILE", help="File to write.")
def han_command(
    collectives: tuple[str, ...],
    nodes: list[int],
    sizes: list[int],
    model: Mapping[str, float],
    link: Mapping[str, float],
    output: str,
) -> int:
    """Write rules by which Open MPI uses the nodes for each COLLECTIVE (by default all), or not.

    Its component han goes by nodes and is its choice wherever there are several; tuned takes all
    ranks alike.  The cost model compares both with the link between nodes, tuned by its fastest
    algorithm.  A rule is written where one is faster by more than the model's error.
    """
    from ...interchange.han import COLLECTIVES, environment, export_han
    from ...schedule.cost import Link

    if len(nodes) < 2:
        raise InvalidArgument(
            f"--nodes {nodes[0]}: expected two nodes or more: on one, tuned serves"
        )
    if "gamma" in link:
        raise InvalidArgument("--link: expected two numbers: combining is a matter of --predict")
    between = Link(link["alpha"], link["beta"])
    groups = groups_of(nodes, sum(nodes))
    rules, about = predicted_rules(
        "Open MPI's han", COLLECTIVES, collectives, [sum(nodes)], sizes, model, groups, between
    )
    about.append(
        f"nodes of {', '.join(map(str, nodes))} ranks; between them alpha {between.alpha:g} s,"
        f" beta {between.beta:g} s"
    )
    text, path = export_han(rules, about), Path(output).absolute()
    return finish(
        "Open MPI's han",
        rules,
        output,
        lambda: path.write_text(text, encoding="utf-8"),
        environment(str(path)),
        checked=False,
    )
