"""``mpidist export openmpi``: rules for Open MPI's component ``tuned``."""

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
    "openmpi",
    short_help="Rules by which Open MPI chooses algorithms.",
    epilog=examples(
        "mpidist export openmpi allreduce --ranks 4 --check -o rules.txt",
        "mpidist export openmpi --ranks 64,128 --predict 2e-6,1e-10 --version 6 -o rules.json",
    ),
)
@rule_options
@measuring_options
@click.option(
    "--commutative",
    is_flag=True,
    help="Allow algorithms (rings, trees) whose results are wrong with operations of a program's "
    "own that are not commutative: Open MPI would follow the rules there too.",
)
@click.option(
    "--version",
    type=click.Choice(["4", "5", "6"]),
    help="Major version of Open MPI: JSON from 6 on.  By default that of this machine.",
)
def openmpi_command(
    collectives: tuple[str, ...],
    ranks: list[int],
    sizes: list[int],
    model: Mapping[str, float] | None,
    output: str,
    budget: float,
    check: bool,
    force: bool,
    commutative: bool,
    version: str | None,
) -> int:
    """Write rules by which Open MPI chooses algorithms of each COLLECTIVE (by default all).

    Its algorithms are forced one by one, and take turns with its own choice, in one job for each
    number of --ranks.  A rule is written where one is faster beyond the noise, twice; on a busy
    machine none, with exit code 2, unless --force is given.  With --predict nothing is started: the
    cost model compares our schedules of the same name, and a rule is written where one is faster
    than all others by more than the model's error.
    """
    from ...interchange.openmpi import (
        CLASSIC_BELOW,
        COLLECTIVES,
        algorithms,
        check_version,
        environment,
        export_openmpi,
    )

    if check and model is not None:
        raise click.UsageError("--check: only for measured rules, whose ranks are here")
    library = "Open MPI"
    here = installed_mpi(library) if model is None or version is None else None
    major = (*here.version, 0)[0] if here is not None else 0
    wanted = int(version or major)
    check_version(wanted)
    known = algorithms(collectives or COLLECTIVES, commutative)
    if check and (wanted < CLASSIC_BELOW) != (major < CLASSIC_BELOW):
        raise click.UsageError(
            f"--check: this is Open MPI {major}, which reads no file of {wanted}"
        )
    if here is not None and model is None:
        rules, about = measured_rules(
            here, known, collectives, ranks, sizes, budget, force, environment("")
        )
    else:
        assert model is not None
        rules, about = predicted_rules(library, COLLECTIVES, collectives, ranks, sizes, model)
        # Those left out count in the comparison: Open MPI may choose them where it can.
        rules = [rule for rule in rules if rule.algorithm in known[rule.collective].schedules]
    text = export_openmpi(rules, wanted, about)
    path = Path(output).absolute()
    return finish(
        library,
        rules,
        output,
        lambda: path.write_text(text, encoding="utf-8"),
        environment(str(path)),
        check,
    )
