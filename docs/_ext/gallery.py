"""A Sphinx extension: the gallery, where the reader chooses a schedule and its numbers.

``.. gallery:: collectives`` and ``.. gallery:: pipelines`` show one picture, and lists and sliders
to choose another.  All pictures are drawn when the pages are built, and each is fetched when it is
chosen; ``_static/gallery-data.js`` has the command and the counts of each.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from fractions import Fraction
from html import escape
from pathlib import Path
from typing import Any

from catalogue import label, name_of, shipped
from docutils import nodes
from docutils.parsers.rst import Directive

from mpidist.measure import counted
from mpidist.pipeline.schedules import PipelineSchedule, schedules, simulate
from mpidist.pipeline.schedules import show as pipeline
from mpidist.schedule import COLLECTIVES, Algorithm
from mpidist.schedule.reading import read
from mpidist.schedule.registry import Groups, describe
from mpidist.schedule.show import draw

RANKS = range(2, 17)
STAGES = range(2, 9)
MICROBATCHES = (4, 8, 16)
FIRST = {"collectives": ("allreduce", "ring", "5"), "pipelines": ("1f1b", "4", "4")}


@dataclass(frozen=True)
class Choice:
    """One picture that can be chosen: its command, its counts, or why there is none."""

    command: str
    says: str = ""
    why_not: str = ""


def nodes_of(algorithm: Algorithm, size: int) -> Groups | None:
    """Return two nodes, as even as possible, for an algorithm that depends on them."""
    if "groups" not in algorithm.uses:
        return None
    half = (size + 1) // 2
    return tuple(range(half)), tuple(range(half, size))


def of_algorithm(algorithm: Algorithm, size: int) -> tuple[Choice, str]:
    """Return an algorithm on `size` ranks, and its picture."""
    groups = nodes_of(algorithm, size)
    command = f"mpidist show {algorithm.label} --ranks {size}"
    if groups:
        command += f" --nodes {','.join(str(len(group)) for group in groups)}"
    why_not = algorithm.unsupported(size, groups=groups)
    if why_not is not None:
        return Choice(command, why_not=why_not), ""
    reading = read(algorithm.collective, algorithm, size, groups=groups)
    proof = reading.proof
    says = (
        f"{counted(proof.messages, 'message')}, {proof.depth} in a row; "
        f"{counted(proof.rounds, 'round')}, those of local copies included"
    )
    if algorithm.collective != "barrier":
        most = Fraction(max(proof.blocks_sent), proof.block_count)
        says += f"; a rank sends at most {most} of the buffer's bytes"
    return Choice(command, says), draw(reading)


def of_pipeline(schedule: PipelineSchedule, size: int, microbatches: int) -> tuple[Choice, str]:
    """Return a pipeline schedule with these numbers, and its picture."""
    command = f"mpidist show {schedule.name} --stages {size} --microbatches {microbatches}"
    why_not = schedule.unsupported(size, microbatches)
    if why_not is not None:
        return Choice(command, why_not=why_not), ""
    line = simulate(schedule, size, microbatches)
    peak = max(line.peak) / schedule.count_chunks()
    says = f"bubble {100 * line.bubble:.1f} %; at most {peak:g} live microbatches on a rank"
    return Choice(command, says), pipeline.svg(schedule, size, microbatches)


def choices() -> dict[str, dict[tuple[str, str, str], tuple[Choice, str]]]:
    """Return every choice with its picture, by kind and by the values of its three fields."""
    return {
        "collectives": {
            (algorithm.collective, algorithm.name, str(size)): of_algorithm(algorithm, size)
            for collective in COLLECTIVES
            for algorithm in shipped(collective)
            for size in RANKS
        },
        "pipelines": {
            (schedule.name, str(size), str(count)): of_pipeline(schedule, size, count)
            for schedule in shipped_schedules()
            for size in STAGES
            for count in MICROBATCHES
        },
    }


def shipped_schedules() -> list[PipelineSchedule]:
    """List the pipeline schedules that come with the package."""
    home = "mpidist.pipeline.schedules."
    return [schedule for schedule in schedules() if schedule.function.__module__.startswith(home)]


def about() -> dict[str, list[str]]:
    """Return what is true on every number of ranks: words, and the page of the algorithm."""
    found = {}
    for algorithm in (a for collective in COLLECTIVES for a in shipped(collective)):
        known = describe(algorithm)
        words = f"{algorithm.summary} Rounds: {known['rounds']}."
        if algorithm.collective != "barrier":
            words += f" Bytes per rank: {known['bytes_per_rank']}."
        page = f"generated/{algorithm.collective}.html#{label(algorithm)}"
        found[f"{algorithm.collective}/{algorithm.name}"] = [words, page, name_of(algorithm)]
    for schedule in shipped_schedules():
        page = f"pipeline.html#pipeline-{schedule.name}"
        found[schedule.name] = [schedule.summary, page, schedule.name]
    return found


def file_name(values: tuple[str, ...]) -> str:
    """Return the name of a picture's file."""
    return "-".join(values).replace("_", "-") + ".svg"


# -- the page --------------------------------------------------------------------------------------


def _select(name: str, text: str, values: list[str], chosen: str) -> str:
    options = "".join(
        f"<option{' selected' * (value == chosen)}>{escape(value)}</option>" for value in values
    )
    return f'<label>{text} <select name="{name}">{options}</select></label>'


def _slider(name: str, text: str, values: range, chosen: str) -> str:
    return (
        f'<label>{text} <input type="range" name="{name}" min="{values[0]}" max="{values[-1]}" '
        f'value="{chosen}"> <output>{chosen}</output></label>'
    )


def widget(kind: str) -> str:
    """Return the HTML of the choice: without JavaScript a picture, its command and its counts."""
    values = FIRST[kind]
    if kind == "collectives":
        names = [algorithm.name for algorithm in shipped(values[0])]
        controls = [
            _select("first", "collective", list(COLLECTIVES), values[0]),
            _select("second", "algorithm", names, values[1]),
            _slider("third", "ranks", RANKS, values[2]),
        ]
        (algorithm,) = (a for a in shipped(values[0]) if a.name == values[1])
        choice, _ = of_algorithm(algorithm, int(values[2]))
    else:
        known = {schedule.name: schedule for schedule in shipped_schedules()}
        controls = [
            _select("first", "schedule", list(known), values[0]),
            _slider("second", "stages", STAGES, values[1]),
            _select("third", "microbatches", [str(count) for count in MICROBATCHES], values[2]),
        ]
        choice, _ = of_pipeline(known[values[0]], int(values[1]), int(values[2]))
    title = f"{' '.join(values)}: {choice.says}"
    source = f"_static/gallery/{file_name(values)}"
    return (
        f'<div class="gallery" data-kind="{kind}">\n'
        f'<form hidden aria-label="Choose one of the {kind}">{"".join(controls)}</form>\n'
        '<p class="gallery-about"></p>\n'
        f'<div class="gallery-picture" tabindex="0" role="region" aria-label="picture, scrolls">'
        f'<img src="{source}" alt="{escape(title)}" loading="lazy"></div>\n'
        '<p class="gallery-says" role="status" aria-live="polite">'
        f'{escape(choice.says)}</p>\n<div class="highlight"><pre class="gallery-command">'
        f'{escape(choice.command)}</pre></div>\n<p class="gallery-link" hidden>'
        '<a class="gallery-alone">the picture alone</a> · <a class="gallery-page">its code</a> · '
        '<a class="gallery-here">link to this choice</a></p>\n</div>\n'
    )


class Gallery(Directive):
    """The choice of one kind of schedules."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the choice as raw HTML."""
        (kind,) = self.arguments
        if kind not in FIRST:
            raise self.error(f"gallery {kind!r}: expected one of {', '.join(FIRST)}")
        return [nodes.raw("", widget(kind), format="html")]


def write(folder: Path) -> None:
    """Write all pictures into ``folder/gallery``, and the choices as a script."""
    (folder / "gallery").mkdir(parents=True, exist_ok=True)
    data: dict[str, Any] = {"about": about()}
    for kind, found in choices().items():
        data[kind] = {}
        for values, (choice, picture) in found.items():
            facts = {name: text for name, text in asdict(choice).items() if text}
            data[kind]["/".join(values)] = facts
            if picture:
                (folder / "gallery" / file_name(values)).write_text(picture, encoding="utf-8")
    # A script, since pages without a server may not fetch other files.
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    (folder / "gallery-data.js").write_text(f"window.mpidistGallery={text};\n", encoding="utf-8")


def finish(app: Any, failure: Exception | None) -> None:
    """Write the pictures after the pages."""
    if failure is None and app.builder.name == "html":
        write(Path(app.outdir) / "_static")


def scripts(app: Any, page: str, _template: str, _context: dict[str, Any], _tree: Any) -> None:
    """Load the scripts on the page of the gallery only."""
    if page == "gallery":
        app.add_js_file("gallery-data.js", loading_method="defer")
        app.add_js_file("gallery.js", loading_method="defer")


def setup(app: Any) -> dict[str, Any]:
    """Register the directive, and write the pictures after the pages."""
    app.add_directive("gallery", Gallery)
    app.connect("html-page-context", scripts)
    app.connect("build-finished", finish)
    return {"parallel_read_safe": True}
