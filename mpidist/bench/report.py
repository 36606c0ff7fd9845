"""The report of a run: an HTML page without external files, from the template report.html."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from ..measure import counted
from .plots import as_svg, draw, draw_training
from .results import Results, tables


def bench_page(results: Results) -> str:
    """Return the HTML page of a run of ``mpidist bench``."""
    names = ", ".join(dict.fromkeys(row.work for row in results.rows))
    return _page(results, f"mpidist bench: {names}", _machine(results), {"": draw(results)})


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
    return _page(results, title, lead, {"Training": draw_training(result)}, facts)


def _page(
    results: Results,
    title: str,
    lead: str,
    figures: dict[str, Any],
    facts: dict[str, str] | None = None,
) -> str:
    """Return the HTML page: facts, figures (SVG), tables, and the description of the run."""
    from jinja2 import Environment

    template = files(__package__).joinpath("report.html").read_text(encoding="utf-8")
    return (
        Environment(autoescape=True)
        .from_string(template)
        .render(
            title=title,
            lead=lead,
            facts=facts,
            figures={heading: as_svg(figure) for heading, figure in figures.items()},
            tables=tables(results),
            header={name: _text(value) for name, value in results.header.items()},
            notes=results.notes,
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
