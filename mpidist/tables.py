"""Tables as data, for a terminal, a page or a notebook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    head: str = ""  # text above it; a line break is a blank where there is room
    align: Literal["left", "right"] = "left"  # of its cells
    wrap: bool = True  # whether cells that are too long for a terminal are wrapped
    narrow: bool = True  # whether narrow terminals show it

    @classmethod
    def numbers(cls, head: str, narrow: bool = True) -> Column:
        """Return a column of numbers: right-aligned, never wrapped."""
        return cls(head, "right", wrap=False, narrow=narrow)

    @classmethod
    def names(cls, head: str) -> Column:
        """Return a column of names, which are never wrapped."""
        return cls(head, wrap=False)


@dataclass
class Line:
    """One line of a table."""

    cells: list[str]  # text of each column
    style: str = ""  # "fastest", "baseline", "wrong", "better", "worse", or empty
    # Whether it is the first of a group, such as the candidates at one size.
    starts_group: bool = True
    # Length of a bar at the line's end, as a fraction of the table's longest; None for no bars.
    bar: float | None = None


@dataclass
class Table:
    """Heading, columns and lines of a table."""

    heading: str
    columns: list[Column]
    lines: list[Line]

    @property
    def heads(self) -> list[str]:
        """The heads of the columns."""
        return [column.head for column in self.columns]
