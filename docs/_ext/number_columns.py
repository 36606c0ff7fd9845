"""Columns of numbers, in every table of the pages, are right-aligned: points and digits meet."""

from __future__ import annotations

import re

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

NUMBER = re.compile(r"[-+±~×]?\d[\d,]*(\.\d+)?\s?(%|×|x|[KMG]|[KMG]i?B|µs|ms|s)?")


class NumberColumns(SphinxPostTransform):
    """Marks the columns of the tables of a page."""

    default_priority = 400

    def run(self, **kwargs: object) -> None:
        """Mark the columns of numbers of each table."""
        for table in self.document.findall(nodes.tgroup):
            mark(table)


def mark(table: nodes.tgroup) -> None:
    """Give all cells of a column the class "number" if those of its body are numbers or empty.

    But for the first column, which names the rows, and tables with cells that span others.
    """
    body = next(table.findall(nodes.tbody))
    rows = [row.children for row in table.findall(nodes.row)]
    if len({len(row) for row in rows}) > 1:
        return
    for column in list(zip(*rows))[1:]:
        texts = [cell.astext().strip() for cell in column[-len(body.children) :]]
        if any(texts) and all(not text or NUMBER.fullmatch(text) for text in texts):
            for cell in column:
                cell["classes"].append("number")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the transform."""
    app.add_post_transform(NumberColumns)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
