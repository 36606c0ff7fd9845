"""Curves of time and bus bandwidth; needs matplotlib (``pip install 'mpidist[bench]'``)."""

from __future__ import annotations

import importlib.util
import io
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InvalidArgument, Unsupported
from ..measure import format_size, round_size
from .contenders import BARE
from .crossovers import crossovers
from .records import PRIVATE, Results, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKERS = "osD^vP*Xh<>pd8"
# Those of matplotlib that differ most, dark ones first.
_COLOURS = (
    *("tab:red", "tab:blue", "tab:green", "tab:orange", "tab:purple", "tab:brown", "tab:pink"),
    *("tab:olive", "tab:cyan", "tab:gray", "navy", "darkgreen", "goldenrod", "orchid"),
)


def check_matplotlib(option: str) -> None:
    """Raise Unsupported, with the cure, where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise Unsupported(
            f"{option} needs matplotlib, which is not installed: pip install 'mpidist[bench]'"
        )


def check_format(option: str, path: str) -> None:
    """Raise InvalidArgument where matplotlib cannot write a file of that ending."""
    from matplotlib.backend_bases import FigureCanvasBase

    known = sorted(FigureCanvasBase.get_supported_filetypes())
    ending = Path(path).suffix.removeprefix(".").lower()
    if ending not in known:
        raise InvalidArgument(f"{option} {path}: allowed endings are {', '.join(known)}")


def draw(results: Results) -> Figure:
    """Draw time and bus bandwidth over the bytes, a row for each collective.

    The bare call and native are black; everything hand-written has a colour.  A vertical line is
    where the fastest one changes.
    """
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row.collective for row in results.rows))
    if not names:
        raise Unsupported("nothing was measured, so there is nothing to draw")
    parts = [[row for row in results.rows if row.collective == name] for name in names]
    heights = [max(4.6, 0.8 + 0.19 * len({row.label for row in rows})) for rows in parts]
    figure = Figure(figsize=(13.5, sum(heights)), layout="constrained")
    grid = figure.subplots(len(names), 2, squeeze=False, height_ratios=heights)
    for (left, right), name, rows in zip(grid, names, parts):
        ranks = f"{rows[0].ranks} rank{'s' * (rows[0].ranks > 1)}"
        place = ", in place" if rows[0].in_place else ""
        _curves(left, rows, "time_us")
        left.set(title=f"{name}, {ranks}, {rows[0].dtype}{place}", ylabel="time (µs)")
        _curves(right, rows, "busbw_gbs")
        right.set(title=f"{name}: bus bandwidth", ylabel="busbw (GB/s)")
        _mark_crossovers((left, right), rows)
        _legend(right, rows)
    return figure


def _curves(axes: Any, rows: list[Row], value: str) -> None:
    sizes = sorted({row.bytes for row in rows})
    for label, style in _styles(rows).items():
        points = sorted((row.bytes, getattr(row, value)) for row in rows if row.label == label)
        points = [(x, y) for x, y in points if y > 0]
        axes.plot([x for x, _ in points], [y for _, y in points], label=label, **style)
    axes.set_yscale("log")
    if sizes[0] > 0:
        axes.set_xscale("log", base=2)
    shown = sizes if len(sizes) <= 10 else sizes[:: -(-len(sizes) // 10)]
    axes.set_xticks(shown, [format_size(n) for n in shown])
    axes.minorticks_off()
    axes.set_xlabel("bytes of the whole buffer")
    axes.grid(True, which="major", alpha=0.3)


def _styles(rows: list[Row]) -> dict[str, dict[str, Any]]:
    """Give each curve its style: a colour for an algorithm, hollow and dashed in other memory.

    The bare call and native are thick and black; auto, which is one of the others, is thin and so.
    """
    names = list(dict.fromkeys(row.algorithm for row in rows))
    own = [name for name in names if name not in (BARE, "native", "auto")]
    styles: dict[str, dict[str, Any]] = {}
    for row in rows:
        style: dict[str, Any] = {"linewidth": 1.3, "markersize": 5, "zorder": 2}
        if row.algorithm in (BARE, "native"):
            style |= {"color": "black", "linewidth": 3.2, "zorder": 1, "marker": "o"}
            style |= {"linestyle": "-" if row.algorithm == BARE else ":"}
        elif row.algorithm == "auto":
            style |= {"color": "black", "linewidth": 1, "marker": "x", "linestyle": "-."}
        else:
            k = own.index(row.algorithm)
            style |= {"color": _COLOURS[k % len(_COLOURS)], "marker": _MARKERS[k % len(_MARKERS)]}
        if row.memory != PRIVATE:
            style |= {"markerfacecolor": "white", "linestyle": (0, (5, 2))}
        if row.algorithm == row.memory:
            style |= {"linewidth": 2.6, "linestyle": "-", "zorder": 3}
        styles[row.label] = style
    return styles


def _legend(axes: Any, rows: list[Row]) -> None:
    """Name the curves beside the panel, the fastest at the largest size first, as they end."""
    last = max(row.bytes for row in rows)
    speed = {row.label: row.busbw_gbs for row in rows if row.bytes == last}
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(zip(handles, labels), key=lambda pair: -speed.get(pair[1], 0.0))
    axes.legend(
        [handle for handle, _ in order],
        [label for _, label in order],
        loc="center left",
        bbox_to_anchor=(1.01, 0.5),
        fontsize=8,
        frameon=False,
        title=f"by speed at {format_size(last)}",
        title_fontsize=8,
        alignment="left",
        handlelength=3.5,
        labelspacing=0.35,
    )


def _mark_crossovers(panels: tuple[Any, Any], rows: list[Row]) -> None:
    """Set a thin vertical line where the fastest contender changes, with its size and the names.

    Names stand at the top of the left panel and at the foot of the right one: curves rise in both.
    """
    for place in crossovers(rows):
        text = f"{round_size(round(place.bytes))}: {place.before} → {place.after}"
        for axes, y, side in zip(panels, (0.98, 0.02), ("top", "bottom")):
            axes.axvline(place.bytes, color="0.45", linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
            axes.text(
                place.bytes,
                y,
                text,
                transform=axes.get_xaxis_transform(),
                rotation=90,
                fontsize=7,
                color="0.25",
                ha="right",
                va=side,
                zorder=5,
                bbox={"boxstyle": "square,pad=0.15", "fc": "white", "ec": "none", "alpha": 0.75},
            )


def draw_training(result: Any) -> Figure:
    """Draw loss and accuracy of the demo, epoch by epoch, beside those of one process.

    Parameters
    ----------
    result : DemoResult
        What ``mpidist.demo.train`` gave.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    epochs = range(1, len(result.losses) + 1)
    together = f"{result.ranks} rank{'s' * (result.ranks > 1)} together"
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


def save(results: Results, path: str) -> None:
    """Write the curves to a file; its ending says in which format.

    Raises
    ------
    Unsupported
        If matplotlib does not know the format.
    """
    try:
        draw(results).savefig(path, dpi=130)
    except ValueError as error:
        raise Unsupported(f"--plot {path}: {error}") from error


def as_svg(figure: Figure) -> str:
    """Give a figure as SVG to stand inside of a page."""
    target = io.StringIO()
    figure.savefig(target, format="svg", metadata={"Date": None})
    text = target.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return text[text.index("<svg") :]
