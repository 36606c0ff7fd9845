"""The report of a run: an HTML page without external files, from the template report.html."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from ..measure import counted
from ..tables import Table
from .compare import Comparison
from .compare import tables as comparison_tables
from .plots import as_svg, draw, draw_comparison, draw_training
from .results import Results, busy_text, tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def bench_page(results: Results) -> str:
    """Return the HTML page of a run of ``mpidist bench``."""
    names = ", ".join(dict.fromkeys(row.work for row in results.rows))
    title, figures = f"mpidist bench: {names}", {"": partial(draw, results)}
    return _page(title, _machine(results), figures, tables(results), results.header, results.notes)


def comparison_page(
    first: tuple[str, Results], comparisons: Mapping[str, Comparison], others: Mapping[str, Results]
) -> str:
    """Return the HTML page of ``mpidist bench compare``: ratios, tables, and the runs.

    Parameters
    ----------
    first : tuple of (str, Results)
        Name and results of the first run.
    comparisons : dict
        The comparison with each of the other runs, by the name of that run.
    others : dict
        The results of these runs, by name.
    """
    name, results = first
    several = len(others) > 1
    shown = [
        replace(table, heading=f"{run}: {table.heading}" if several else table.heading)
        for run, comparison in comparisons.items()
        for table in comparison_tables(comparison)
    ]
    header = {
        run: f"{_machine(each)}: {each.header.get('command', 'unknown command')}"
        for run, each in {name: results, **others}.items()
    }
    title = f"mpidist bench compare: {', '.join(header)}"
    lead = f"Ratios are times of {name} over those of the other: above 1 the other is faster."
    return _page(title, lead, {"": partial(draw_comparison, comparisons)}, shown, header)


def demo_page(result: Any, results: Results) -> str:
    """Return the HTML page of a run of ``mpidist demo``.

    Parameters
    ----------
    result : DemoResult
        Result of the training.
    results : Results
        Results of the allreduces of its gradients.
    """
    match = {True: "yes", False: "NO", None: "not checked"}[result.matches]
    facts = {
        "test accuracy": f"{100 * result.accuracy:.2f} %",
        "final loss": f"{result.losses[-1]:.4g}",
        "replicas bit-identical": "yes" if result.identical else "NO",
        "as one process": match,
        "parameters": f"{result.parameters:,}",
        "seconds": f"{result.seconds:.1f}",
    }
    lead = (
        f"UCI handwritten digits, {result.train_samples} training and {result.test_samples} test "
        f"samples, {counted(result.epochs, 'epoch')} in batches of {result.batch}.  "
        f"{_machine(results)}"
    )
    title = "mpidist demo: training on handwritten digits"
    figures = {"Training": partial(draw_training, result)}
    return _page(title, lead, figures, tables(results), results.header, results.notes, facts)


def _page(
    title: str,
    lead: str,
    figures: Mapping[str, Callable[..., Figure]],
    shown: Sequence[Table],
    header: Mapping[str, Any],
    notes: Sequence[str] = (),
    facts: dict[str, str] | None = None,
) -> str:
    """Return the HTML page: title, lead text, facts, figures (SVG), tables, notes, run's header.

    Each figure is drawn twice, for wide and for narrow windows: ``draw(narrow=…)``.
    """
    from jinja2 import Environment

    template = files(__package__).joinpath("report.html").read_text(encoding="utf-8")
    return (
        Environment(autoescape=True)
        .from_string(template)
        .render(
            title=title,
            lead=lead,
            facts=facts,
            figures={
                heading: [as_svg(draw_it(narrow=narrow)) for narrow in (False, True)]
                for heading, draw_it in figures.items()
            },
            warnings=[busy_text(*node) for node in header.get("busy", ())],
            tables=shown,
            header={name: _text(value) for name, value in header.items() if name != "busy"},
            notes=notes,
        )
    )


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items()) or "nothing set"
    return str(value)


def _machine(results: Results) -> str:
    head = results.header
    mpi = head.get("mpi") or {}
    library = f"{mpi['vendor']} {mpi['version']}, " if mpi else ""
    ranks = counted(head.get("ranks", 1), "rank")
    return f"{library}{ranks} on {head.get('host')}, {head.get('date')}"
