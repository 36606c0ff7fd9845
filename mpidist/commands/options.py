"""Option types: one for all, over functions that parse a text and name the expected form."""

from __future__ import annotations

import importlib
import math
import os
import re
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
from ..schedule.registry import Choice, Groups, algorithms, find, reserved

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

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number; nan is none."""
        seconds = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail(f"{value} is not a number of seconds.", param, ctx)
        return seconds


def complete(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    """Return the completions of `incomplete`, whose text after the last comma begins a name."""
    before, comma, last = incomplete.rpartition(",")
    fitting = (name for name in dict.fromkeys(names) if name.startswith(last))
    return [CompletionItem(f"{before}{comma}{name}") for name in fitting]


def complete_file(incomplete: str) -> list[CompletionItem]:
    """Return the request that the shell completes `incomplete` as the name of a file."""
    return [CompletionItem(incomplete, type="file")]


class Parsed(click.ParamType):
    """Option type of a parse function, whose InvalidArgument becomes a usage error.

    `name` is the kind of the values, for the help; `known` returns the names that a shell offers as
    completions, files if it is None; `packages` are those that the option needs.
    """

    def __init__(
        self,
        name: str,
        parse: Callable[[str], Any],
        known: Callable[[], Iterable[str]] | None = tuple,
        packages: tuple[str, ...] = (),
    ):
        self.name, self.parse, self.known, self.packages = name, parse, known, packages

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the parsed value; raise Unsupported if a package is not installed."""
        if not isinstance(value, str):
            return value
        if self.packages:
            from ..bench.report import check_packages

            check_packages(param.opts[0] if param is not None else self.name, *self.packages)
        try:
            return self.parse(value)
        except InvalidArgument as error:
            self.fail(str(error), param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the completions, among `known`, of the last name in a list with commas."""
        if self.known is None:
            return complete_file(incomplete)
        return complete(self.known(), incomplete)


@contextmanager
def naming(parameter: str) -> Iterator[None]:
    """Turn an InvalidArgument within the block into a usage error that names `parameter`."""
    try:
        yield
    except InvalidArgument as error:
        raise click.BadParameter(str(error), param_hint=f"'{parameter}'") from None


# -- numbers --------------------------------------------------------------------------------------


def _many(text: str) -> int:
    try:
        number = parse_size(text)
    except InvalidArgument:
        number = 0
    if number < 1:
        raise InvalidArgument(
            f"{text!r}: expected a whole number >= 1, with K or M for 1024 or 1024², such as 1M"
        )
    return number


MANY = Parsed("N", _many)
"""Type of a number that may be large: ``4096``, ``1M`` for 1,048,576."""


def byte_count(least: int = 0) -> Parsed:
    """Return the type of a number of bytes, at least `least`: ``8``, ``64K``, ``1.5MiB``."""

    def parse(text: str) -> int:
        nbytes = parse_size(text)
        if nbytes < least:
            raise InvalidArgument(f"{text!r}: expected at least {least} bytes")
        return nbytes

    return Parsed("bytes", parse)


SIZES = Parsed("sizes", parse_sizes)
"""Type of several numbers of bytes: ``8,64K,1M``; ``8-64M`` is 8, 32, 128, … 64M."""


def _duration(text: str) -> float:
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    unit = text[-1:] if text[-1:] in units else "s"
    number = text.removesuffix(unit)
    if not number.replace(".", "", 1).isdecimal() or float(number) == 0:
        raise InvalidArgument(
            f"invalid duration {text!r}: expected a positive number with s, m or h, such as "
            "60s or 2m"
        )
    return float(number) * units[unit]


DURATION = Parsed("duration", _duration)
"""Type of a time above 0, such as ``60`` (seconds), ``60s``, ``2m`` or ``1.5h``; in seconds."""


def integer_ranges(least: int) -> Parsed:
    """Return the type of whole numbers >= `least`, such as ``5``, ``2,3,7`` or ``1-33``."""

    def parse(text: str) -> list[int]:
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
        if min(numbers) < least:
            raise InvalidArgument(f"{min(numbers)} is too small: expected whole numbers >= {least}")
        return numbers

    return Parsed("numbers", parse)


def _floats(text: str) -> list[float]:
    """Return the numbers between the commas; none if one is no number."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        return []


def _millions(text: str) -> list[float]:
    sizes = _floats(text)
    if not sizes or not all(0 < size < 1e6 for size in sizes):
        raise InvalidArgument(f"{text!r}: expected positive numbers, in millions: 4,17,50")
    return sizes


MILLIONS = Parsed("millions", _millions)
"""Type of numbers of parameters in millions, such as ``4,17,50``."""


def _costs(text: str) -> Costs:
    from ..pipeline.schedules.simulate import Costs

    times = [_floats(part.replace(":", ",")) for part in text.split(",")]
    if not all(times) or len(times) not in (3, 4) or any(len(part) > 1 for part in times[3:]):
        raise InvalidArgument(
            f"{text!r}: expected three numbers, or four with the time of a message; each of "
            "the first three may be one for each virtual stage, such as 1:2:1"
        )
    return Costs(*(part[0] if len(part) == 1 else part for part in times))  # type: ignore[arg-type]


COSTS = Parsed("F,I,W[,message]", _costs)
"""Type of the times of F, I, W and optionally a message, such as ``1,1,1``.

F is forward, I the gradient of the input, W the gradient of the weights.  Each of them can have one
time per virtual stage, with colons: ``1:2:1,1,1,0.1``.
"""


def _dtype(text: str) -> np.dtype:
    from ..bench.cases import number_dtype

    return number_dtype(text)


DTYPE = Parsed("dtype", _dtype)
"""Type of the name of a dtype of numpy or ml_dtypes, of numbers or bool."""


# -- names ----------------------------------------------------------------------------------------


def _names(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    if not all(names):
        raise InvalidArgument(
            f"{text!r} has an empty name: expected names with commas between them"
        )
    return names


def collective_name(*more: str) -> Parsed:
    """Return the type of the name of a collective, or one of `more`."""
    known = (*COLLECTIVES, *more)

    def parse(text: str) -> str:
        if text not in known:
            raise UnknownName("collective", text, known)
        return text

    return Parsed("collective", parse, lambda: known)


def _collective_names(text: str) -> tuple[str, ...]:
    names = _names(text)
    for name in names:
        algorithms(name)
    return names


COLLECTIVE_NAMES = Parsed("collectives", _collective_names, lambda: COLLECTIVES)
"""Type of names of collectives, with commas between them."""


def algorithm_names(
    collectives: Iterable[str] = COLLECTIVES,
    *more: str,
    one_sided: bool = False,
    one: bool = False,
) -> Parsed:
    """Return the type of names of algorithms, with commas between them.

    Each must be an algorithm of at least one of the `collectives`, or one of `more`.  `one_sided`
    lists algorithms in shared memory too, which "auto" never chooses; `one` is a single name,
    without commas.
    """

    def known() -> tuple[str, ...]:
        return (*more, *names_of_algorithms(collectives, one_sided))

    def parse(text: str) -> tuple[str, ...] | str:
        names = (text,) if one else _names(text)
        for name in names:
            if name not in more:
                check_algorithm(name, collectives, known())
        return text if one else names

    return Parsed("name" if one else "names", parse, known)


def names_of_algorithms(collectives: Iterable[str], one_sided: bool) -> list[str]:
    """Return the names of the algorithms of the collectives, some more than once."""
    return [a.name for each in collectives for a in algorithms(each, one_sided=one_sided)]


def check_algorithm(name: str, collectives: Iterable[str], known: Iterable[str]) -> None:
    """Raise InvalidArgument unless one of the `collectives` has an algorithm of this name.

    The error lists those of the names in `known` that are similar.
    """
    errors = []
    for collective in collectives:
        try:
            find(collective, name)
            return
        except InvalidArgument as error:
            errors.append(error)
    for found in errors:
        if not isinstance(found, UnknownName):  # such as a wrong arity
            raise found
    raise UnknownName("algorithm", name, known)


def named_algorithm(collective: str, name: str) -> Choice:
    """Return the algorithm of a name, as the arguments COLLECTIVE and ALGORITHM have them."""
    with naming("COLLECTIVE"):
        known = [a.name for a in algorithms(collective, one_sided=True)]
    with naming("ALGORITHM"):
        # It is NAME, NAME:ARITY or NAME/LOCAL/ACROSS.  For an unknown NAME find() would suggest the
        # reserved ones too ("auto", executors), which have no schedule; for those it says so.
        if re.split("[:/]", name)[0] not in (*known, *reserved()):
            raise UnknownName(f"{collective} algorithm", name, known)
        return find(collective, name)


def groups_of(nodes: list[int] | None, ranks: int) -> Groups | None:
    """Return the ranks of each node, given the nodes' numbers of ranks; None for None."""
    if nodes is None:
        return None
    if sum(nodes) != ranks:
        raise InvalidArgument(
            f"--nodes {','.join(map(str, nodes))}: expected numbers whose sum is --ranks {ranks}"
        )
    starts = [sum(nodes[:i]) for i in range(len(nodes))]
    return tuple(tuple(range(a, a + n)) for a, n in zip(starts, nodes))


def pipeline_schedule(text: str) -> PipelineSchedule | Callable:
    """Return the pipeline schedule of a name, or the generator function of ``FILE.py:NAME``.

    ``MODULE:NAME`` is a function of a module.  Raise InvalidArgument if there is none.
    """
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


def known_schedules() -> list[str]:
    """Return the names of the pipeline schedules."""
    from ..pipeline.schedules.schedule import schedules

    return [schedule.name for schedule in schedules()]


PIPELINE_NAMES = Parsed("names", _names, known_schedules)
"""Type of pipeline schedules with commas between them, as texts for :func:`pipeline_schedule`."""


# -- files to write, of which unwritable ones are refused before the work begins -------------------

STDOUT = "-"


def _writable(text: str) -> str:
    if text == STDOUT:
        raise InvalidArgument(f"{STDOUT}: expected the name of a file, not standard output")
    folder = Path(text).absolute().parent
    if Path(text).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InvalidArgument(
            f"{text} cannot be written: expected a file in an existing folder with write access"
        )
    return text


OUTPUT = Parsed("file", _writable, known=None)
"""Type of a file."""
OUTPUT_OR_STDOUT = Parsed("file", lambda text: text if text == STDOUT else _writable(text), None)
"""Type of a file, or ``-`` for standard output."""
PAGE = Parsed("file", _writable, None, ("matplotlib", "jinja2"))
"""Type of an HTML page with plots."""


def picture(*endings: str) -> Parsed:
    """Return the type of a picture file with one of the extensions, by default matplotlib's."""

    def parse(text: str) -> str:
        from ..bench import report

        path, known = _writable(text), endings or report.endings()
        if Path(path).suffix.removeprefix(".").lower() not in known:
            raise InvalidArgument(f"{path}: expected a name that ends in .{', .'.join(known)}")
        return path

    return Parsed("file", parse, None, ("matplotlib",))


# -- Python files that register algorithms ---------------------------------------------------------


def load_names(name: str, written: str) -> dict[str, Any]:
    """Run a file, or import a module; return a dict of the names defined in it.

    `written` is the argument as the user wrote it, for errors.  If running it raised, the message
    of the ClickException has the line.
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
        if name.endswith(".xml"):
            from ..interchange.msccl.algorithm import import_msccl

            with naming("--import"):
                import_msccl(name)
        else:
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
    help="First run this Python file, or import this module, which registers your algorithms; or "
    "register the algorithm of an MSCCL file, NAME.xml, by this name.",
)


Decorator = Callable[[Any], Any]


def only(use: str, *parameters: Decorator) -> Decorator:
    """Return a decorator that adds options and arguments which are only for this use of a command.

    See :func:`check_only`; `use` ends the sentence "--svg: only for …".
    """

    def decorate(command: Any) -> Any:
        for parameter in reversed(parameters):
            command = parameter(command)
        for added in command.__click_params__[-len(parameters) :]:
            added.only_for = use
        return command

    return decorate


def check_only(context: click.Context, *uses: str) -> None:
    """Raise UsageError if a parameter was given that is only for a use other than these."""
    wrong: dict[str, list[str]] = {}
    for one in context.command.params:
        use, name = getattr(one, "only_for", None), one.name or ""
        if use is None or use in uses:
            continue
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = isinstance(one, click.Option)
            shown = one.opts[0] if option else one.human_readable_name.strip("[].")
            wrong.setdefault(use, []).append(shown)
    for use, names in wrong.items():
        raise click.UsageError(f"{', '.join(names)}: only for {use}")
