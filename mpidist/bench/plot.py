"""Curves of time and bus bandwidth; needs matplotlib (``pip install 'mpidist[bench]'``)."""

from __future__ import annotations

import importlib.util
import io
import re
from typing import TYPE_CHECKING, Any

from ..errors import Unsupported
from ..measure import format_size
from .contenders import BARE
from .records import Results, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKERS = "osD^vP*Xh<>p"


def check_matplotlib(option: str) -> None:
    """Raise Unsupported, with the cure, where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise Unsupported(
            f"{option} needs matplotlib, which is not installed: pip install 'mpidist[bench]'"
        )


def draw(results: Results) -> Figure:
    """Draw time and bus bandwidth over the bytes, a row for each collective.

    The bare call and native are black; everything hand-written has a colour.
    """
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row.collective for row in results.rows))
    if not names:
        raise Unsupported("nothing was measured, so there is nothing to draw")
    figure = Figure(figsize=(12, 4.2 * len(names)), layout="constrained")
    grid = figure.subplots(len(names), 2, squeeze=False)
    for (left, right), name in zip(grid, names):
        rows = [row for row in results.rows if row.collective == name]
        ranks = f"{rows[0].ranks} rank{'s' * (rows[0].ranks > 1)}"
        _curves(left, rows, "time_us")
        left.set(title=f"{name}, {ranks}, {rows[0].dtype}", ylabel="time (µs)")
        _curves(right, rows, "busbw_gbs")
        right.set(title=f"{name}: bus bandwidth", ylabel="busbw (GB/s)")
        right.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=9, frameon=False)
    return figure


def _curves(axes: Any, rows: list[Row], value: str) -> None:
    names = list(dict.fromkeys(row.label for row in rows))
    sizes = sorted({row.bytes for row in rows})
    colour = 0
    for name in names:
        points = sorted((row.bytes, getattr(row, value)) for row in rows if row.label == name)
        points = [(x, y) for x, y in points if y > 0]
        style: dict[str, Any] = {"linewidth": 1.4, "markersize": 5, "zorder": 2}
        if name in (BARE, "native"):
            style |= {"color": "black", "linewidth": 3.6, "zorder": 1}
            style |= {"linestyle": "-" if name == BARE else ":", "marker": "o"}
        else:
            style |= {"color": f"C{colour % 10}", "marker": _MARKERS[colour % len(_MARKERS)]}
            style |= {"linestyle": "-" if colour < 10 else "--"}
            colour += 1
        axes.plot([x for x, _ in points], [y for _, y in points], label=name, **style)
    axes.set_yscale("log")
    if sizes[0] > 0:
        axes.set_xscale("log", base=2)
    shown = sizes if len(sizes) <= 10 else sizes[:: -(-len(sizes) // 10)]
    axes.set_xticks(shown, [format_size(n) for n in shown])
    axes.minorticks_off()
    axes.set_xlabel("bytes of the whole buffer")
    axes.grid(True, which="major", alpha=0.3)


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
