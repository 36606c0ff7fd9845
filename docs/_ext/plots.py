"""A Sphinx extension: the plots of the pages, drawn from the tables that the pages show.

``.. plot:: NAME`` with an ``:alt:`` shows a plot, in colours for light and for dark pages.
``python docs/_ext/plots.py`` draws the plot of README.md, ``docs/_static/speed.svg``, anew.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive, directives

DOCS = Path(__file__).resolve().parents[1]
README_PLOT = DOCS / "_static" / "speed.svg"
LIGHT = {"ink": "#1c2733", "faint": "#d0d7de", "background": "none"}
PHONE = {"narrow": "yes"}  # beside the colours: panels one below the other
DARK = {"ink": "#cfd0d0", "faint": "#40464d", "background": "none"}
# Colours and marks that also differ without colour; readable on white and on black.
LOOKS = [
    ("#0a7d55", "o"),
    ("#2f7fd1", "s"),
    ("#d0661a", "^"),
    ("#b0569a", "D"),
    ("#8a7500", "v"),
    ("#c9423b", "P"),
    ("#6b7f8f", "X"),
]
SCHEMES = {"light": LIGHT, "dark": DARK}
VARIANTS = [(form, scheme) for form in ("wide", "narrow") for scheme in SCHEMES]
Row = dict[str, str]


# -- tables of the pages ---------------------------------------------------------------------------


@dataclass
class Table:
    """One table of the published comparison.

    Attributes
    ----------
    group : str
        MPI library and number of ranks.
    collective : str
        Name of the collective, with "in place" if the call is.
    rows : list of dict
        A cell by the name of its column; the row of means is left out.
    """

    group: str
    collective: str
    rows: list[Row]

    def column(self, name: str, least: int = 0) -> list[tuple[int, float]]:
        """Return sizes in bytes, from `least` on, and numbers, without empty cells."""
        pairs = [(size(row["bytes"]), row[name]) for row in self.rows]
        return [(n, float(v)) for n, v in pairs if v and n >= least]


def size(text: str) -> int:
    """Return the bytes of a size as the tables write it: ``64K``."""
    units = {"K": 1 << 10, "M": 1 << 20}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)


def tables() -> list[Table]:
    """Return the tables of figures in docs/benchmarks_data/tables.inc."""
    text = (DOCS / "benchmarks_data" / "tables.inc").read_text(encoding="utf-8")
    block = re.compile(
        r"^(?P<group>[^\n:]+): (?P<name>[^\n:]+), float32\n\n\.\. csv-table::\n"
        r"   :header: (?P<head>[^\n]*)\n\n(?P<rows>(?:   [^\n]*\n)+)",
        re.MULTILINE,
    )
    found = []
    for match in block.finditer(text):
        (head,) = csv.reader([match["head"]], skipinitialspace=True)
        lines = [line.strip() for line in match["rows"].splitlines()]
        rows = [
            dict(zip(head, cells, strict=True))
            for cells in csv.reader(lines, skipinitialspace=True)
            if not cells[0].startswith("**")
        ]
        found.append(Table(match["group"], match["name"], rows))
    return found


def printed(page: str, head: str) -> list[Row]:
    """Return the rows of an output on a page: those below the first line that begins with `head`.

    Columns begin where their heads do, or end where their heads do.
    """
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    at = next(k for k, line in enumerate(lines) if line.strip().startswith(head))
    names = re.split(r" {2,}", lines[at].strip())
    rows = []
    for line in lines[at + 1 :]:
        cells = re.split(r" {2,}", line.strip())
        if len(cells) < 2:
            break
        rows.append(dict(zip(names, cells)))
    return rows


def number(text: str) -> float:
    """Return a number as outputs print it: ``1,250``."""
    return float(text.replace(",", ""))


# -- drawing ---------------------------------------------------------------------------------------


def with_colours(draw: Callable[[Any, dict], Any], colours: dict[str, str], path: Path) -> None:
    """Draw a figure and save it as SVG, the same bytes each time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ink, faint = colours["ink"], colours["faint"]
    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": "mpidist",
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans", "Arial", "Helvetica", "sans-serif"],
        "font.size": 9,
        "axes.titlesize": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": faint,
        "grid.linewidth": 0.6,
        "lines.linewidth": 1.5,
        "lines.markersize": 4,
        "legend.frameon": False,
        "figure.facecolor": colours["background"],
        "axes.facecolor": "none",
    }
    for name in ("text.color", "axes.labelcolor", "axes.titlecolor", "axes.edgecolor"):
        settings[name] = ink
    settings |= {"xtick.color": ink, "ytick.color": ink, "legend.labelcolor": ink}
    with plt.rc_context(settings):
        figure = draw(plt, colours)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None}, facecolor=colours["background"])
        plt.close(figure)
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(line.rstrip() for line in lines) + "\n", encoding="utf-8")


def panels_of(
    plt: Any, colours: dict[str, str], count: int, size: tuple[float, float], **options: Any
) -> tuple[Any, Any]:
    """Return a figure of `size` inches and its panels: two in a row, or one for a phone."""
    width, height = size
    rows = -(-count // 2)
    if colours.get("narrow"):
        options.pop("width_ratios", None)
        width, height, rows = 4.6, 0.8 * height / rows * count, count
    figure, panels = plt.subplots(
        rows, count // rows, figsize=(width, height), sharey=True, layout="constrained", **options
    )
    return figure, list(panels.flat)


def legend(figure: Any, axes: Any, colours: dict[str, str], columns: int) -> None:
    """Add the legend of a panel below all panels; on a phone in two columns at most."""
    handles, labels = axes.get_legend_handles_labels()
    across = min(columns, 1 if max(map(len, labels)) > 24 else 2)
    columns = across if colours.get("narrow") else columns
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def size_axis(axes: Any, sizes: Sequence[int], every: int = 1) -> None:
    """Make the x axis one of sizes in bytes."""
    names = [
        f"{n >> 20}M" if n >= 1 << 20 else f"{n >> 10}K" if n >= 1 << 10 else f"{n}" for n in sizes
    ]
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes[::every], names[::every])
    axes.minorticks_off()
    axes.set_xlabel("bytes")


def ratio_axis(axes: Any, low: float, high: float, colours: dict[str, str]) -> None:
    """Make the y axis one of ratios, with a line at 1."""
    marks = [m for m in (0.2, 0.35, 0.5, 0.7, 1, 1.4, 2, 3, 4, 6, 8, 12, 20) if low <= m <= high]
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    axes.set_yticks(marks, [f"{m:g}" for m in marks])
    axes.minorticks_off()
    axes.axhline(1, color=colours["ink"], linewidth=1.2)


def speed_panel(axes: Any, found: Sequence[Table], colours: dict[str, str]) -> None:
    """Draw × mpi4py against size, a line for each collective."""
    for table, (colour, mark) in zip(found, LOOKS):
        points = table.column("auto, symmetric arrays")
        axes.plot(*zip(*points), color=colour, marker=mark, label=table.collective)
    size_axis(axes, [size(row["bytes"]) for row in found[0].rows])
    ratio_axis(axes, 0.17, 21, colours)
    axes.set_title(found[0].group)


def groups() -> Iterator[list[Table]]:
    """Yield the tables of each MPI library and number of ranks."""
    everything = tables()
    for name in dict.fromkeys(table.group for table in everything):
        yield [table for table in everything if table.group == name]


def draw_speed(plt: Any, colours: dict[str, str]) -> Any:
    """Draw × mpi4py over the size, one panel for each MPI library and number of ranks."""
    found = list(groups())
    figure, panels = panels_of(plt, colours, 4, (9.2, 7.0))
    for axes, group in zip(panels, found):
        speed_panel(axes, group, colours)
    for axes in panels[::2]:
        axes.set_ylabel("× mpi4py, above 1 is faster")
    legend(figure, panels[0], colours, 4)
    return figure


def draw_readme(plt: Any, colours: dict[str, str]) -> Any:
    """Draw × mpi4py for 2 ranks of both libraries, for README.md."""
    found = [group for group in groups() if group[0].group.endswith(", 2 ranks")]
    figure, panels = plt.subplots(1, 2, figsize=(8.6, 3.7), sharey=True, layout="constrained")
    for axes, group in zip(panels, found):
        speed_panel(axes, group, colours)
    panels[0].set_ylabel("× mpi4py, above 1 is faster")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=7)
    return figure


def draw_heat(plt: Any, colours: dict[str, str]) -> Any:
    """Draw × mpi4py as a map of collective and size, red where slower.

    On a phone there is room for every third size.
    """
    from matplotlib.colors import LinearSegmentedColormap, LogNorm

    shades = LinearSegmentedColormap.from_list(
        "", ["#b8301f", "#f0a08c", "#f4f4f0", "#8cc3e8", "#1a6fb5"]
    )
    shade = LogNorm(0.2, 5)
    found = list(groups())
    # One panel below the other: side by side the digits are too small to be read.
    width, every = (4.6, 3) if colours.get("narrow") else (9.2, 1)
    large = 9.5 if every > 1 else 11.5
    figure, panels = plt.subplots(len(found), 1, figsize=(width, 4.3 * len(found)))
    figure.set_layout_engine("constrained", h_pad=0.12)
    for axes, group in zip(panels, found):
        names, rows = [], []
        for table in group:
            for kind in ("private", "symmetric"):
                names.append(f"{table.collective}, {kind}")
                rows.append([ratio for _, ratio in table.column(f"auto, {kind} arrays")][::every])
        axes.pcolormesh(rows, cmap=shades, norm=shade, edgecolors=colours["faint"], linewidth=0.4)
        for y, row in enumerate(rows):
            for x, ratio in enumerate(row):
                red, green, blue, _ = shades(shade(ratio))
                pale = 0.3 * red + 0.59 * green + 0.11 * blue > 0.5
                axes.text(
                    x + 0.5,
                    y + 0.5,
                    f"{ratio:.1f}" if ratio >= 1 else f"{ratio:.2f}",
                    ha="center",
                    va="center",
                    fontsize=large,
                    color="#111" if pale else "#fff",
                )
        heads = [row["bytes"] for row in group[0].rows][::every]
        axes.set_xticks([k + 0.5 for k in range(len(heads))], heads, fontsize=large)
        axes.set_yticks([k + 0.5 for k in range(len(names))], names, fontsize=large)
        axes.tick_params(length=0)
        axes.invert_yaxis()
        axes.grid(False)
        axes.spines[:].set_visible(False)
        axes.set_title(group[0].group, fontsize=13)
    return figure


def draw_bound(plt: Any, colours: dict[str, str]) -> Any:
    """Draw the share of the memory bound that an allreduce in symmetric memory reaches."""
    figure, panels = panels_of(plt, colours, 2, (9.2, 3.6))
    for axes, name in zip(panels, ("allreduce in place", "allreduce")):
        found = [table for table in tables() if table.collective == name]
        for table, (colour, mark) in zip(found, LOOKS):
            points = table.column("% of bound", 16 << 10)
            axes.plot(*zip(*points), color=colour, marker=mark, label=table.group)
        axes.axhline(100, color=colours["ink"], linewidth=1.2)
        size_axis(axes, [n for n, _ in found[0].column("% of bound", 16 << 10)])
        axes.set_title(name)
        axes.set_ylim(0, None)
    panels[0].set_ylabel("% of the memory bound")
    legend(figure, panels[0], colours, 4)
    return figure


def draw_slow_link(plt: Any, colours: dict[str, str]) -> Any:
    """Draw × mpi4py of an allreduce between two nodes."""
    rows = printed("hierarchical.rst", "MPI       bytes")
    figure, panels = panels_of(plt, colours, 2, (9.2, 3.6))
    for axes, library in zip(panels, ("Open MPI", "MPICH")):
        mine = [row for row in rows if row["MPI"] == library]
        sizes = [size(row["bytes"]) for row in mine]
        names = ("two levels", "hierarchical", "leaders", "native", "ring")
        for name, (colour, mark) in zip(names, LOOKS):
            ratios = [number(row["mpi4py"]) / number(row[name]) for row in mine]
            axes.plot(sizes, ratios, color=colour, marker=mark, label=name)
        size_axis(axes, sizes)
        ratio_axis(axes, 0.55, 2.3, colours)
        axes.set_title(library)
    panels[0].set_ylabel("× mpi4py, above 1 is faster")
    legend(figure, panels[0], colours, 5)
    return figure


STEP = (
    ("computes", "#2f7fd1", ""),
    ("computes while it communicates (hidden)", "#7fb3e6", "///"),
    ("waits for communication (exposed)", "#d0661a", ""),
)


def stack(axes: Any, names: Sequence[str], parts: Sequence[tuple[float, ...]]) -> None:
    """Draw a bar for each name, of the three parts of a step."""
    left = [0.0] * len(names)
    for k, (label, colour, hatch) in enumerate(STEP):
        values = [part[k] / 1000 for part in parts]
        axes.barh(
            names,
            values,
            left=left,
            color=colour,
            hatch=hatch,
            edgecolor="#fff",
            linewidth=0.5,
            label=label,
        )
        left = [a + b for a, b in zip(left, values)]
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("ms a step")


def draw_ddp(plt: Any, colours: dict[str, str]) -> Any:
    """Draw training steps in three parts: computation, hidden and exposed communication."""
    rows = printed("torch.rst", "work                                          candidate")
    size, shape = ((4.6, 6.4), (2, 1)) if colours.get("narrow") else ((10.4, 4.0), (1, 2))
    figure, panels = plt.subplots(*shape, figsize=size, layout="constrained")
    names, parts = [], []
    for model in dict.fromkeys(row["work"] for row in rows if row["work"].startswith("step")):
        times = {row["candidate"]: number(row["time µs"]) for row in rows if row["work"] == model}
        alone = times.pop("no communication")
        for name, time in times.items():
            names.append(
                f"{name}, {model.removeprefix('step, MLP of ').replace(' parameters', '')}"
            )
            parts.append((min(alone, time), 0.0, max(0.0, time - alone)))
    stack(panels[0], names, parts)
    panels[0].set_title("2 ranks on one node")
    rows = printed(
        "ddp.rst", "work                            candidate            time µs  least µs"
    )
    names, parts = [], []
    for work in dict.fromkeys(row["work"] for row in rows):
        least = {row["candidate"]: number(row["least µs"]) for row in rows if row["work"] == work}
        alone = least["communication alone"]
        compute = least["none"] - alone
        for name in ("none", "polls", "thread"):
            exposed = max(0.0, least[name] - compute)
            hidden = max(0.0, alone - exposed)
            names.append(f"{name}, {work.removeprefix('backward that ')}")
            parts.append((least[name] - exposed - hidden, hidden, exposed))
    stack(panels[1], names, parts)
    panels[1].set_title("2 ranks, a link of 1 Gbit/s")
    legend(figure, panels[0], colours, 3)
    return figure


def draw_pipelines(plt: Any, colours: dict[str, str]) -> Any:
    """Draw bubble and peak of every shipped schedule on 4 ranks, with 8 and 16 microbatches."""
    from mpidist.pipeline import schedules, simulate

    figure, panels = panels_of(plt, colours, 2, (9.2, 3.4))
    known = [s for s in schedules() if s.function.__module__.startswith("mpidist.")]
    for k, count in enumerate((8, 16)):
        lines = [simulate(schedule, 4, count) for schedule in known]
        at = [y + 0.4 * k - 0.2 for y in range(len(known))]
        colour = LOOKS[k][0]
        bubbles = [100 * line.bubble for line in lines]
        # A chunk is half of a stage, or less: peaks are compared in whole stages.
        peaks = [max(line.peak) / schedule.chunks for line, schedule in zip(lines, known)]
        for axes, values, form in zip(panels, (bubbles, peaks), ("{:.0f}", "{:g}")):
            bars = axes.barh(at, values, height=0.36, color=colour, label=f"{count} microbatches")
            axes.bar_label(bars, [form.format(v) for v in values], padding=3, fontsize=8)
    panels[0].set_yticks(range(len(known)), [schedule.name for schedule in known])
    panels[0].invert_yaxis()
    for axes, title in zip(
        panels, ("bubble, % of all ranks' time", "peak live activations, of a whole stage")
    ):
        axes.set_title(title)
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.12)
    legend(figure, panels[0], colours, 2)
    return figure


def draw_predict(plt: Any, colours: dict[str, str]) -> Any:
    """Draw every predicted time against the measured one, a panel for each MPI."""
    with (DOCS / "benchmarks_data" / "predict.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    of = " 8 B µs"
    names = [column.removesuffix(of) for column in rows[0] if column.endswith(of)]
    kinds = [*dict.fromkeys(row["kind"] for row in rows)]
    figure, panels = panels_of(plt, colours, len(names), (9.2, 4.4), sharex=True)
    for axes, name in zip(panels, names):
        columns = [c for c in rows[0] if c.startswith(f"{name} ") and c.endswith(" µs")]
        for kind, (colour, mark) in zip(kinds, LOOKS):
            measured, predicted = [], []
            for row in rows:
                for column in columns if row["kind"] == kind else ():
                    error = number(row[column.replace("µs", "error %")])
                    measured.append(number(row[column]))
                    predicted.append(measured[-1] * (1 + error / 100))
            axes.plot(measured, predicted, mark, color=colour, alpha=0.6, label=kind)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(5, 3000)
        axes.set_ylim(5, 3000)
        axes.axline((5, 5), (50, 50), color=colours["ink"], linewidth=1.0)
        axes.set_title(name)
        axes.set_xlabel("measured µs")
    panels[0].set_ylabel("predicted µs")
    legend(figure, panels[0], colours, 4)
    return figure


PLOTS = {
    "speed": draw_speed,
    "heat": draw_heat,
    "bound": draw_bound,
    "slow-link": draw_slow_link,
    "ddp": draw_ddp,
    "pipelines": draw_pipelines,
    "predict": draw_predict,
}


# -- Sphinx ----------------------------------------------------------------------------------------


def generate(folder: Path) -> None:
    """Draw the plots whose pages, or this file, are newer than they are."""
    sources = [Path(__file__), *DOCS.glob("*.rst"), *DOCS.glob("benchmarks_data/*")]
    newest = max(path.stat().st_mtime for path in sources)
    for name, draw in PLOTS.items():
        for form, scheme in VARIANTS:
            colours = SCHEMES[scheme] | (PHONE if form == "narrow" else {})
            path = folder / f"{name}-{form}-{scheme}.svg"
            if not path.is_file() or path.stat().st_mtime < newest:
                with_colours(draw, colours, path)


class Plot(Directive):
    """A plot in the page, in the colours of the page."""

    required_arguments = 1
    option_spec = {"alt": directives.unchanged_required}

    def run(self) -> list[nodes.Node]:
        """Return an image for each colour scheme and width of page; style sheets choose one."""
        (name,) = self.arguments
        if name not in PLOTS:
            raise self.error(f"plot {name!r}: expected one of {', '.join(PLOTS)}")
        if "alt" not in self.options:
            raise self.error(f"plot {name!r}: expected :alt:")
        return [
            nodes.image(
                uri=f"/generated/plots/{name}-{form}-{scheme}.svg",
                alt=self.options["alt"],
                classes=[f"only-{scheme}", "plot", f"plot-{form}"],
                loading="lazy",  # those that are not shown are not fetched
            )
            for form, scheme in VARIANTS
        ]


def setup(app: Any) -> dict[str, Any]:
    """Draw the plots before Sphinx looks for images."""
    app.add_directive("plot", Plot)
    app.connect("builder-inited", lambda app: generate(Path(app.srcdir) / "generated" / "plots"))
    return {"parallel_read_safe": True}


if __name__ == "__main__":
    with_colours(draw_readme, {**LIGHT, "background": "#ffffff"}, README_PLOT)
