"""The figure of a pipeline as a picture of dots; needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..pipeline.gantt import Sheet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOTS = 100  # an inch, of what the sheet calls pixels


def draw(sheet: Sheet) -> Figure:
    """Draw the boxes and labels of a sheet.

    Parameters
    ----------
    sheet : Sheet
        What :meth:`mpidist.pipeline.show.Picture.sheet` gave.
    """
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
        axes.text(*middle, box.text, size=7.9, color=colour, ha="center", va="center_baseline")
    for word in sheet.labels:
        title = word.style == "title"
        axes.text(
            word.x,
            word.y,
            word.text,
            size=11.5 if title else 8.6,
            weight="bold" if word.style in ("title", "bold") else "normal",
            ha="right" if word.style == "right" else "left",
            va="baseline",
            color="#222222",
        )
    return figure


def save(sheet: Sheet, path: str) -> None:
    """Write a sheet to a PNG file, with two dots for each pixel of the sheet."""
    draw(sheet).savefig(path, format="png", dpi=2 * DOTS)
