"""``mpidist prove``: proofs of algorithms and pipeline schedules, for given numbers of ranks."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from ..errors import UnknownName
from ..foreign import shown
from ..measure import counted
from ..schedule.contract import COLLECTIVES
from ..tables import Column
from .console import examples, make_console, make_table, progress_bar, show
from .options import (
    COLLECTIVE_NAMES,
    PIPELINE_NAMES,
    Count,
    algorithm_names,
    check_algorithm,
    check_only,
    complete,
    integer_ranges,
    load_option,
    names_of_algorithms,
    naming,
    only,
    pipeline_schedule,
)
from .proved import earlier, keep

if TYPE_CHECKING:
    from rich.console import Console

    from ..pipeline.schedules.sweep import PipelineProofRow
    from ..schedule.needless import Needless
    from ..schedule.sweep import Row

ALL = "all"
RANKS, PIPELINE_RANKS = range(1, 34), range(1, 9)  # by default
ALGORITHMS = "algorithms of collectives"  # uses of options
PIPELINES = "pipeline schedules (--pipeline)"
WHAT = "COLLECTIVE | ALGORITHM | FILE.xml | PLAN.json"


def _complete(
    context: click.Context, argument: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return a shell's completions: collectives, and the algorithms of those that are given."""
    given = [word for word in context.params.get("words") or () if word in COLLECTIVES]
    return complete((*COLLECTIVES, *names_of_algorithms(given, one_sided=True)), incomplete)


@click.command(
    "prove",
    short_help="Prove algorithms, or pipeline schedules, for 1 to 33 ranks or others.",
    epilog=examples(
        "mpidist prove",
        "mpidist prove --ranks 1-128 --jobs 2",
        "mpidist prove allreduce ring in_place",
        "mpidist prove allreduce tree --arity 2,5 --ranks 7,12",
        "mpidist prove --import mine.py --algorithm mine",
        "mpidist prove ring.xml",
        "mpidist prove plan.json --needless",
        "mpidist prove --pipeline",
        "mpidist prove --pipeline 1f1b,zb-v --ranks 1-16 --microbatches 1-64",
    ),
)
@only(
    ALGORITHMS,
    click.argument("words", nargs=-1, metavar=f"[{WHAT}]...", shell_complete=_complete),
)
@click.option(
    "--ranks",
    "--stages",
    type=integer_ranges(1),
    help="Numbers of ranks, such as 2,5 or 1-8; for pipelines by default 1-8, for a FILE.xml its "
    "own.  [default: 1-33]",
)
@only(
    ALGORITHMS,
    click.option(
        "--collective",
        type=COLLECTIVE_NAMES,
        help="The same as COLLECTIVE, with commas between them.",
    ),
    click.option(
        "--algorithm",
        type=algorithm_names(one_sided=True),
        help="The same as ALGORITHM, with commas between them.  tree:4 is the tree of arity 4.",
    ),
    click.option(
        "--arity",
        type=integer_ranges(2),
        default="2,3,4,8",
        show_default=True,
        help="Arities of trees.",
    ),
)
@click.option(
    "--pipeline",
    type=PIPELINE_NAMES,
    is_flag=False,
    flag_value=ALL,
    metavar="[NAMES]",
    help="Prove pipeline schedules: all, or these.  FILE.py:NAME (or MODULE:NAME) is a generator "
    "of your own.",
)
@only(
    PIPELINES,
    click.option(
        "--microbatches",
        type=integer_ranges(1),
        default="1-16",
        show_default=True,
        help="Pipelines: numbers of microbatches.",
    ),
    click.option(
        "--chunks",
        type=integer_ranges(1),
        help="Pipelines: numbers of chunks on a rank, for schedules that serve any; by default "
        "1-3.",
    ),
)
@only(
    ALGORITHMS,
    click.option("--jobs", type=Count(), help="Processes; by default one for each core."),
    click.option("--again", is_flag=True, help="Also prove what an earlier run has proved."),
    click.option(
        "--needless",
        is_flag=True,
        help="Also leave out each meeting, signal and message without blocks, and name those that "
        "nothing needs.",
    ),
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@load_option
@click.pass_context
def prove_command(
    context: click.Context,
    words: tuple[str, ...],
    ranks: list[int] | None,
    collective: tuple[str, ...] | None,
    algorithm: tuple[str, ...] | None,
    arity: list[int],
    pipeline: tuple[str, ...] | None,
    microbatches: list[int],
    chunks: list[int] | None,
    jobs: int | None,
    again: bool,
    needless: bool,
    as_json: bool,
) -> int:
    """Prove each ALGORITHM of each COLLECTIVE (by default all), for each of the numbers of --ranks.

    Each proof is for one number of ranks, one root and one grouping of the ranks into nodes; it
    says nothing about other numbers.  All ranks run symbolically, and all roots together; the
    seconds of a row are CPU time.  A proof shows that no rank
    deadlocks, that every contribution arrives exactly once, and, where the algorithm claims it,
    that operands combine in rank order.  A counter-example names rank, round and block; the exit
    code is then 1.  The algorithm of an MSCCL file, FILE.xml, is proved as it stands and as rounds;
    an execution plan of MSCCL++, PLAN.json, over two launches, with all races of thread blocks.

    What has been proved is remembered in $XDG_CACHE_HOME/mpidist (by default ~/.cache/mpidist)
    until the sources of the algorithms or of the prover change, and not proved twice without
    --again.  Algorithms of your own, and whatever is proved beside them, are proved each time.

    With --needless, every algorithm in shared memory is proved again without each of its meetings
    and messages without blocks, and a plan without each signal and its wait, semaphore, barrier and
    flush.  What is still proved is named: it could be left out.

    With --pipeline, each proof is for one number of ranks and one of microbatches.  It shows that
    every microbatch passes through every stage once, in an order that cannot deadlock, and that no
    message is taken for another.  A counter-example names rank, stage and step.
    """
    from ..pipeline.schedules import sweep as pipelines
    from ..schedule.sweep import sweep

    print_rows: Callable[..., None]
    rows: list[Any] = []
    spare: list[Needless] | None = None
    begun = perf_counter()
    if pipeline is not None:
        check_only(context, PIPELINES)
        with naming("--pipeline"):
            named = None if pipeline == (ALL,) else list(map(pipeline_schedule, pipeline))
        sizes = ranks or list(PIPELINE_RANKS)
        with progress_bar("proving") as advance:
            rows = [*pipelines.sweep(sizes, microbatches, chunks, named, _on_proof(advance))]
        print_rows = _print_pipelines
    else:
        check_only(context, ALGORITHMS)
        plans = [word for word in words if word.endswith(".json")]
        given, sizes = _imported([word for word in words if word not in plans])
        chosen = _named(given, collective or (), algorithm or ())
        sizes = ranks or sizes or list(RANKS)
        if plans and ranks:
            raise click.UsageError("--ranks: a plan is for its own number of GPUs")
        others = not plans or given or collective or algorithm
        for name, option in (
            ("arity", "--arity"),
            ("jobs", "--jobs"),
            ("again", "--again"),
            ("imports", "--import"),
        ):
            source = context.get_parameter_source(name)
            if not others and source is ParameterSource.COMMANDLINE:
                raise click.UsageError(f"{option}: only for {ALGORITHMS}, not for a plan")
        if others:
            kept = None if again else earlier()
            known = {} if kept is None else kept[2]
            number = len(known)
            with progress_bar("proving") as advance:
                rows = [*sweep(sizes, *chosen, arity, jobs, _on_proof(advance), known)]
            if kept is not None and len(known) > number:
                keep(*kept)
        rows.sort(key=lambda row: list(COLLECTIVES).index(row.collective))
        if needless:
            spare = [s for row in rows if row.proved for s in _needless(row, arity[0])]
        for path in plans:
            row, more = _plan(path, needless)
            rows.append(row)
            spare = None if spare is None else spare + more
        print_rows = _print_algorithms
    seconds = perf_counter() - begun
    if as_json:
        report = as_dict(rows, seconds)
        if spare is not None:
            report["needless"] = [dataclasses.asdict(each) for each in spare]
        click.echo(json.dumps(report, indent=1))
    else:
        console = make_console()
        print_rows(console, rows, seconds)
        if spare is not None:
            _print_needless(console, spare)
    return 0 if all(row.proved for row in rows) else 1


def _needless(row: Row, arity: int) -> list[Needless]:
    """Return what an algorithm could do without, for the sizes of its row."""
    from ..schedule.needless import find_needless

    return find_needless(row.collective, row.name, row.sizes, arity)


def _plan(path: str, needless: bool) -> tuple[Row, list[Needless]]:
    """Prove a plan of MSCCL++; return its row, and if asked the words that it could do without."""
    from ..errors import ScheduleError
    from ..interchange.mscclpp.kernels import needless_words, prove_plan
    from ..interchange.mscclpp.plan import read_plan
    from ..schedule.needless import Needless
    from ..schedule.sweep import Row

    with naming(WHAT):
        plan = read_plan(path)
    name = shown(" ".join(Path(path).name.split()))
    begun, size, label = process_time(), len(plan.gpus), (plan.collective, name)
    messages, fault, found = 0, None, []
    try:
        messages = prove_plan(plan).messages
    except ScheduleError as error:
        fault = str(error).removeprefix(f"{plan.what}: ")
    row = Row(*label, (size,), (), 1, 1, messages, process_time() - begun, fault)
    if needless and fault is None:
        with progress_bar("proving") as advance:
            texts = needless_words(plan, _on_proof(advance))
        found = [Needless(*label, text, (size,)) for text in texts]
    return row, found


def _print_needless(console: Console, spare: list[Needless]) -> None:
    for each in spare:
        line = f"needless: {each.collective} {each.name}: {each.what}, on {spans(each.sizes)} "
        console.print(line + "ranks: it is proved without", markup=False, style="yellow")
    if not spare:
        console.print("nothing can be left out")


def _imported(words: Sequence[str]) -> tuple[list[str], list[int]]:
    """Register the MSCCL files among the words; return names in their place, and their ranks.

    A word that is the name of an algorithm is none of a file.
    """
    known = names_of_algorithms(COLLECTIVES, one_sided=True)
    named, sizes = [], []
    for word in words:
        if word.endswith(".xml") and word not in known:
            from ..interchange.msccl.algorithm import import_msccl

            with naming(WHAT):
                found = import_msccl(word)
            named += [found.algorithm.collective, found.algorithm.name]
            sizes.append(found.proof.size)
        else:
            named.append(word)
    return named, sorted(set(sizes))


def _named(
    words: Sequence[str], collectives: Sequence[str], names: Sequence[str]
) -> tuple[list[str] | None, list[str] | None]:
    """Return the collectives and the algorithms among the words and the options; None for all."""
    found = list(dict.fromkeys((*filter(COLLECTIVES.__contains__, words), *collectives)))
    others = [word for word in words if word not in COLLECTIVES]
    known = names_of_algorithms(found or COLLECTIVES, one_sided=True)
    with naming(WHAT):
        for name in others:
            try:
                check_algorithm(name, found or COLLECTIVES, known)
            except UnknownName:
                kinds = ["algorithm"] if not found else [f"{each} algorithm" for each in found]
                raise UnknownName(
                    " or ".join(["collective", *kinds]), name, [*COLLECTIVES, *known]
                ) from None
    return found or None, [*dict.fromkeys((*others, *names))] or None


def _on_proof(advance: Callable[..., None]) -> Callable[[int, int, str], None]:
    """Return a callback (done, total, label): it advances a bar to `done` of `total` proofs."""
    return lambda done, total, label: advance(f"proving {label}", done, total)


def spans(numbers: tuple[int, ...]) -> str:
    """Return whole numbers as short text: ``1-4, 7``, or ``2, 4, … 32`` for equal steps above 1."""
    parts: list[list[int]] = []
    step = numbers[1] - numbers[0] if len(numbers) > 3 else 1
    if step > 1 and list(numbers) == list(range(numbers[0], numbers[-1] + 1, step)):
        return f"{numbers[0]}, {numbers[1]}, … {numbers[-1]}"
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def as_dict(rows: Sequence[Any], seconds: float) -> dict[str, Any]:
    """Return the rows and their totals as a dict, for ``--json``."""
    return {
        "proved": all(row.proved for row in rows),
        "proofs": sum(row.proofs for row in rows),
        "messages": sum(row.messages for row in rows),
        "seconds": round(seconds, 3),
        "rows": [dataclasses.asdict(row) | {"proved": row.proved} for row in rows],
    }


def _print_pipelines(console: Console, rows: list[PipelineProofRow], seconds: float) -> None:
    """Print a row for each schedule, the counter-examples, and the totals."""
    from rich.text import Text

    heads = (Column.names("pipeline"), "chunks", "ranks", "microbatches")
    figures = map(Column.numbers, ("proofs", "messages", "most\noutstanding", "s"))
    table = make_table(console, *heads, *figures, "proved")
    for row in rows:
        table.add_row(
            Text(row.name),
            spans(row.chunks),
            spans(row.sizes) or "none",
            spans(row.microbatches) or "none",
            f"{row.proofs:,}",
            f"{row.messages:,}",
            str(row.outstanding),
            f"{row.seconds:.2f}",
            "yes" if row.proved else "NO",
            style=None if row.proved else "bold red",
        )
    show(console, table)
    for row in rows:
        if row.counterexample:
            line = f"counter-example: pipeline schedule {row.name}: {row.counterexample}"
            console.print(line, markup=False, style="red")
    wrong = sum(not row.proved for row in rows)
    proofs = sum(row.proofs for row in rows)
    console.print(
        f"{counted(len(rows), 'schedule')}, {counted(proofs, 'proof')} of "
        f"{counted(sum(row.messages for row in rows), 'message')} in {seconds:.1f} s: "
        + (f"{wrong} NOT proved" if wrong else "all proved")
    )


def _print_algorithms(console: Console, rows: list[Row], seconds: float) -> None:
    """Print a row for each algorithm, the counter-examples, and the totals."""
    from rich.text import Text

    heads = (Column.names("collective"), Column.names("algorithm"), "ranks")
    figures = map(Column.numbers, ("proofs", "messages", "s"))
    table = make_table(console, *heads, *figures, "proved")
    for row in rows:
        notes = f" (not {spans(row.refused)})" if row.refused and row.sizes else ""
        table.add_row(
            row.collective,
            Text(row.name),
            (spans(row.sizes) or "none") + notes,
            f"{row.proofs:,}",
            f"{row.messages:,}",
            f"{row.seconds:.2f}",
            "yes" if row.proved else "NO",
            style=None if row.proved else "bold red",
        )
    show(console, table)
    for row in rows:
        if not row.proved:
            console.print(
                f"counter-example: {row.collective} {row.name}: {row.counterexample}",
                markup=False,
                style="red",
            )
    before = sum(row.before for row in rows)
    wrong = sum(not row.proved for row in rows)
    console.print(
        f"{counted(len(rows), 'algorithm')}, "
        f"{counted(sum(row.proofs for row in rows), 'proof')} of "
        f"{counted(sum(row.messages for row in rows), 'message')} in {seconds:.1f} s: "
        + (f"{wrong} NOT proved" if wrong else "all proved")
        + (f"; an earlier run had {before:,} of these proofs" if before else "")
    )
