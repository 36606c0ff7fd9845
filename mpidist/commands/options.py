"""Option types: each parses one kind of value; its errors name the expected form."""

from __future__ import annotations

import importlib
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from ..errors import InvalidArgument, UnknownName
from ..measure import parse_size, parse_sizes
from ..schedule.contract import COLLECTIVES
from ..schedule.registry import algorithms, find, reserved

CALLED = (*reserved(), "mpi4py")  # accepted beside algorithms: "auto", executors, the bare call

if TYPE_CHECKING:
    import numpy as np

    from ..pipeline.schedules.schedule import PipelineSchedule
    from ..pipeline.schedules.simulate import Costs


class Count(click.IntRange):
    """Option type: a whole number >= 1."""

    name = "whole number >= 1"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Return the placeholder of the value in the help."""
        return "N"

    def __init__(self) -> None:
        super().__init__(min=1)


class Seconds(click.FloatRange):
    """Option type: a number of seconds >= 0; > 0 if `positive` is true."""

    name = "seconds"

    def __init__(self, positive: bool = False) -> None:
        super().__init__(min=0, min_open=positive)


def complete(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    """Return the completions of `incomplete`, whose text after the last comma begins a name."""
    before, comma, last = incomplete.rpartition(",")
    fitting = (name for name in dict.fromkeys(names) if name.startswith(last))
    return [CompletionItem(f"{before}{comma}{name}") for name in fitting]


def complete_file(incomplete: str) -> list[CompletionItem]:
    """Return the request that the shell completes `incomplete` as the name of a file."""
    return [CompletionItem(incomplete, type="file")]


class Parsed(click.ParamType):
    """Base class of option types: an InvalidArgument of :meth:`parse` becomes a usage error."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the parsed value; a usage error names option, value and expected form."""
        if not isinstance(value, str):
            return value
        try:
            return self.parse(value)
        except InvalidArgument as error:
            self.fail(str(error), param, ctx)

    def known(self) -> Iterable[str]:
        """Return the names that a shell offers as completions of this option; here none."""
        return ()

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the completions, among `known`, of the last name in a list with commas."""
        return complete(self.known(), incomplete)

    def parse(self, text: str) -> Any:
        """Parse the text of an option; raise InvalidArgument if it is not valid."""
        raise NotImplementedError


class Bytes(Parsed):
    """Option type: a number of bytes, at least `least`: ``8``, ``64K``, ``1.5MiB``."""

    name = "bytes"

    def __init__(self, least: int = 0):
        self.least = least

    def parse(self, text: str) -> int:
        """Return the number of bytes; raise InvalidArgument for another form, or below `least`."""
        nbytes = parse_size(text)
        if nbytes < self.least:
            raise InvalidArgument(f"{text!r}: expected at least {self.least} bytes")
        return nbytes


class ByteSizes(Parsed):
    """Option type: several numbers of bytes: ``8,64K,1M``; ``8-64M`` is 8, 32, 128, … 64M."""

    name = "sizes"

    def parse(self, text: str) -> list[int]:
        """Return the numbers of bytes; raise InvalidArgument for another form."""
        return parse_sizes(text)


class Duration(Parsed):
    """Option type: a time above 0, such as ``60`` (seconds), ``60s``, ``2m`` or ``1.5h``."""

    name = "duration"
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}

    def parse(self, text: str) -> float:
        """Return the seconds; raise InvalidArgument for another form."""
        unit = text[-1:] if text[-1:] in self.units else "s"
        number = text.removesuffix(unit)
        if not number.replace(".", "", 1).isdecimal() or float(number) == 0:
            raise InvalidArgument(
                f"invalid duration {text!r}: expected a positive number with s, m or h, such as "
                "60s or 2m"
            )
        return float(number) * self.units[unit]


class IntegerRanges(Parsed):
    """Option type: whole numbers >= `least`, such as ``5``, ``2,3,7`` or ``1-33``."""

    name = "numbers"

    def __init__(self, least: int):
        self.least = least

    def parse(self, text: str) -> list[int]:
        """Return the numbers in the order given; raise InvalidArgument for another form."""
        numbers: list[int] = []
        for part in text.split(","):
            first, dash, last = part.strip().partition("-")
            if not first.isdecimal() or (dash and not last.isdecimal()):
                raise InvalidArgument(
                    f"{text!r}: expected whole numbers and ranges of them, such as 5, 2,3,7 or 1-33"
                )
            numbers += range(int(first), int(last or first) + 1)
            if dash and int(first) > int(last):
                raise InvalidArgument(f"{part!r} is empty: expected FROM-TO with FROM <= TO")
        if min(numbers) < self.least:
            raise InvalidArgument(
                f"{min(numbers)} is too small: expected whole numbers >= {self.least}"
            )
        return numbers


class Names(Parsed):
    """Option type: names with commas between them."""

    name = "names"

    def parse(self, text: str) -> tuple[str, ...]:
        """Return the names between the commas; raise InvalidArgument if one is empty."""
        names = tuple(part.strip() for part in text.split(","))
        if not all(names):
            raise InvalidArgument(
                f"{text!r} has an empty name: expected names with commas between them"
            )
        return names


@contextmanager
def naming(parameter: str) -> Iterator[None]:
    """Turn an InvalidArgument within the block into a usage error that names `parameter`."""
    try:
        yield
    except InvalidArgument as error:
        raise click.BadParameter(str(error), param_hint=f"'{parameter}'") from None


class CollectiveName(Parsed):
    """Option type: the name of a collective, or one of `more`; errors list similar names."""

    name = "collective"

    def __init__(self, *more: str):
        self.more = more  # names that stand beside those of the collectives

    def known(self) -> Iterable[str]:
        """Return the names of all collectives, and `more`."""
        return (*COLLECTIVES, *self.more)

    def parse(self, text: str) -> str:
        """Return the name; raise UnknownName if it is neither a collective nor one of `more`."""
        if text not in self.known():
            raise UnknownName("collective", text, self.known())
        return text


class CollectiveNames(Names):
    """Option type: names of collectives with commas between them."""

    name = "collectives"

    def known(self) -> Iterable[str]:
        """Return the names of collectives."""
        return COLLECTIVES

    def parse(self, text: str) -> tuple[str, ...]:
        """Return the names; raise UnknownName for one that is no collective."""
        names = super().parse(text)
        for name in names:
            algorithms(name)
        return names


class AlgorithmNames(Names):
    """Option type: names of algorithms with commas between them; errors list similar names.

    Parameters
    ----------
    collectives : iterable of str
        Each name must be an algorithm of at least one of these collectives.
    *more : str
        Further names that are allowed.
    one_sided : bool
        Whether to list algorithms in shared memory too, which "auto" never chooses.
    """

    def __init__(
        self, collectives: Iterable[str] = COLLECTIVES, *more: str, one_sided: bool = False
    ):
        self.collectives, self.more, self.one_sided = tuple(collectives), more, one_sided

    def _names(self) -> list[str]:
        return [a.name for c in self.collectives for a in algorithms(c, one_sided=self.one_sided)]

    def known(self) -> Iterable[str]:
        """Return `more`, and the names of all algorithms of the `collectives`."""
        return (*self.more, *self._names())

    def parse(self, text: str) -> tuple[str, ...]:
        """Return the names; raise InvalidArgument for one that is not allowed."""
        names = super().parse(text)
        for name in names:
            self.check(name)
        return names

    def check(self, name: str) -> None:
        """Raise InvalidArgument unless `name` is an algorithm of `collectives`, or in `more`."""
        if name in self.more:
            return
        errors = []
        for collective in self.collectives:
            try:
                find(collective, name)
                return
            except InvalidArgument as error:
                errors.append(error)
        unknown = all(isinstance(error, UnknownName) for error in errors)
        if not unknown:  # such as a wrong arity
            raise next(error for error in errors if not isinstance(error, UnknownName))
        raise UnknownName("algorithm", name, dict.fromkeys([*self.more, *self._names()]))


class AlgorithmName(AlgorithmNames):
    """Option type: the name of one algorithm, without commas; errors list similar names."""

    name = "name"

    def parse(self, text: str) -> str:  # type: ignore[override]
        """Return the name; raise InvalidArgument if it is not allowed."""
        self.check(text)
        return text


class PipelineName(Parsed):
    """Option type: a pipeline schedule by name, or a generator function ``FILE.py:NAME``.

    ``MODULE:NAME`` is a function of a module.
    """

    name = "schedule"

    def parse(self, text: str) -> PipelineSchedule | Callable:
        """Return the schedule or the generator function; raise InvalidArgument if there is none."""
        from ..pipeline.schedules.schedule import find_schedule

        module, colon, function = text.rpartition(":")
        if not colon:
            if text in COLLECTIVES:
                raise InvalidArgument(f"{text} is a collective: expected an algorithm after it")
            return find_schedule(text)
        found = load_names(module, text).get(function)
        if not callable(found):
            raise InvalidArgument(f"{text}: {module} has no function {function}")
        return found


class PipelineNames(Names):
    """Option type: pipeline schedules, with commas between them, each as of PipelineName.

    A command parses them itself, after the other options.
    """

    def known(self) -> Iterable[str]:
        """Return the names of the pipeline schedules."""
        from ..pipeline.schedules.schedule import schedules

        return (schedule.name for schedule in schedules())


class ActionCosts(Parsed):
    """Option type: times of F, I, W and optionally a message, such as ``1,1,1``.

    F is forward, I the gradient of the input, W the gradient of the weights.  Each of them can have
    one time per virtual stage, with colons: ``1:2:1,1,1,0.1``.
    """

    name = "F,I,W[,message]"

    def parse(self, text: str) -> Costs:
        """Return the costs; raise InvalidArgument for another form."""
        from ..pipeline.schedules.simulate import Costs

        try:
            times = [[float(t) for t in part.split(":")] for part in text.split(",")]
        except ValueError:
            times = []
        if len(times) not in (3, 4) or any(len(part) > 1 for part in times[3:]):
            raise InvalidArgument(
                f"{text!r}: expected three numbers, or four with the time of a message; each of "
                "the first three may be one for each virtual stage, such as 1:2:1"
            )
        return Costs(*(part[0] if len(part) == 1 else part for part in times))  # type: ignore[arg-type]


class Millions(Parsed):
    """Option type: numbers of parameters in millions, such as ``4,17,50``."""

    name = "millions"

    def parse(self, text: str) -> list[float]:
        """Return the numbers, in millions; raise InvalidArgument for another form."""
        try:
            sizes = [float(part) for part in text.split(",")]
        except ValueError:
            sizes = []
        if not sizes or not all(0 < size < 1e6 for size in sizes):
            raise InvalidArgument(f"{text!r}: expected positive numbers, in millions: 4,17,50")
        return sizes


class DtypeName(Parsed):
    """Option type: the name of a dtype of numpy or ml_dtypes, of numbers or bool."""

    name = "dtype"

    def parse(self, text: str) -> np.dtype:
        """Return the dtype of this name; raise InvalidArgument for another name."""
        from ..bench.cases import number_dtype

        return number_dtype(text)


STDOUT = "-"


class OutputFile(Parsed):
    """Option type: a file to write; an unwritable one is refused before the work begins.

    Parameters
    ----------
    stdout : bool
        Whether ``-`` is allowed, for standard output.
    """

    name = "file"

    def __init__(self, stdout: bool = False):
        self.stdout = stdout

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the request that the shell completes the name of a file."""
        return complete_file(incomplete)

    def parse(self, text: str) -> str:
        """Return the path, or ``-``; raise InvalidArgument if it cannot be written."""
        if text == STDOUT and not self.stdout:
            raise InvalidArgument(f"{STDOUT}: expected the name of a file, not standard output")
        if text == STDOUT:
            return text
        folder = Path(text).absolute().parent
        if Path(text).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise InvalidArgument(
                f"{text} cannot be written: expected a file in an existing folder with write access"
            )
        return text


class ReportFile(OutputFile):
    """Option type: a page or picture to write; refused if a package that draws it is missing."""

    packages: tuple[str, ...] = ("matplotlib", "jinja2")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path; raise Unsupported if a package is not installed."""
        from ..bench.report import check_packages

        check_packages(param.opts[0] if param is not None else self.name, *self.packages)
        return super().convert(value, param, ctx)


class PlotFile(ReportFile):
    """Option type: a picture file with one of the extensions `endings`, by default matplotlib's."""

    packages = ("matplotlib",)

    def __init__(self, *endings: str):
        super().__init__()
        self.endings = endings

    def parse(self, text: str) -> str:
        """Return the path; raise InvalidArgument for another extension."""
        from ..bench.report import endings

        path, known = super().parse(text), self.endings or endings()
        if Path(path).suffix.removeprefix(".").lower() not in known:
            raise InvalidArgument(f"{path}: expected a name that ends in .{', .'.join(known)}")
        return path


def load_names(name: str, written: str) -> dict[str, Any]:
    """Run a file, or import a module; return a dict of the names defined in it.

    Parameters
    ----------
    name : str
        The file or module.
    written : str
        The argument as the user wrote it, for errors.

    Raises
    ------
    InvalidArgument
        If there is no such file or module.
    click.ClickException
        If running it raised; the message has the line.
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
                f"{written}: no such file in {os.getcwd()}, and no such module"
            ) from error
        frames = traceback.extract_tb(error.__traceback__)
        at = [f.lineno for f in frames if Path(f.filename).name == Path(name).name]
        line = f", line {at[-1]}" if at else ""
        raise click.ClickException(f"{written}{line}: {type(error).__name__}: {error}") from error


def _load(context: click.Context, option: click.Parameter, names: tuple[str, ...]) -> Any:
    for name in names:
        load_names(name, f"--import {name}")
    return names


load_option = click.option(
    "--import",
    "--load",
    "imports",
    type=click.Path(),
    multiple=True,
    metavar="FILE",
    callback=_load,
    expose_value=False,
    is_eager=True,
    help="First run this Python file, or import this module, which registers your algorithms.",
)


def is_given(context: click.Context, parameter: click.Parameter) -> bool:
    """Return whether the user wrote a parameter on the command line."""
    return context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE


def check_not_given(context: click.Context, names: tuple[str, ...], reason: str) -> None:
    """Raise UsageError if a parameter was given that has no effect here.

    Parameters
    ----------
    context : click.Context
        The context of the command.
    names : tuple of str
        The parameters, by their names in the function.
    reason : str
        What the parameters are for: the message is ``--svg: only for`` and this text.
    """
    given = [p for p in context.command.params if p.name in names and is_given(context, p)]
    wrong = [
        p.opts[0] if isinstance(p, click.Option) else p.human_readable_name.strip("[].")
        for p in given
    ]
    if wrong:
        raise click.UsageError(f"{', '.join(wrong)}: only for {reason}")
