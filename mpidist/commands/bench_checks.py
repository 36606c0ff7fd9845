"""What ``mpidist bench`` refuses before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
from click.core import ParameterSource

from ..errors import InvalidArgument
from .options import check_writable


def make_settings(**options: Any) -> Any:
    """Check the options, and give them as settings."""
    from ..bench import Settings
    from ..bench.data import find_dtype

    for name, least in (("iterations", 1), ("budget", 0), ("limit", 0)):
        if options[name] < least:
            raise InvalidArgument(f"--{name} {options[name]}: allowed are numbers >= {least}")
    return Settings(**{**options, "dtype": find_dtype(options["dtype"])})


def check_files(json_file: str | None, **drawn: str | None) -> None:
    """See, before anything is measured, that the files can be written and curves be drawn."""
    from ..bench.plot import check_format, check_matplotlib

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
