"""What others may have written: JSON, files and texts, read within limits or refused.

A checkpoint, a tuning table, a result file or a message can come from anybody.  Whatever it holds,
what reads it gets values of the types that it asked for, or one error that names the wrong field.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import stat
from collections.abc import Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from .errors import InvalidArgument

LONGEST = 256 << 20  # bytes of a text
DEEPEST = 200  # lists and objects inside each other
_WHOLE = 1 << 63  # whole numbers are below


def read_json(
    text: str | bytes,
    what: str,
    form: Any = Any,
    error: type[Exception] = InvalidArgument,
    longest: int = LONGEST,
) -> Any:
    """Return the value of a JSON text of unknown origin, of the type `form` (see :func:`typed`).

    Raises `error` if the text is too long, not JSON, nested more than 200 deep, or of another form;
    the message names `what`, such as a file's path, and the first wrong field.
    """
    if len(text) > longest:
        raise error(f"{what} is longer than {longest} bytes")
    try:
        content = json.loads(text)
    except RecursionError:
        raise error(f"{what} is nested too deep: expected at most {DEEPEST} levels") from None
    except ValueError as wrong:
        raise error(f"{what} is not JSON: {shown(str(wrong))}") from None
    level = [content]
    for _ in range(DEEPEST):
        inner = (v for v in level if isinstance(v, (list, dict)) and v)
        level = [v for one in inner for v in (one.values() if isinstance(one, dict) else one)]
        if not level:
            break
    else:
        raise error(f"{what} is nested too deep: expected at most {DEEPEST} levels")
    try:
        return typed(content, form)
    except TypeError as wrong:
        raise error(f"{what}: {wrong}") from None


def typed(value: Any, form: Any, path: str = "") -> Any:
    """Return a value of JSON as the type `form`; TypeError names the path of the first wrong field.

    `form` is ``int`` (within 64 bits), ``float`` (finite), ``str``, ``bool``, ``None``, ``Any``, a
    Literal, a union, or a list, tuple or dict (with keys str) of these; or a dataclass, which is
    made from an object with its fields, those with a default optional.
    """
    kind, parts = get_origin(form) or form, get_args(form)
    if kind is Any:
        return value
    if kind in (Union, UnionType):
        filled = [part for part in parts if part is not NoneType]
        if isinstance(value, dict) and len(filled) == 1:
            return typed(value, filled[0], path)  # an error names the field within
        for part in parts:
            try:
                return typed(value, part, path)
            except TypeError:
                continue
    elif kind is Literal:
        if any(type(value) is type(part) and value == part for part in parts):
            return value
    elif kind in (None, NoneType, str, bool):
        if type(value) is (NoneType if kind is None else kind):
            return value
    elif kind is int:
        if type(value) is int and -_WHOLE <= value < _WHOLE:
            return value
    elif kind is float:
        if (type(value) is int and -_WHOLE <= value < _WHOLE) or (
            type(value) is float and math.isfinite(value)
        ):
            return value
    elif kind is list:
        if isinstance(value, list):
            return [typed(v, parts[0], f"{path}[{i}]") for i, v in enumerate(value)]
    elif kind is tuple:
        if isinstance(value, list) and parts[1:] == (...,):
            return tuple(typed(v, parts[0], f"{path}[{i}]") for i, v in enumerate(value))
        if isinstance(value, list) and len(value) == len(parts):
            both = zip(value, parts)
            return tuple(typed(v, part, f"{path}[{i}]") for i, (v, part) in enumerate(both))
    elif kind is dict:
        if isinstance(value, dict):
            return {key: typed(v, parts[1], _within(path, key)) for key, v in value.items()}
    elif isinstance(value, Mapping):
        return _made(value, kind, path)
    where = f"{path} is " if path else "it is "
    raise TypeError(f"{where}{_brief(value)}: expected {_name(form)}")


def _made(value: Mapping[str, Any], kind: type, path: str) -> Any:
    """Return the dataclass `kind` of an object's fields; TypeError if one is wrong or unknown."""
    hints, fields = _hints(kind), {f.name: f for f in dataclasses.fields(kind)}
    unknown = next((name for name in value if name not in fields), None)
    if unknown is not None:
        raise TypeError(f"{_within(path, unknown)} is unknown: expected {', '.join(fields)}")
    for name, field in fields.items():
        needed = field.default is field.default_factory is dataclasses.MISSING
        if needed and name not in value:
            raise TypeError(f"{_within(path, name)} is missing")
    return kind(**{n: typed(v, hints[n], _within(path, n)) for n, v in value.items()})


@cache
def _hints(kind: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields: evaluating them takes 0.5 ms."""
    return get_type_hints(kind)


def _within(path: str, key: str) -> str:
    key = shown(key) if len(key) <= 60 else f"{shown(key[:60])}…"
    return f"{path}.{key}" if path else key


def _brief(value: Any) -> str:
    """Return a value for a message: its own text if short, else its type."""
    if isinstance(value, (list, dict)):
        return f"a list of {len(value)}" if isinstance(value, list) else "an object"
    if type(value) is int and abs(value) >= _WHOLE:
        return "a whole number beyond 64 bits"
    return shown(f"{value!r:.60}")


def _name(form: Any) -> str:
    kind, parts = get_origin(form) or form, get_args(form)
    names: dict[Any, str] = {int: "a whole number", float: "a number", str: "a text"}
    names |= {
        bool: "true or false",
        list: "a list",
        dict: "an object",
        None: "null",
        NoneType: "null",
    }
    if kind in (Union, UnionType):
        return " or ".join(map(_name, parts))
    if kind is Literal:
        return " or ".join(map(repr, parts))
    if kind is tuple:
        return "a list" if parts[1:] == (...,) else f"a list of {len(parts)}"
    return names.get(kind, "an object")


def shown(text: str) -> str:
    r"""Return a text with control characters and lone surrogates as escapes, such as ``\x1b``.

    For texts of others on their way to a terminal or a page.  Newlines and tabs are kept.
    """
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t" or not _controls(c) else ascii(c)[1:-1] for c in text)


def all_shown(content: Any) -> Any:
    """Return a value of JSON with :func:`shown` of each text in it, those of keys too."""
    if isinstance(content, str):
        return shown(content)
    if isinstance(content, list):
        return [all_shown(value) for value in content]
    if isinstance(content, dict):
        return {shown(key): all_shown(value) for key, value in content.items()}
    return content


def _controls(c: str) -> bool:
    """Return whether a character steers a terminal, reorders text, or cannot be encoded."""
    code = ord(c)
    steers = code < 0x20 or 0x7F <= code < 0xA0
    return steers or 0xD800 <= code < 0xE000 or 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069


def open_regular(path: str | os.PathLike, follow: bool = True) -> Any:
    """Open a regular file for reading as bytes; never wait, as for a writer of a FIFO.

    Raises OSError if it cannot be opened, is not a regular file, or is a symbolic link and not
    `follow`.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    file = os.fdopen(os.open(path, flags if follow else flags | os.O_NOFOLLOW), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(f"{os.fspath(path)} is not a regular file")
    return file


def read_file(path: str | os.PathLike, follow: bool = True, longest: int = LONGEST) -> bytes:
    """Return the bytes of a regular file; OSError if it is none, or longer than `longest`."""
    with open_regular(path, follow) as file:
        content: bytes = file.read(longest + 1)
    if len(content) > longest:
        raise OSError(f"{os.fspath(path)} is longer than {longest} bytes")
    return content
