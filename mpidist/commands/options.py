"""Options and arguments that several commands take."""

from __future__ import annotations

import importlib
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ..errors import InvalidArgument
from ..pipeline.schedules.schedule import PipelineSchedule, find_schedule
from ..schedule.contract import COLLECTIVES
from ..schedule.registry import algorithms


def check_collectives(names: tuple[str, ...]) -> tuple[str, ...]:
    """Give the collectives asked for; all if none was."""
    for name in names:
        algorithms(name)
    return tuple(dict.fromkeys(names)) or tuple(COLLECTIVES)


def find_pipeline(name: str) -> PipelineSchedule | Callable:
    """Give a schedule by its name, or a generator function by ``MODULE:FUNCTION``."""
    module, colon, function = name.rpartition(":")
    if not colon:
        if name in COLLECTIVES:
            raise InvalidArgument(f"{name} is a collective: give one of its algorithms as well")
        return find_schedule(name)
    found = load_names(module, name).get(function)
    if not callable(found):
        raise InvalidArgument(f"{name}: {module} has no function {function}")
    return found


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


def make_settings(**options: Any) -> Any:
    """Check the options, and give them as settings."""
    from ..bench import Settings
    from ..bench.cases import number_dtype

    for name, least in (("iterations", 1), ("budget", 0), ("limit", 0)):
        if options[name] < least:
            raise InvalidArgument(f"--{name} {options[name]}: allowed are numbers >= {least}")
    return Settings(**{**options, "dtype": number_dtype(options["dtype"])})


def check_files(json_file: str | None, **drawn: str | None) -> None:
    """See, before anything is measured, that the files can be written and curves be drawn."""
    from ..bench.plots import check_format, check_matplotlib

    check_writable("--json", json_file)
    for name, path in drawn.items():
        check_writable(f"--{name}", path)
        if path:
            check_matplotlib(f"--{name}")
            if name == "plot":
                check_format(f"--{name}", path)


def check_alone(option: str) -> None:
    """Raise InvalidArgument where `option` stands beside others, which would have no effect."""
    context = click.get_current_context()
    given = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
    names = [
        parameter.opts[0] if isinstance(parameter, click.Option) else "a collective"
        for parameter in context.command.params
        if context.get_parameter_source(parameter.name or "") in given
        and context.params.get(parameter.name or "")
    ]
    others = [name for name in names if name != option]
    if others:
        raise InvalidArgument(
            f"{option} together with {', '.join(others)}: {option} stands alone, without "
            "collectives or options of a measurement"
        )


def check_scaling(report: str | None, stream: bool | None) -> None:
    """Raise InvalidArgument for what ``--scaling`` does not give."""
    for name, given in (("--report", report), ("--stream", stream)):
        if given:
            raise InvalidArgument(f"{name}: --scaling gives --json and --plot only")


def check_only(name: str | None, options: Sequence[str], allowed: str) -> None:
    """Raise InvalidArgument where more is given than the benchmark `name` of training takes.

    `options` are the names of those that it takes, `allowed` says so in words.  Without a name it
    is ``--device``, which has collectives beside it.
    """
    context = click.get_current_context()
    others = [
        parameter.opts[0]
        for parameter in context.command.params
        if isinstance(parameter, click.Option)
        and parameter.name not in options
        and context.get_parameter_source(parameter.name or "") == ParameterSource.COMMANDLINE
    ]
    if name is None and not others:
        return
    if others or context.params["collectives"] != (name,):
        raise InvalidArgument(
            f"bench {name or '--device'} stands alone; allowed are {allowed}"
            + (f", not {', '.join(others)}" if others else ", and no collective")
        )
