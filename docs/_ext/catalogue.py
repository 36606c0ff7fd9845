"""A Sphinx extension: the catalogue of algorithms, made from the registry.

``python docs/_ext/catalogue.py`` writes the table in README.md anew.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import mpidist  # noqa: F401  registers the algorithms
from mpidist.pipeline.schedules import PipelineSchedule, schedules
from mpidist.pipeline.schedules.show import comparison
from mpidist.pipeline.schedules.show import svg as pipeline_svg
from mpidist.pipeline.schedules.trace import read
from mpidist.schedule import COLLECTIVES, Algorithm, algorithms, prove
from mpidist.schedule.registry import describe
from mpidist.schedule.show import svg

sys.path.insert(0, str(Path(__file__).parent))
from reference import command_sections, row, settings_table, shared_table

ROOT = Path(__file__).resolve().parents[2]
# Of 4 ranks on 2 cores; the stages sleep for 10 ms, the last one for 16, and twice that backward.
TRACE = ROOT / "docs" / "benchmarks_data" / "pipeline_trace.json"
BEGIN, END = "<!-- algorithms: begin -->", "<!-- algorithms: end -->"
# A picture is drawn for the first of these that the algorithm serves.
NODES: dict[bool, tuple] = {
    False: ((5, None), (4, None)),
    True: ((5, ((0, 1, 2), (3, 4))), (6, ((0, 1, 2), (3, 4, 5))), (4, None)),
}


def shipped(collective: str, one_sided: bool = False) -> list[Algorithm]:
    """List the algorithms of a collective that come with the package.

    Those in shared memory, which "auto" never chooses, are among them with `one_sided`.
    """
    every = algorithms(collective, one_sided=one_sided)
    found = [a for a in every if home(a).startswith("mpidist.algorithms.")]
    return sorted(found, key=lambda a: (a.memory is not None, a.name))


def home(algorithm: Algorithm) -> str:
    """Return the module that an algorithm is in."""
    return algorithm.function.__module__


def name_of(algorithm: Algorithm) -> str:
    """Return the name as users may write it: ``tree:K`` where there is an arity."""
    return algorithm.name + (":K" if "arity" in algorithm.uses else "")


# -- README.md -------------------------------------------------------------------------------------


def readme_table() -> str:
    """Return the table of algorithms in Markdown, a line for each collective."""
    lines = ["| collective | algorithms |", "| --- | --- |"]
    for collective in COLLECTIVES:
        names = [f"**{name_of(a)}**" if a.ordered else name_of(a) for a in shipped(collective)]
        lines.append(f"| {collective} | {', '.join(names)} |")
    return "\n".join(lines)


def with_table(readme: str) -> str:
    """Return the text of README.md with the current table."""
    before, _, rest = readme.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n{readme_table()}\n{END}{after}"


# -- the catalogue ---------------------------------------------------------------------------------


def collective_page(collective: str) -> str:
    """Return the page of one collective: a table, and a section for each algorithm."""
    lines = [collective, "=" * len(collective), "", *table(collective), ""]
    for algorithm in shipped(collective, one_sided=True):
        lines += section(algorithm)
    return "\n".join(lines) + "\n"


def table(collective: str) -> Iterator[str]:
    """Return the overview of one collective as a list table."""
    yield from (".. list-table::", "   :header-rows: 1", "   :widths: 18 24 28 8 22", "")
    yield from row("name", "rounds", "bytes per rank", "ordered", "requires")
    for algorithm in shipped(collective, one_sided=True):
        known = describe(algorithm)
        yield from row(
            f":ref:`{name_of(algorithm)} <{label(algorithm)}>`",
            plain(known["rounds"]),
            plain(known["bytes_per_rank"]),
            "yes" if known["ordered"] else "no",
            plain(requirements(algorithm) or "—"),
        )


def plain(words: str) -> str:
    """Escape what reStructuredText would take for markup."""
    return "".join("\\" + c if c in "*`|_\\" else c for c in words)


def requirements(algorithm: Algorithm) -> str:
    """Say what the algorithm declares that it needs."""
    needs = [describe(algorithm)["requires"]] if algorithm.requires is not None else []
    needs += ["equal counts"] if algorithm.equal_blocks else []
    needs += [f"{algorithm.memory.name} memory"] if algorithm.memory is not None else []
    return "; ".join(need for need in needs if need)


def label(algorithm: Algorithm) -> str:
    """Return the name of the section, for references."""
    return f"{algorithm.collective}-{algorithm.name}".replace("_", "-")


def section(algorithm: Algorithm) -> Iterator[str]:
    """Return the section of one algorithm: summary, table, code, proof and picture."""
    title = name_of(algorithm)
    yield from (f".. _{label(algorithm)}:", "", title, "-" * len(title), "")
    yield from (algorithm.doc, "")
    path = home(algorithm).replace(".", "/") + ".py"
    yield from (".. code-block:: python", f"   :caption: {path}", "")
    yield from (textwrap.indent(code(algorithm), "   "), "")
    yield from proved(algorithm, *served(algorithm))


def served(algorithm: Algorithm) -> tuple[int, tuple | None]:
    """Give the number of ranks and the nodes of the picture."""
    return next(
        (size, groups)
        for size, groups in NODES["groups" in algorithm.uses]
        if algorithm.unsupported(size, groups=groups) is None
    )


def picture(algorithm: Algorithm) -> str:
    """Give the picture of an algorithm, as ``mpidist show --svg`` draws it."""
    size, groups = served(algorithm)
    return svg(algorithm.collective, algorithm, size, groups=groups)


def proved(algorithm: Algorithm, size: int, groups: tuple | None) -> Iterator[str]:
    """Return the counts of a proof, and the picture, on `size` ranks."""
    proof = prove(algorithm.collective, algorithm, size, groups=groups)
    nodes = " on nodes of " + " and ".join(str(len(g)) for g in groups) if groups else ""
    moved = (
        f"{count(proof.depth, 'message')} one after the other, "
        f"{count(proof.messages, 'message')} with {count(proof.blocks_moved, 'block')} in all"
    )
    if algorithm.memory is not None:
        moved = (
            f"{count(proof.meetings, 'meeting')}, {count(proof.blocks_read, 'block')} read and "
            f"{count(proof.blocks_stored, 'block')} stored in other ranks' memory in all"
        )
    yield (
        f"Proved on {size} ranks{nodes}: at most {count(proof.rounds, 'round')} on a rank, "
        f"{moved}, {count(proof.reductions, 'combination')}."
    )
    yield from ("", f".. image:: {label(algorithm)}.svg")
    arrows = "message" if algorithm.memory is None else "access"
    yield from (f"   :alt: {algorithm.label} on {size} ranks{nodes}: each {arrows} as an arrow", "")


def count(number: int, word: str) -> str:
    """Return a number with its noun."""
    return f"{number} {word}{'s' * (number != 1)}"


def code(algorithm: Algorithm | PipelineSchedule) -> str:
    """Return the generator's source without its docstring, after the helpers of its own module."""
    function = algorithm.function
    parts = [inspect.getsource(helper).rstrip() for helper in helpers(function, [])]
    source = textwrap.dedent(inspect.getsource(function))
    tree = ast.parse(source).body[0]
    assert isinstance(tree, ast.FunctionDef)
    lines, words = source.splitlines(), tree.body[0]
    parts.append("\n".join([*lines[: words.lineno - 1], *lines[words.end_lineno :]]))
    return "\n\n\n".join(parts)


def helpers(function: Callable, found: list[Callable]) -> list[Callable]:
    """Return the private functions that `function` uses, in order of dependence."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        helper = function.__globals__.get(node.id) if isinstance(node, ast.Name) else None
        private = inspect.isfunction(helper) and helper.__name__.startswith("_")
        if private and helper.__module__ == function.__module__ and helper not in found:
            helpers(helper, found)
            found.append(helper)
    return found


# -- pipelines -------------------------------------------------------------------------------------


def pipeline_sections() -> str:
    """Return a section for each shipped pipeline schedule: its words, its code, its picture."""
    lines: list[str] = []
    for schedule in schedules():
        if schedule.function.__module__.startswith("mpidist.pipeline.schedules."):
            lines += pipeline_section(schedule)
    return "\n".join(lines) + "\n"


def pipeline_section(schedule: PipelineSchedule) -> Iterator[str]:
    """Return the section of one pipeline schedule."""
    yield from (f".. _pipeline-{schedule.name}:", "", schedule.name, "~" * len(schedule.name), "")
    words, *_ = re.split(r"\n\n\d+ ranks, ", schedule.doc)  # its picture in text: here is a larger
    yield from (words, "")
    yield from (f".. image:: generated/pipeline-{schedule.name}.svg", "   :width: 100%")
    yield from (f"   :alt: {schedule.name} on 4 ranks with 8 microbatches, rank by rank", "")
    path = schedule.function.__module__.replace(".", "/") + ".py"
    yield from (".. code-block:: python", f"   :caption: {path}", "")
    yield from (textwrap.indent(code(schedule), "   "), "")


# -- Sphinx ----------------------------------------------------------------------------------------


def generate(folder: Path) -> None:
    """Write all generated pages into `folder`; unchanged files keep their date."""
    pages = {f"{name}.rst": collective_page(name) for name in COLLECTIVES}
    pages |= {"commands.inc": command_sections(), "settings.inc": settings_table()}
    pages["symmetric.inc"] = shared_table()
    for algorithm in (a for name in COLLECTIVES for a in shipped(name, one_sided=True)):
        pages[f"{label(algorithm)}.svg"] = picture(algorithm)
    pages["pipeline_schedules.inc"] = pipeline_sections()
    pages["pipeline-trace.svg"] = comparison(read(TRACE)).svg()
    for known in schedules():
        pages[f"pipeline-{known.name}.svg"] = pipeline_svg(known, 4, 8)
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        if old.name not in pages and old.is_file():
            old.unlink()
    for name, content in pages.items():
        path = folder / name
        if not path.is_file() or path.read_text(encoding="utf-8") != content:
            path.write_text(content, encoding="utf-8")


def setup(app) -> dict[str, bool]:
    """Write the generated pages before Sphinx looks for pages."""
    app.connect("builder-inited", lambda app: generate(Path(app.srcdir) / "generated"))
    return {"parallel_read_safe": True}


if __name__ == "__main__":
    README = ROOT / "README.md"
    README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
