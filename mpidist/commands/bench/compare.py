"""``mpidist bench compare``: two runs of ``mpidist bench`` beside each other."""

from __future__ import annotations

import click

from ..console import examples, make_console, print_tables


@click.command(
    "compare",
    short_help="Compare two result files, row by row, beyond the noise.",
    epilog=examples("mpidist bench compare before.json after.json"),
)
@click.argument("first", type=click.Path(), metavar="FIRST.json")
@click.argument("second", type=click.Path(), metavar="SECOND.json")
def compare_command(first: str, second: str) -> int:
    """Compare two files of `mpidist bench … --json`, row by row.

    The ratio is the time of the first run divided by the time of the second: above 1 the second
    is faster.  Nothing is measured, and MPI is not needed.
    """
    from ...bench.compare import NOISE, compare, read, tables

    console = make_console()
    comparison = compare(read(first), read(second))
    console.print(f"first: {first}\nsecond: {second}")
    print_tables(console, tables(comparison, narrow=console.width < 110))
    verdicts = [pair.verdict.partition(",")[0] for pair in comparison.pairs]
    console.print(
        f"\n{len(verdicts)} rows in both: {verdicts.count('better')} better, "
        f"{verdicts.count('worse')} worse, by more than {100 * NOISE:.0f} % and the spread of the "
        "iterations; ratio: time of the first run over that of the second, above 1 the second is "
        "faster"
    )
    return 0
