"""``mpidist bench --compare``: two runs beside each other."""

from __future__ import annotations

from functools import partial

from .common import make_console, make_table, show


def print_comparison(first: str, second: str) -> int:
    """Print two runs beside each other; needs no MPI."""
    from ..bench.compare import NOISE, compare, read, tabulate

    console = make_console()
    comparison = compare(read(first), read(second))
    console.print(f"first: {first}\nsecond: {second}")
    narrow = console.width < 110
    for heading, table in tabulate(comparison, partial(make_table, console), narrow):
        console.print(f"\n[bold]{heading}[/]")
        show(console, table)
    verdicts = [pair.verdict.partition(",")[0] for pair in comparison.pairs]
    console.print(
        f"\n{len(verdicts)} in both: {verdicts.count('better')} better, "
        f"{verdicts.count('worse')} worse, beyond {100 * NOISE:.0f} % or the spread of the "
        "iterations; ratio: time of the first over that of the second, above 1 it is faster now"
    )
    return 0
