"""Options and arguments that several commands take."""

from __future__ import annotations

import importlib
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ..errors import InvalidArgument


def load(context: Any, option: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    """Run the files, or import the modules, in which a user registers algorithms."""
    for name in names:
        load_names(name, f"--import {name}")
    return names


def load_names(name: str, asked: str) -> dict[str, Any]:
    """Run a file, or import a module; give the names in it.

    Parameters
    ----------
    name : str
        The file or module.
    asked : str
        What was written on the command line, for errors.
    """
    try:
        if name.endswith(".py") or os.sep in name or Path(name).is_file():
            return runpy.run_path(name, run_name="__mpidist_import__")
        sys.path.insert(0, os.getcwd())
        return vars(importlib.import_module(name))
    except (Exception, SystemExit) as error:
        missing = isinstance(error, FileNotFoundError) and not Path(name).exists()
        if missing or getattr(error, "name", None) == name:
            raise InvalidArgument(
                f"{asked}: there is no such file in {os.getcwd()}, or module"
            ) from error
        frames = traceback.extract_tb(error.__traceback__)
        at = [f.lineno for f in frames if Path(f.filename).name == Path(name).name]
        line = f", line {at[-1]}" if at else ""
        raise click.ClickException(f"{asked}{line}: {type(error).__name__}: {error}") from error


def only_for(context: click.Context, whom: str, *options: str) -> None:
    """Raise InvalidArgument where an option was given that is for `whom`, and not for this."""
    for option in options:
        if context.get_parameter_source(option) is ParameterSource.COMMANDLINE:
            raise InvalidArgument(f"--{option} is for {whom}")


load_option = click.option(
    "--import",
    "--load",
    "imports",
    multiple=True,
    metavar="FILE",
    callback=load,
    is_eager=True,
    help="Run this Python file (or import this module) first: it registers algorithms of yours.",
)


class Names(click.ParamType):
    """A comma-separated list of names."""

    name = "names"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, ...]:
        """Give the names as a tuple."""
        if isinstance(value, tuple):
            return value
        names = tuple(part.strip() for part in value.split(","))
        if not all(names):
            option = param.opts[0] if param is not None else "names"
            raise InvalidArgument(
                f"{option} {value!r}: allowed are names with a comma between them, none empty"
            )
        return names


class Size(click.ParamType):
    """Bytes, for example 64K."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """Give the number of bytes."""
        from ..measure import parse_size

        return value if isinstance(value, int) else parse_size(value)


def check_writable(option: str, path: str | None) -> None:
    """Raise InvalidArgument where a file cannot be written: before the work, not after it."""
    if path is None:
        return
    folder = Path(path).absolute().parent
    if Path(path).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InvalidArgument(f"{option} {path}: cannot be written there; the folder must exist")


class Seconds(click.ParamType):
    """A time, for example 60, 60s, 2m or 1.5h."""

    name = "time"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """Give the seconds."""
        if isinstance(value, float):
            return value
        units = {"s": 1.0, "m": 60.0, "h": 3600.0}
        text = str(value).strip()
        number, unit = (text[:-1], units[text[-1]]) if text[-1:] in units else (text, 1.0)
        if not number.replace(".", "", 1).isdigit() or float(number) == 0:
            raise InvalidArgument(f"{value!r} is no time: allowed are numbers > 0, like 60s or 2m")
        return float(number) * unit


class Sizes(click.ParamType):
    """Numbers of bytes, for example 8,64K,1M."""

    name = "sizes"

    def convert(self, value: Any, param: Any, ctx: Any) -> list[int]:
        """Give the numbers of bytes."""
        from ..measure import parse_sizes

        return value if isinstance(value, list) else parse_sizes(value)


class Numbers(click.ParamType):
    """Whole numbers, for example 1-33 or 1,2,5."""

    name = "numbers"

    def convert(self, value: Any, param: Any, ctx: Any) -> list[int]:
        """Give the numbers."""
        if isinstance(value, list):
            return value
        numbers: list[int] = []
        for part in value.split(","):
            first, dash, last = part.strip().partition("-")
            if not first.isdigit() or (dash and not last.isdigit()):
                raise InvalidArgument(f"{value!r}: allowed are whole numbers like 5, 2,3,7 or 1-33")
            numbers += range(int(first), int(last or first) + 1)
        if not numbers:
            raise InvalidArgument(f"{value!r} names no number: FROM-TO needs FROM <= TO")
        return numbers
