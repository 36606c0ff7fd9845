"""The pictures and pages of results: plots by matplotlib, HTML pages without external files."""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from ..errors import Unsupported
from ..measure import counted, format_size
from ..pipeline.schedules.gantt import Sheet
from ..selection.tuning import PRIVATE
from ..tables import Table
from .cases import BARE
from .compare import Comparison, Pair
from .compare import tables as comparison_tables
from .machine import busy_text
from .results import Results, Row, tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKERS = "osD^vP*Xh<>pd8"
# Those of matplotlib that differ most, dark ones first.
_COLOURS = (
    *("tab:red", "tab:blue", "tab:green", "tab:orange", "tab:purple", "tab:brown", "tab:pink"),
    *("tab:olive", "tab:cyan", "tab:gray", "navy", "darkgreen", "goldenrod", "orchid"),
)


# Places of a legend: to the right of the panel, and below it.
_LEGEND_BESIDE: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.01, 0.5)}
_LEGEND_BELOW: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16)}


def check_packages(option: str, *packages: str) -> None:
    """Raise Unsupported if a package that the command's `option` needs is not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise Unsupported(
            f"{option} needs {' and '.join(missing)}, not installed: "
            f"pip install {' '.join(missing)}"
        )


def endings() -> list[str]:
    """Return the file name extensions that matplotlib can write, sorted, without a dot."""
    from matplotlib.backend_bases import FigureCanvasBase

    return sorted(FigureCanvasBase.get_supported_filetypes())


def _plain(text: object) -> str:
    """Return a text in which matplotlib finds no formula: those between two ``$``."""
    return str(text).replace("$", r"\$")


def draw(results: Results, narrow: bool = False) -> Figure:
    """Draw time and bus bandwidth over the bytes, two panels for each collective.

    The bare call, native and auto are black; every other candidate has a colour.  A `narrow` figure
    has one panel below the other, for a phone.
    """
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row.work for row in results.rows))
    if not names:
        raise Unsupported("nothing was measured, so there is nothing to draw")
    parts = [[row for row in results.rows if row.work == name] for name in names]
    heights = [max(4.6, 0.8 + 0.19 * len({row.label for row in rows})) for rows in parts]
    if narrow:
        # The legend is below its panels.
        heights = [6.6 + 0.19 * len({row.label for row in rows}) for rows in parts]
        figure = Figure(figsize=(4.6, sum(heights)), layout="constrained")
        ratios = [ratio for height in heights for ratio in (3.3, height - 3.3)]
        grid = figure.subplots(2 * len(names), 1, height_ratios=ratios).reshape(len(names), 2)
    else:
        figure = Figure(figsize=(13.5, sum(heights)), layout="constrained")
        grid = figure.subplots(len(names), 2, squeeze=False, height_ratios=heights)
    for (left, right), name, rows in zip(grid, names, parts):
        ranks = counted(rows[0].ranks, "rank")
        place = ", in place" if rows[0].in_place else ""
        _curves(left, rows, "time_us")
        left.set(title=_plain(f"{name}, {ranks}, {rows[0].dtype}{place}"), ylabel="time (µs)")
        _curves(right, rows, "busbw_gbs")
        right.set(title=_plain(f"{name}: bus bandwidth"), ylabel="busbw (GB/s)")
        _legend(right, rows, narrow)
    return figure


def _curves(axes: Any, rows: list[Row], value: str) -> None:
    sizes = sorted({row.bytes or 0 for row in rows})
    for label, style in _styles(rows).items():
        points = sorted(
            (row.bytes or 0, getattr(row, value) or 0.0) for row in rows if row.label == label
        )
        points = [(x, y) for x, y in points if y > 0]
        axes.plot([x for x, _ in points], [y for _, y in points], label=_plain(label), **style)
    axes.set_yscale("log")
    _size_axis(axes, sizes)
    axes.grid(True, which="major", alpha=0.3)


def _size_axis(axes: Any, sizes: list[int]) -> None:
    """Make the x axis one of sizes in bytes, with at most ten tick labels."""
    if sizes[0] > 0:
        axes.set_xscale("log", base=2)
    shown = sizes if len(sizes) <= 10 else sizes[:: -(-len(sizes) // 10)]
    axes.set_xticks(shown, [format_size(n) for n in shown])
    axes.minorticks_off()
    axes.set_xlabel("bytes of the whole buffer")


def _styles(rows: list[Row]) -> dict[str, dict[str, Any]]:
    """Return matplotlib's style of each curve, by the label of its rows.

    The bare call and native are thick and black, "auto" is thin and black, and each other candidate
    has a colour.  Curves in symmetric memory are dashed, but for the executor "symmetric".
    """
    names = list(dict.fromkeys(row.candidate for row in rows))
    own = [name for name in names if name not in (BARE, "native", "auto")]
    styles: dict[str, dict[str, Any]] = {}
    for row in rows:
        style: dict[str, Any] = {"linewidth": 1.3, "markersize": 5, "zorder": 2}
        if row.candidate in (BARE, "native"):
            style |= {"color": "black", "linewidth": 3.2, "zorder": 1, "marker": "o"}
            style |= {"linestyle": "-" if row.candidate == BARE else ":"}
        elif row.candidate == "auto":
            style |= {"color": "black", "linewidth": 1, "marker": "x", "linestyle": "-."}
        else:
            k = own.index(row.candidate)
            style |= {"color": _COLOURS[k % len(_COLOURS)], "marker": _MARKERS[k % len(_MARKERS)]}
        if row.memory != PRIVATE:
            style |= {"markerfacecolor": "white", "linestyle": (0, (5, 2))}
        if row.candidate == row.memory:
            style |= {"linewidth": 2.6, "linestyle": "-", "zorder": 3}
        styles[row.label] = style
    return styles


def _legend(axes: Any, rows: list[Row], below: bool) -> None:
    """Add the legend beside or below the panel, sorted by bandwidth at the largest size."""
    last = max(row.bytes or 0 for row in rows)
    speed = {_plain(row.label): row.busbw_gbs or 0.0 for row in rows if row.bytes == last}
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(zip(handles, labels), key=lambda pair: -speed.get(pair[1], 0.0))
    axes.legend(
        [handle for handle, _ in order],
        [label for _, label in order],
        **(_LEGEND_BELOW if below else _LEGEND_BESIDE),
        fontsize=8,
        frameon=False,
        title=f"by speed at {format_size(last)}",
        title_fontsize=8,
        alignment="left",
        handlelength=3.5,
        labelspacing=0.35,
    )


def draw_training(result: Any, narrow: bool = False) -> Figure:
    """Draw loss and accuracy of the demo over the epochs, beside those of one process.

    If `narrow`, for a phone, the panels are one below the other.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6, 6.4) if narrow else (12, 3.8), layout="constrained")
    left, right = figure.subplots(2, 1) if narrow else figure.subplots(1, 2)
    epochs = range(1, len(result.losses) + 1)
    together = f"{counted(result.ranks, 'rank')} together"
    left.plot(epochs, result.losses, "C0-", linewidth=2.4, label=together)
    right.plot(epochs, [100 * a for a in result.accuracies], "C0-", linewidth=2.4, label=together)
    if result.reference_losses:
        alone = {"color": "black", "marker": "o", "markersize": 4, "linestyle": "none"}
        left.plot(epochs, result.reference_losses, label="one process", **alone)
        accuracies = [100 * a for a in result.reference_accuracies]
        right.plot(epochs, accuracies, label="one process", **alone)
    left.set(title="loss", yscale="log", xlabel="epoch", ylabel="cross-entropy")
    right.set(title="test accuracy", xlabel="epoch", ylabel="%")
    for axes in (left, right):
        axes.grid(True, alpha=0.3)
        axes.legend(frameon=False)
        axes.xaxis.get_major_locator().set_params(integer=True)
    return figure


WORSE = 0.05  # part of a time by which a run that is slower is marked


def draw_comparison(comparisons: Mapping[str, Comparison], narrow: bool = False) -> Figure:
    """Draw the time of the first run divided by that of another, a panel for each collective.

    Work without a size has a panel too, with a point for each candidate.  Above 1 the other run is
    faster; points at which it is more than 5 % slower have a red ring.  `comparisons` has the other
    runs' names as keys.  If `narrow`, for a phone, the legend is below each panel.
    """
    from matplotlib.figure import Figure

    pairs = [(run, pair) for run, found in comparisons.items() for pair in found.pairs]
    names = list(dict.fromkeys(pair.first.work for _, pair in pairs))
    if not names:
        raise Unsupported("no row is in both runs, so there is nothing to draw")
    size = (4.6, 6.0 * len(names)) if narrow else (10.5, 4.2 * len(names))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(names), 1, squeeze=False)
    for axes, name in zip(grid[:, 0], names):
        part = [(run, pair) for run, pair in pairs if pair.first.work == name]
        _ratios(axes, part, list(comparisons), narrow)
        ranks = counted(part[0][1].first.ranks, "rank")
        axes.set(title=_plain(f"{name}, {ranks}"), ylabel="time of first / time of other")
    return figure


def _ratios(axes: Any, part: list[tuple[str, Pair]], runs: list[str], narrow: bool) -> None:
    """Draw one panel: of each pair, the first run's time over the other's, at the pair's size.

    Work without a size has its candidates on the x axis.  `part` has the pairs of one kind of work,
    each with the name of the run that is compared with the first; `runs` has all these names.
    """
    sized = part[0][1].first.bytes is not None
    styles = _styles([pair.first for _, pair in part])
    order = list(styles)
    for number, run in enumerate(runs):
        for label, style in styles.items():
            points = sorted(
                ((pair.first.bytes or 0) if sized else order.index(label), pair.ratio)
                for name, pair in part
                if name == run and pair.first.label == label
            )
            if not points:
                continue
            style = style | {"linewidth": 1.3, "zorder": 2, "alpha": 1 / (1 + 0.6 * number)}
            if not sized:
                style["linestyle"] = "none"
            of = f" ({run})" if len(runs) > 1 else ""
            axes.plot(*zip(*points), label=_plain(f"{label}{of}"), **style)
            worse = [point for point in points if point[1] < 1 / (1 + WORSE)]
            if worse:
                ring = {"markersize": 12, "markerfacecolor": "none", "markeredgewidth": 1.6}
                axes.plot(*zip(*worse), "o", color="red", label="_worse", zorder=4, **ring)
    axes.axhline(1, color="black", linewidth=1.2, zorder=1)
    axes.set_yscale("log", base=2)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.7), max(high, 1.4))  # noise does not fill the panel
    axes.yaxis.set_major_formatter("{x:.3g}")
    if sized:
        _size_axis(axes, sorted({pair.first.bytes or 0 for _, pair in part}))
    else:
        axes.set_xticks(range(len(order)), list(map(_plain, order)))
        axes.margins(x=0.1)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(
        **(_LEGEND_BELOW if narrow else _LEGEND_BESIDE),
        fontsize=9,
        frameon=False,
        title="above 1: faster than the first\nred ring: more than 5 % slower",
        title_fontsize=9,
        alignment="left",
    )


def save(figure: Figure, path: str) -> None:
    """Write a figure to a file, in the format of the file's ending.

    The error for a format that matplotlib does not know names ``--plot``.
    """
    try:
        figure.savefig(path, dpi=130)
    except ValueError as error:
        raise Unsupported(f"--plot {path}: {error}") from error


def as_svg(figure: Figure) -> str:
    """Return a figure as an SVG element for an HTML page, in the page's colours.

    Black is ``currentColor``, and so is what has no colour of its own; the ground is that of the
    page.
    """
    target = io.StringIO()
    figure.savefig(target, format="svg", metadata={"Date": None})
    text = target.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = text.replace("fill: #ffffff", "fill: none").replace("#ffffff", "var(--paper)")
    text = text.replace("#000000", "currentColor").replace("stroke: black", "stroke: currentColor")
    return text[text.index("<svg") :]


DOTS = 100  # pixels of the sheet per inch


def draw_pipeline(sheet: Sheet) -> Figure:
    """Draw the boxes and labels of a sheet: the picture of a pipeline schedule."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    figure = Figure(figsize=(sheet.width / DOTS, sheet.height / DOTS))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, sheet.width), ylim=(sheet.height, 0))
    axes.set_axis_off()
    for x, y, width, height in sheet.ground:
        axes.add_patch(Rectangle((x, y), width, height, facecolor="#eef0f2"))
    for box in sheet.boxes:
        place, border = ((box.x, box.y), box.width, box.height), 0.75 * box.border
        axes.add_patch(Rectangle(*place, facecolor=box.colour, edgecolor="white", linewidth=border))
        middle = box.x + box.width / 2, box.y + box.height / 2
        colour = "white" if box.dark else "#222222"
        axes.text(
            *middle, _plain(box.text), size=7.9, color=colour, ha="center", va="center_baseline"
        )
    for word in sheet.labels:
        title = word.style == "title"
        axes.text(
            word.x,
            word.y,
            _plain(word.text),
            size=11.5 if title else 8.6,
            weight="bold" if word.style in ("title", "bold") else "normal",
            ha="right" if word.style == "right" else "left",
            va="baseline",
            color="#222222",
        )
    return figure


def save_pipeline(sheet: Sheet, path: str) -> None:
    """Write a sheet (:func:`draw_pipeline`) to a PNG file, 2 × 2 pixels for each unit of it."""
    draw_pipeline(sheet).savefig(path, format="png", dpi=2 * DOTS)


_STYLES = {"mpi4py": "--", "auto": "-"}


def draw_scaling(results: Results) -> Figure:
    """Draw time over bytes, a panel for each collective, a colour for each number of nodes.

    The line style tells the bare mpi4py call, "auto" and the other algorithms apart.
    """
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row.work for row in results.rows))
    if not names:
        raise Unsupported("nothing was measured, so there is nothing to draw")
    across = min(3, len(names))
    down = -(-len(names) // across)
    figure = Figure(figsize=(5 * across, 3.8 * down), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).ravel()
    for axes, name in zip(panels, names):
        _panel(axes, [row for row in results.rows if row.work == name], results)
        axes.set_title(_plain(name))
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    panels[0].legend(frameon=False, fontsize=8)
    return figure


def _panel(axes: Any, rows: list[Any], results: Results) -> None:
    nodes = results.header["nodes"]
    for colour, (ranks, count) in enumerate(nodes.items()):
        for label in dict.fromkeys(row.label for row in rows):
            line = [r for r in rows if r.ranks == int(ranks) and r.label == label]
            if not line:
                continue
            axes.plot(
                [row.bytes or 0 for row in line],
                [row.time_us for row in line],
                linestyle=_STYLES.get(label, ":"),
                marker="o",
                markersize=4,
                color=f"C{colour}",
                label=f"{counted(count, 'node')}, {counted(int(ranks), 'rank')}, {_plain(label)}",
            )
    sizes = sorted({row.bytes or 0 for row in rows})
    axes.set(xlabel="bytes of the whole buffer", ylabel="time (µs)", yscale="log")
    if sizes[0] > 0:
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [format_size(n) for n in sizes])
        axes.minorticks_off()
    axes.grid(True, alpha=0.3)


# -- pages ----------------------------------------------------------------------------------------


def bench_page(results: Results) -> str:
    """Return the HTML page of a run of ``mpidist bench``."""
    names = ", ".join(dict.fromkeys(row.work for row in results.rows))
    title, figures = f"mpidist bench: {names}", {"": partial(draw, results)}
    return _page(title, _machine(results), figures, tables(results), results.header, results.notes)


def comparison_page(
    first: tuple[str, Results], comparisons: Mapping[str, Comparison], others: Mapping[str, Results]
) -> str:
    """Return the HTML page of ``mpidist bench compare``: ratios, tables, and the runs.

    `first` is the first run with its name; `comparisons` and `others` have the other runs' names as
    keys.
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
    """Return the HTML page of a run of ``mpidist demo``."""
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
