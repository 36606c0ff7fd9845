"""``mpidist bench compare``: runs of ``mpidist bench`` beside each other."""

from __future__ import annotations

from pathlib import Path

import click

from ..console import examples, make_console, print_tables
from .benchmark import plot_option, report_option


@click.command(
    "compare",
    short_help="Compare result files, row by row, beyond the noise.",
    epilog=examples(
        "mpidist bench compare before.json after.json",
        "mpidist bench compare before.json after.json --plot ratios.svg --report ratios.html",
        "mpidist bench compare openmpi.json mpich.json tuned.json",
    ),
)
@click.argument("first", type=click.Path(), metavar="FIRST.json")
@click.argument("others", type=click.Path(), metavar="SECOND.json...", nargs=-1, required=True)
@plot_option
@report_option
def compare_command(
    first: str, others: tuple[str, ...], plot: str | None, report: str | None
) -> int:
    """Compare files of `mpidist bench … --json`, row by row: each other file with the first.

    The ratio is the time of the first run divided by the time of the second: above 1 the second
    is faster.  Nothing is measured, and MPI is not needed.  The plot has these ratios over the
    sizes, for each collective; points that are more than 5 % slower have a red ring.
    """
    from ...bench.compare import NOISE, compare, read, tables
    from ...foreign import shown

    console = make_console()
    base, runs = read(first), {shown(other): read(other) for other in others}
    first = shown(first)
    comparisons = {other: compare(base, run) for other, run in runs.items()}
    for other, comparison in comparisons.items():
        console.print(f"first: {first}\nsecond: {other}", markup=False)
        print_tables(console, tables(comparison, narrow=console.width < 110))
        verdicts = [pair.verdict.partition(",")[0] for pair in comparison.pairs]
        console.print(
            f"\n{len(verdicts)} rows in both: {verdicts.count('better')} better, "
            f"{verdicts.count('worse')} worse, by more than {100 * NOISE:.0f} % and the spread of "
            "the iterations; ratio: time of the first run over that of the second, above 1 the "
            "second is faster\n"
        )
    if plot:
        from ...bench.report import draw_comparison, save

        save(draw_comparison(comparisons), plot)
    if report:
        from ...bench.report import comparison_page

        page = comparison_page((first, base), comparisons, runs)
        Path(report).write_text(page, encoding="utf-8")
    return 0
