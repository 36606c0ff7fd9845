"""Results as tables: on a terminal with lines and colours, else plain."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

from rich.table import Table
from rich.text import Text

from ..measure import round_size
from .contenders import BARE
from .records import PRIVATE, Refusal, Results, Row
from .stream import bound_percent

MakeTable = Callable[..., Table]


def microseconds(time_us: float) -> str:
    """Write a time in microseconds to four digits."""
    return f"{time_us:.4g}" if time_us < 1000 else f"{time_us:,.0f}"


def percent(share: float | None) -> str:
    """Write a share in whole percent; nothing for None."""
    return "" if share is None else f"{share:.0f}"


def tabulate(
    results: Results, make: MakeTable, colours: bool, narrow: bool = False
) -> Iterable[tuple[str, Table]]:
    """Give a heading and a table for each collective.

    Parameters
    ----------
    results : Results
        What was measured.
    make : callable
        Gives an empty table of the columns whose names it gets; ``>`` sets one to the right.
    colours : bool
        Whether to set the fastest and the wrong off.
    narrow : bool
        Whether to do without algbw, which time and bytes tell as well.
    """
    everything: list[Row | Refusal] = [*results.rows, *results.unsupported]
    for collective in dict.fromkeys(one.collective for one in everything):
        measured = [row for row in results.rows if row.collective == collective]
        if measured:
            yield _heading(measured[0]), _table(results, measured, make, colours, narrow)
        refused = [r for r in results.unsupported if r.collective == collective]
        if refused:
            table = make("=not measured", "=memory", ">bytes", "why")
            for refusal in refused:
                table.add_row(
                    refusal.algorithm, refusal.memory, round_size(refusal.bytes), refusal.reason
                )
            yield "", table


def _heading(row: Row) -> str:
    words = [row.collective, f"{row.ranks} rank{'s' * (row.ranks > 1)}"]
    if row.collective != "barrier":
        words += [row.dtype, *([row.op] if row.op else []), *(["in place"] * row.in_place)]
    return ", ".join(words)


def _table(
    results: Results, rows: list[Row], make: MakeTable, colours: bool, narrow: bool
) -> Table:
    bits = len(results.identical) > 0
    memory = any(row.memory != PRIVATE for row in results.rows)
    algbw = [] if narrow else [">algbw\nGB/s"]
    speeds = (">time\nµs", *algbw, ">busbw\nGB/s", ">x\nmpi4py")
    bound = any(bound_percent(row, results.header) is not None for row in rows)
    where, same = ["=memory"] if memory else [], ["same\nbits"] if bits else []
    of_bound = [">% of\nbound"] if bound else []
    table = make(">bytes", "=algorithm", *where, *speeds, *of_bound, "right", *same)
    for nbytes, group in groupby(rows, lambda row: row.bytes):
        equals = list(group)
        fastest = min(equals, key=lambda row: row.time_us)
        for row in equals:
            cells: list[Any] = [
                round_size(nbytes) if row is equals[0] or not colours else "",
                Text(row.algorithm),
                *([row.memory] if memory else []),
                microseconds(row.time_us),
                *([] if narrow else [f"{row.algbw_gbs:.3g}"]),
                f"{row.busbw_gbs:.3g}",
                "" if row.vs_native is None else f"{row.vs_native:.2f}",
                *([percent(bound_percent(row, results.header))] if bound else []),
                "yes" if row.correct else "WRONG",
            ]
            if bits:
                cells.append("yes" if results.identical.get(row.algorithm) else "no")
            table.add_row(*cells, style=_style(row, fastest) if colours else None)
        if colours:
            table.add_section()
    return table


def _style(row: Row, fastest: Row) -> str | None:
    if not row.correct:
        return "bold red"
    if row is fastest:
        return "green"
    return "bold" if row.algorithm in (BARE, "native") else None
