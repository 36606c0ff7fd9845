"""What ``mpidist export openmpi`` and ``mpich`` share: options, jobs that measure, the table."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from typing import TYPE_CHECKING, Any

import click

from ... import __version__
from ...errors import InvalidArgument
from ...launcher.mpi import InstalledMpi, find_library
from ...measure import counted, round_size
from ...tables import Column
from ..console import make_console, make_table, progress_bar, show
from ..options import DURATION, OUTPUT, SIZES, Parsed, collective_name, integer_ranges

if TYPE_CHECKING:
    from rich.console import Console

    from ...bench.forced import InForce
    from ...interchange.library_rules import LibraryCollective, LibraryRule
    from ...schedule.cost import Link
    from ...schedule.registry import Groups

START_SECONDS = 120.0  # of a job besides its measurements: on a loaded machine MPI starts slowly


def _model(text: str) -> dict[str, float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (2, 3) or not all(0 <= x < math.inf for x in numbers):
        raise InvalidArgument(
            f"{text!r}: expected seconds of a message, of a byte sent and of a byte combined, such "
            "as 2e-6,1e-10,5e-11; `mpidist explain` prints those of this machine"
        )
    return dict(zip(("alpha", "beta", "gamma"), numbers))


MODEL = Parsed("alpha,beta[,gamma]", _model)
"""Type of the constants of the cost model."""


def rule_options(command: Callable) -> Callable:
    """Add the options of an export of rules to a command."""
    for option in (
        click.option(
            "-o", "--output", type=OUTPUT, required=True, metavar="FILE", help="The file."
        ),
        click.option(
            "--predict",
            "model",
            type=MODEL,
            help="Predict by the cost model instead, with these constants, for ranks that are not "
            "here: seconds of a message, of a byte sent, of a byte combined.",
        ),
        click.option(
            "--bytes",
            "sizes",
            type=SIZES,
            default="8-4M",
            show_default=True,
            help="Sizes of the whole buffer.",
        ),
        click.option(
            "--ranks",
            type=integer_ranges(2),
            required=True,
            help="Numbers of ranks, such as 4 or 4,8; rules hold on these alone.",
        ),
        click.argument("collectives", nargs=-1, type=collective_name(), metavar="[COLLECTIVE]..."),
    ):
        command = option(command)
    return command


def measuring_options(command: Callable) -> Callable:
    """Add the options of an export that starts jobs to a command."""
    for option in (
        click.option(
            "--check",
            is_flag=True,
            help="Start jobs with the file in force, and compare the bits of float32 sums with "
            "those of the forced algorithms.",
        ),
        click.option(
            "--force", is_flag=True, help="Write the rules of a busy machine nevertheless."
        ),
        click.option(
            "--budget",
            type=DURATION,
            default="60s",
            show_default=True,
            help="Time of all measurements together.",
        ),
    ):
        command = option(command)
    return command


def installed_mpi(library: str) -> InstalledMpi:
    """Return the MPI library that mpi4py loads; InvalidArgument if it is another than expected."""
    found = find_library()
    if found.vendor != library:
        raise InvalidArgument(
            f"mpi4py loads {found.vendor}, whose algorithms these are not: expected {library}"
        )
    return found


def measured_rules(
    installed: InstalledMpi,
    known: Mapping[str, LibraryCollective],
    collectives: Sequence[str],
    ranks: Sequence[int],
    sizes: Sequence[int],
    budget: float,
    force: bool,
    files: Mapping[str, str],
) -> tuple[list[LibraryRule], list[str]]:
    """Start a job for each number of ranks that measures; return the rules, and lines on them.

    Raise InvalidArgument on a busy machine, unless `force`, and if the library follows a file: one
    of the environment variables in `files` is set.
    """
    from ...bench.forced import measure
    from ...interchange.library_rules import MEASURED, of_entry
    from ...launcher.function import run

    library, version = installed.vendor, installed.version
    ranks = sorted(set(ranks))
    names = {name: list(known[name].schedules) for name in _names(collectives, known, library)}
    check_no_file(library, files)
    rules: list[LibraryRule] = []
    wrong: list[str] = []
    hosts: dict[int, str] = {}
    doubts: dict[str, None] = {}
    with progress_bar("measuring", len(ranks)) as advance:
        for n in ranks:
            share = budget / len(ranks)
            limit = 2 * share + START_SECONDS
            found = run(measure, n, library, names, sizes, share, force, timeout=limit)[0]
            if found.busy and not force:
                raise InvalidArgument(
                    f"{'; '.join(found.doubts)}: no file is written, as its choices may be slower "
                    f"than those of {library}.  Measure on a quiet machine, or nevertheless by "
                    "--force"
                )
            doubts |= dict.fromkeys(found.doubts)
            rules += [rule for entry in found.entries for rule in of_entry(entry, MEASURED)]
            wrong += found.wrong
            hosts[n] = f"{found.about['host']}, {counted(found.about['cores'], 'core')}"
            advance(f"measured on {n} ranks")
    if wrong:
        raise click.ClickException(f"wrong results of {library}: {'; '.join(wrong)}")
    return rules, [
        f"rules for {library} {'.'.join(map(str, version))}, measured by mpidist "
        f"{__version__} on {date.today().isoformat()}",
        *(f"{n} ranks on {host}" for n, host in hosts.items()),
        *(f"not to be trusted: {doubt}" for doubt in doubts),
    ]


def check_no_file(library: str, files: Iterable[str]) -> None:
    """Raise InvalidArgument if the environment has the library follow a file already."""
    for name in files:
        if name in os.environ:
            raise InvalidArgument(
                f"{name}={os.environ[name]} is set, so {library} would not make its own choices: "
                f"expected none; unset {name}"
            )


def predicted_rules(
    library: str,
    known: Mapping[str, LibraryCollective],
    collectives: Sequence[str],
    ranks: Sequence[int],
    sizes: Sequence[int],
    model: Mapping[str, float],
    groups: Groups | None = None,
    link: Link | None = None,
) -> tuple[list[LibraryRule], list[str]]:
    """Return the rules that the cost model gives, and lines on them."""
    from ...interchange.library_rules import predicted

    names, ranks = _names(collectives, known, library), sorted(set(ranks))
    schedules = {name: known[name].schedules for name in names}
    if not collectives:
        counts = {name: sum(o is not None for o in of.values()) for name, of in schedules.items()}
        schedules = {name: of for name, of in schedules.items() if counts[name] > 1}
    total = sum(
        len(ranks) * len(sizes) * sum(o is not None for o in of.values())
        for of in schedules.values()
    )
    rules: list[LibraryRule] = []
    with progress_bar("simulating", total) as advance:
        for name, of in schedules.items():
            for n in ranks:
                where = [0] if name == "barrier" else sizes
                rules += predicted(name, of, n, where, model, advance, groups, link)
    constants = ", ".join(f"{name} {value:g} s" for name, value in model.items())
    return rules, [
        f"rules for {library}, predicted by mpidist {__version__} on {date.today().isoformat()}",
        f"cost model of one message at a time for each rank: {constants}; no call was measured",
    ]


def _names(
    collectives: Sequence[str], known: Mapping[str, LibraryCollective], library: str
) -> list[str]:
    from ...interchange.library_rules import collective_of

    for name in collectives:
        collective_of(name, known, library)
    return list(dict.fromkeys(collectives)) or [*known]


def check(
    library: str, rules: Sequence[LibraryRule], environment: Mapping[str, str]
) -> list[InForce]:
    """Start a job with the file, and one without it, for each number of ranks; compare the bits."""
    from ...bench.forced import InForce, sum_bits
    from ...launcher.function import run

    found: list[InForce] = []
    for n in dict.fromkeys(rule.ranks for rule in rules):
        without = run(sum_bits, n, library, rules, timeout=START_SECONDS)[0]
        with _environ(environment):
            within = run(sum_bits, n, library, rules, timeout=START_SECONDS)[0]
        found += map(InForce, within, without)
    return found


@contextmanager
def _environ(more: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in more}
    os.environ.update(more)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            os.environ.update({} if value is None else {name: value})


def print_rules(console: Console, rules: Sequence[LibraryRule]) -> None:
    """Print rules as a table."""
    columns: list[Column | str] = [*map(Column.names, ("collective", "algorithm"))]
    heads = ("ranks", "from", "to", "times as fast")
    table = make_table(console, *columns, *map(Column.numbers, heads), Column.names("basis"))
    for rule in rules:
        low, high = (f"{gain:.2f}" for gain in rule.gains)
        table.add_row(
            *(rule.collective, rule.algorithm, str(rule.ranks)),
            *(round_size(rule.first), round_size(rule.last)),
            *(low if low == high else f"{low}-{high}", rule.basis),
        )
    show(console, table)


def finish(
    library: str,
    rules: Sequence[LibraryRule],
    output: str,
    write: Callable[[], Any],
    environment: Mapping[str, str],
    checked: bool,
) -> int:
    """Print the rules, write the file, check it if that is wanted; return the exit code."""
    console = make_console()
    if not rules:
        console.print(
            f"nothing is faster than the choices of {library} beyond the noise: {output} is not "
            "written"
        )
        return 0
    print_rules(console, rules)
    write()
    variables = " ".join(f"{name}={value}" for name, value in environment.items())
    console.print(f"{counted(len(rules), 'rule')} written to {output}; in force by:\n{variables}")
    if not checked:
        return 0
    found = check(library, rules, environment)
    table = make_table(
        console,
        *map(Column.names, ("collective", "algorithm")),
        *map(Column.numbers, ("ranks", "bytes")),
        *map(Column.names, ("in force", "same bits")),
    )
    for line in found:
        rule, others = line.within.rule, line.others
        table.add_row(
            *(rule.collective, rule.algorithm, str(rule.ranks), str(line.within.nbytes)),
            *(str(line), ", ".join(others) or "no other"),
        )
    show(console, table)
    unseen = sorted({r.collective for r in rules} - {line.within.rule.collective for line in found})
    if unseen:
        console.print(f"no bits can show it: {', '.join(unseen)} sum nothing")
    return 0 if all(line.holds for line in found) else 1
