"""Tables as data, for a terminal, a page or a notebook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes
    ----------
    head : str
        Text above the column; a line break is a blank where there is room.
    align : {"left", "right"}
        Side on which the cells are aligned.
    wrap : bool
        Whether cells that are too long for a terminal are wrapped.
    narrow : bool
        Whether narrow terminals show the column.
    """

    head: str = ""
    align: Literal["left", "right"] = "left"
    wrap: bool = True
    narrow: bool = True

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
    """One line of a table.

    Attributes
    ----------
    cells : list of str
        Text of each column.
    style : str
        One of "fastest", "baseline", "wrong", "better" and "worse", or empty.
    starts_group : bool
        Whether the line is the first of a group, such as the candidates at one size.
    bar : float or None
        Length of a bar beside the line, as a fraction of the table's longest; None for no bars.
    """

    cells: list[str]
    style: str = ""
    starts_group: bool = True
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
