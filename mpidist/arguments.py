"""Checks of arguments, with one wording each; richer texts stand where the argument is used.

The text begins with `where`, such as "rank 3: ", and ends with `more`, such as ", or None".
"""

from __future__ import annotations

from collections.abc import Collection
from numbers import Integral
from typing import Any

from .errors import InvalidArgument


def whole(
    name: str,
    value: Any,
    least: int = 1,
    where: str = "",
    more: str = "",
    error: type[InvalidArgument] = InvalidArgument,
) -> int:
    """Return a whole number >= `least` of any type, such as numpy's, as an int; not a bool."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise error(f"{where}{name}={value!r}: expected a whole number >= {least}{more}")
    return int(value)


def one_of(
    name: str,
    value: Any,
    choices: Collection[Any],
    where: str = "",
    error: type[InvalidArgument] = InvalidArgument,
) -> None:
    """Raise an error for a value that is no choice; 1 is not True."""
    if not any(isinstance(value, type(c)) and value == c for c in choices):
        raise error(f"{where}{name}={value!r}: expected one of {', '.join(map(repr, choices))}")


def true_or_false(name: str, value: Any, where: str = "") -> None:
    """Raise InvalidArgument for a value that is not a bool."""
    if not isinstance(value, bool):
        raise InvalidArgument(f"{where}{name}={value!r}: expected True or False")


def function(name: str, value: Any, of: str = "", where: str = "") -> None:
    """Raise InvalidArgument for a value that cannot be called; `of` are its arguments."""
    if not callable(value):
        raise InvalidArgument(f"{where}{name}={value!r}: expected a function{of and f' of {of}'}")
