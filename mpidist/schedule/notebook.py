"""Pictures, proofs and tables in a notebook: ``_repr_svg_`` and ``_repr_html_`` of IPython."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any


class Svg(str):
    """The text of an SVG, which a notebook shows as a picture."""

    __slots__ = ()

    def _repr_svg_(self) -> str:
        return str(self)


def html_table(rows: Iterable[Sequence[object]], heads: Sequence[str] = ()) -> str:
    """Return an HTML table of the rows' cells as text; cells with a number are right-aligned."""
    lines = ["<table>"]
    if heads:
        lines.append(f"<tr>{''.join(f'<th>{escape(head)}</th>' for head in heads)}</tr>")
    for row in rows:
        cells = (f"<td{_align(cell)}>{escape(str(cell))}</td>" for cell in row)
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return "\n".join([*lines, "</table>"])


def html_fields(record: Any) -> str:
    """Return an HTML table with the name and the value of each field of a dataclass instance."""
    fields = dataclasses.fields(record)
    return html_table([(field.name, getattr(record, field.name)) for field in fields])


def _align(cell: object) -> str:
    number = str(cell).replace(",", "").replace(".", "", 1).lstrip("-")
    return ' style="text-align: right"' if number.isdecimal() else ""
