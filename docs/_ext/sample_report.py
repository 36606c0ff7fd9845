"""A Sphinx extension: a sample of what ``mpidist bench --report`` writes, of the published figures.

``_static/report.html`` is the report of the allreduce with Open MPI on 2 ranks, made from the
tables of the pages by the code of the command.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from plots import DOCS, number, size, tables

TITLE = "Open MPI 5.0.11, 2 ranks"
CANDIDATES = (
    ("mpi4py", "mpi4py", "private"),
    ("native", "native", "private"),
    ("auto, private arrays", "auto", "private"),
    ("symmetric", "symmetric", "symmetric"),
)


def rows() -> Iterator[Any]:
    """Yield the rows of the allreduce out of place."""
    from mpidist.bench.results import Row

    (table,) = (t for t in tables() if (t.group, t.collective) == (TITLE, "allreduce"))
    for cells in table.rows:
        bare, nbytes = number(cells["mpi4py µs"]), size(cells["bytes"])
        for column, candidate, memory in CANDIDATES:
            ratio = 1.0 if candidate == "mpi4py" else float(cells[column])
            rate = nbytes / (bare / ratio) / 1000
            yield Row(
                work="allreduce",
                candidate=candidate,
                ranks=2,
                time_us=bare / ratio,
                ratio=ratio,
                correct=True,
                bytes=nbytes,
                dtype="float32",
                op="sum",
                backend="mpi",
                memory=memory,
                algbw_gbs=rate,
                busbw_gbs=rate,  # times 2 (p - 1) / p, which is 1 here
            )


def write(app: Any, failure: Exception | None) -> None:
    """Write the report beside the pages."""
    from mpidist.bench.report import bench_page
    from mpidist.bench.results import Results

    if failure is not None or app.builder.name != "html":
        return
    text = (DOCS / "benchmarks_data" / "tables.inc").read_text(encoding="utf-8")
    days = re.findall(r"cores; (\d{4}-\d{2}-\d{2})", text)
    vendor, version = TITLE.partition(",")[0].rsplit(" ", 1)
    header = {
        "mpi": {"vendor": vendor, "version": version},
        "ranks": 2,
        "host": "a machine with 2 cores",
        "date": days[0],
    }
    page = bench_page(Results(header, list(rows()), notes=["medians over three launches"]))
    (Path(app.outdir) / "_static" / "report.html").write_text(page, encoding="utf-8")


def setup(app: Any) -> dict[str, Any]:
    """Write the report after the pages."""
    app.connect("build-finished", write)
    return {"parallel_read_safe": True}
