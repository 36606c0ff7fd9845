"""A page of HTML that needs nothing else: curves, tables, and what it was measured on."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from itertools import groupby
from typing import Any

from ..measure import round_size
from .cases import BARE
from .memory import describe_stream
from .plots import as_svg, draw, draw_training
from .results import BOUND_NOTE, Results, Row, bound_percent, microseconds, percent

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1f24; background: #f6f7f9; margin: 0; }
main { max-width: 1060px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 26px; margin: 8px 0 2px; } h2 { font-size: 19px; margin: 34px 0 10px; }
.lead { color: #57606a; margin: 0 0 18px; }
.card { background: white; border: 1px solid #d8dee4; border-radius: 8px; padding: 14px 18px;
  overflow-x: auto; }
.facts { display: flex; flex-wrap: wrap; gap: 12px; } .facts .card { flex: 1 1 150px; }
.facts b { display: block; font-size: 21px; } .facts span { color: #57606a; font-size: 13px; }
svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: #57606a; border-bottom: 2px solid #d8dee4; }
th, td { padding: 4px 12px 4px 0; } td { border-bottom: 1px solid #eceff2; vertical-align: top; }
.n { text-align: right; } tr.native td { font-weight: 600; } tr.best td { background: #e9f7ec; }
tr.size td { border-top: 2px solid #d8dee4; }
.good { color: #1a7f37; } .bad { color: #cf222e; font-weight: 700; }
.bar { display: inline-block; height: 9px; background: #4c8bd6; border-radius: 2px; }
tr.native .bar { background: #1b1f24; }
code { font-size: 13px; overflow-wrap: anywhere; }
"""


def page(title: str, lead: str, sections: Iterable[str]) -> str:
    """Give a whole page of sections, which are HTML."""
    body = "\n".join(sections)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title>"
        '<meta name="viewport" content="width=device-width">'
        f"<style>{_STYLE}</style></head>\n<body><main><h1>{escape(title)}</h1>"
        f'<p class="lead">{escape(lead)}</p>\n{body}\n</main></body></html>\n'
    )


def bench_page(results: Results) -> str:
    """Give the page of ``mpidist bench``."""
    names = ", ".join(dict.fromkeys(row.collective for row in results.rows))
    sections = [
        f'<div class="card">{as_svg(draw(results))}</div>',
        *tables(results),
        header(results),
    ]
    return page(f"mpidist bench: {names}", _where(results), sections)


def demo_page(result: Any, results: Results) -> str:
    """Give the page of ``mpidist demo``.

    Parameters
    ----------
    result : DemoResult
        Of the training.
    results : Results
        Of the allreduces.
    """
    match = {True: "yes", False: "NO", None: "not asked"}[result.matches]
    facts = {
        "test accuracy": f"{100 * result.accuracy:.2f} %",
        "final loss": f"{result.losses[-1]:.4g}",
        "replicas bit-identical": "yes" if result.identical else "NO",
        "as one process": match,
        "parameters": f"{result.parameters:,}",
        "seconds": f"{result.seconds:.1f}",
    }
    cards = "".join(
        f'<div class="card"><b class="{"bad" if value == "NO" else ""}">{escape(value)}</b>'
        f"<span>{escape(name)}</span></div>"
        for name, value in facts.items()
    )
    lead = (
        f"UCI handwritten digits, {result.train_samples} to learn from and {result.test_samples} "
        f"to test, {result.epochs} epochs in batches of {result.batch}.  {_where(results)}"
    )
    sections = [
        f'<div class="facts">{cards}</div>',
        f'<h2>Training</h2><div class="card">{as_svg(draw_training(result))}</div>',
        "<h2>Allreduce of the model's gradients</h2>",
        *tables(results),
        header(results),
    ]
    return page("mpidist demo: digits, learnt together", lead, sections)


def _where(results: Results) -> str:
    head = results.header
    mpi = head.get("mpi") or {}
    library = f"{mpi['vendor']} {mpi['version']}, " if mpi else ""
    return f"{library}{head.get('ranks')} ranks on {head.get('host')}, {head.get('date')}"


def tables(results: Results) -> list[str]:
    """Give a table for each collective, the refused below it."""
    parts = []
    for collective, group in groupby(results.rows, lambda row: row.collective):
        rows = list(group)
        top = max(row.busbw_gbs for row in rows) or 1.0
        bound = any(bound_percent(row, results.header) is not None for row in rows)
        lines = [
            line
            for _, equals in groupby(rows, lambda row: row.bytes)
            for line in _size_rows(list(equals), top, results, bound)
        ]
        share = '<th class="n">% of bound</th>' if bound else ""
        bits = "<th>same bits</th>" if results.identical else ""
        parts.append(
            f"<h2>{escape(collective)}, {rows[0].ranks} ranks, {escape(rows[0].dtype)}</h2>"
            '<div class="card"><table><tr><th class="n">bytes</th><th>algorithm</th>'
            '<th class="n">time µs</th><th class="n">busbw GB/s</th><th></th>'
            f'<th class="n">× mpi4py</th>{share}<th>right</th>{bits}</tr>'
            f"{''.join(lines)}</table></div>"
        )
    if results.unsupported:
        lines = [
            f"<tr><td>{escape(r.collective)}</td><td>{escape(r.algorithm)}</td>"
            f'<td class="n">{round_size(r.bytes)}</td><td>{escape(r.reason)}</td></tr>'
            for r in results.unsupported
        ]
        parts.append(
            f'<h2>Not measured</h2><div class="card"><table>{"".join(lines)}</table></div>'
        )
    return parts


def _size_rows(rows: list[Row], top: float, results: Results, bound: bool) -> list[str]:
    identical = results.identical
    fastest = min(rows, key=lambda row: row.time_us)
    lines = []
    for row in rows:
        marks = ["size"] * (row is rows[0]) + ["best"] * (row is fastest)
        marks += ["native"] * (row.algorithm in (BARE, "native"))
        ratio = "" if row.vs_native is None else f"{row.vs_native:.2f}"
        share = bits = ""
        if bound:
            share = f'<td class="n">{percent(bound_percent(row, results.header))}</td>'
        if identical:
            bits = f"<td>{'yes' if identical.get(row.algorithm) else 'no'}</td>"
        verdict = '<td class="good">yes</td>' if row.correct else '<td class="bad">WRONG</td>'
        lines.append(
            f'<tr class="{" ".join(marks)}"><td class="n">{round_size(row.bytes)}</td>'
            f'<td>{escape(row.label)}</td><td class="n">{microseconds(row.time_us)}</td>'
            f'<td class="n">{row.busbw_gbs:.3g}</td><td><span class="bar" style="width:'
            f'{120 * row.busbw_gbs / top:.0f}px"></span></td><td class="n">{ratio}</td>'
            f"{share}{verdict}{bits}</tr>"
        )
    return lines


def header(results: Results) -> str:
    """Give what it was measured on, as a table."""
    lines = []
    for name, value in results.header.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k} {v}" for k, v in value.items()) or "nothing set"
        lines.append(f"<tr><th>{escape(name)}</th><td><code>{escape(str(value))}</code></td></tr>")
    note = (
        "Time: median over iterations of the slowest rank's time, from a barrier on. × mpi4py: "
        "time of the bare mpi4py call in the same run over this one's; above 1 is faster."
    )
    speed = describe_stream(results.header)
    if speed:
        note += f" {escape(speed[0].upper() + speed[1:])}. {escape(BOUND_NOTE)}."
    return (
        f'<h2>Measured on</h2><div class="card"><table>{"".join(lines)}</table><p>{note}</p></div>'
    )
