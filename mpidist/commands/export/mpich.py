"""``mpidist export mpich``: MPICH's selection of algorithms, with rules in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from ..console import examples
from .library import (
    finish,
    installed_mpi,
    measured_rules,
    measuring_options,
    predicted_rules,
    rule_options,
)


@click.command(
    "mpich",
    short_help="The selection of algorithms by which MPICH chooses.",
    epilog=examples(
        "mpidist export mpich allreduce reduce --ranks 4 --check -o selection.json",
        "mpidist export mpich allreduce --ranks 64 --predict 2e-6,1e-10 -o selection.json",
    ),
)
@rule_options
@measuring_options
def mpich_command(
    collectives: tuple[str, ...],
    ranks: list[int],
    sizes: list[int],
    model: Mapping[str, float] | None,
    output: str,
    budget: float,
    check: bool,
    force: bool,
) -> int:
    """Write MPICH's own selection, with rules for each COLLECTIVE (by default all) put into it.

    The selection is that of the MPICH that mpi4py loads: a file replaces all of it.  Its algorithms
    are forced one by one, and take turns with its own choice, in one job for each number of
    --ranks.  A rule is written where one is faster beyond the noise, twice; on a busy machine none,
    with exit code 2, unless --force is given.  With --predict the cost model compares our schedules
    of the same name instead, and a rule is written where one is faster than all others by more than
    the model's error.
    """
    from ...bench.forced import own_tree
    from ...interchange.mpich import (
        COLLECTIVES,
        check_version,
        environment,
        export_mpich,
        serves,
    )
    from ...launcher.function import run

    if check and model is not None:
        raise click.UsageError("--check: only for measured rules, whose ranks are here")
    library = "MPICH"
    here = installed_mpi(library)
    check_version(here.version)
    if model is None:
        rules, _ = measured_rules(
            here, COLLECTIVES, collectives, ranks, sizes, budget, force, environment("")
        )
    else:
        found, _ = predicted_rules(library, COLLECTIVES, collectives, ranks, sizes, model)
        rules = [rule for rule in found if serves(rule.collective, rule.algorithm, rule.ranks)]
    text = export_mpich(rules, run(own_tree, 1)[0])
    path = Path(output).absolute()
    return finish(
        library,
        rules,
        output,
        lambda: path.write_text(text, encoding="ascii"),
        environment(str(path)),
        check,
    )
