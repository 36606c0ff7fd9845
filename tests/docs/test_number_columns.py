"""Columns of numbers in the tables of the pages."""

from pathlib import Path

import pytest

EXTENSIONS = Path(__file__).resolve().parents[2] / "docs" / "_ext"
TABLE = """
.. csv-table::
   :header: "bytes", "µs", "setting", "gain", "empty", "name", "calls"

   "8", "1.717", "", "+3 %", "", "1f1b", "all of 3"
   "16", "28,954", "UCX", "**2.93**", "", "2", "7"
"""


@pytest.mark.docs
def test_numbers_are_marked(monkeypatch):
    """With their head; not the first column, which names the rows, nor one with a text."""
    pytest.importorskip("sphinx", reason="needs sphinx, of the extra docs")
    monkeypatch.syspath_prepend(str(EXTENSIONS))
    from docutils import core, nodes
    from number_columns import mark

    (table,) = core.publish_doctree(TABLE).findall(nodes.tgroup)
    mark(table)
    for row in table.findall(nodes.row):
        marked = ["number" in cell["classes"] for cell in row]
        assert marked == [False, True, False, True, False, False, False]
