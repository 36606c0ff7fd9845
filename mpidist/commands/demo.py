"""``mpidist demo``: train on digits, then compare every allreduce on the gradients."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..measure import counted, format_size
from ..schedule.registry import reserved
from .bench.benchmark import on_step, print_results, watched
from .console import examples, make_console, progress_bar
from .options import (
    CALLED,
    OUTPUT,
    PAGE,
    Count,
    Seconds,
    algorithm_names,
    byte_count,
    load_option,
)

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

    from ..bench import Results
    from ..demo import DemoResult


@click.command(
    "demo",
    short_help="Train on real digits on all ranks, then compare every allreduce.",
    epilog=examples(
        "mpidist run -n 4 -- mpidist demo",
        "mpidist run -n 4 -- mpidist demo --report report.html --epochs 40",
    ),
)
@click.option(
    "--epochs", type=Count(), default=20, show_default=True, help="Passes over the digits."
)
@click.option(
    "--seed",
    default=0,
    show_default=True,
    help="Seed of the initial weights and of the order of the digits.",
)
@click.option(
    "--algorithm",
    type=algorithm_names(["allreduce"], *reserved(), one=True),
    default="auto",
    show_default=True,
    help="Algorithm of the training's allreduce.",
)
@click.option(
    "--algorithms",
    type=algorithm_names(["allreduce"], *CALLED),
    help="Algorithms to compare; by default all.",
)
@click.option(
    "--bytes-limit",
    type=byte_count(least=4),
    help="Compare on at most this many bytes of gradients.",
)
@click.option(
    "--budget",
    type=Seconds(),
    default=3.0,
    show_default=True,
    help="Seconds for the comparison.",
)
@click.option("--report", type=PAGE, metavar="FILE", help="Write an HTML page, with plots.")
@click.option("--json", "json_file", type=OUTPUT, metavar="FILE", help="Write the results as JSON.")
@load_option
def demo_command(
    epochs: int,
    seed: int,
    algorithm: str,
    algorithms: tuple[str, ...] | None,
    bytes_limit: int | None,
    budget: float,
    report: str | None,
    json_file: str | None,
) -> int:
    """Train a classifier of handwritten digits on all ranks, then compare every allreduce.

    The exit code is 1 if the replicas are not bit-identical, if loss and accuracy are not those of
    one process, or if an allreduce of the model's gradients has a wrong result, or different bits
    on different ranks (which the MPI library's own may have).
    """
    import mpidist

    from ..demo import train
    from ..demo.comparison import compare, comparison_steps, same_bits

    comm = mpidist.init()
    console = make_console()
    _log_epochs(comm.rank, console)
    result = train(comm, epochs=epochs, seed=seed, algorithm=algorithm, console=_live())
    if comm.rank == 0:
        _print_training(console, result)
    gradients = result.gradients[: None if bytes_limit is None else bytes_limit // 4]
    machine = watched(comm)
    total = comparison_steps(gradients, algorithms, budget)
    with progress_bar("measuring", total):
        results = compare(comm, gradients, algorithms, budget, on_step(total))
    machine.end(results)
    same = same_bits(results)
    if comm.rank == 0:
        _print_comparison(console, results, gradients, same)
        if json_file:
            results.save(json_file)
        if report:
            _write_report(report, result, results)
    return 0 if result.passed and results.correct and same else 1


def _write_report(path: str, result: DemoResult, results: Results) -> None:
    """Write the HTML page of the demo's results to a file."""
    from ..bench.report import demo_page

    Path(path).write_text(demo_page(result, results), encoding="utf-8")
    click.echo(f"report: {path}")


def _live() -> Console:
    """Return the console of the progress bar, on standard error; quiet without a terminal."""
    from rich.console import Console

    console = make_console(stderr=True)
    return console if console.is_terminal else Console(quiet=True)


def _log_epochs(rank: int, console: Console) -> None:
    """Let rank 0 print a line after each epoch if there is no terminal for a bar."""
    if rank or console.is_terminal:
        return
    log = logging.getLogger("mpidist.demo")
    if not log.handlers:
        log.addHandler(logging.StreamHandler())
    log.setLevel(logging.INFO)


def _print_training(console: Console, result: DemoResult) -> None:
    """Print loss and accuracy of the training, and whether they match one process."""
    good, bad = "[green]yes[/]", "[bold red]NO[/]"
    console.print(
        f"{counted(result.ranks, 'rank')}, layers "
        f"{'-'.join(map(str, result.layers))}, {result.parameters:,} parameters, "
        f"{counted(result.epochs, 'epoch')} of {result.train_samples} digits, "
        f"{result.seconds:.1f} s ({result.sync_seconds:.1f} s of it for gradients)"
    )
    console.print(
        f"loss {result.losses[-1]:.6g}, test accuracy {100 * result.accuracy:.2f} % "
        f"of {result.test_samples} test digits"
    )
    console.print(f"replicas bit-identical: {good if result.identical else bad}")
    if result.matches is not None and result.reference_accuracy is not None:
        console.print(
            f"as in one process: {good if result.matches else bad} (loss "
            f"{result.reference_losses[-1]:.6g}, accuracy {100 * result.reference_accuracy:.2f} %, "
            f"largest difference of losses {result.max_loss_difference:.1e})"
        )


def _print_comparison(
    console: Console, results: Results, gradients: np.ndarray, same: bool
) -> None:
    """Print the times of every allreduce on the gradients, and whether a check of bits failed."""
    console.print(
        f"\nEvery allreduce on the {gradients.size:,} gradients "
        f"({format_size(gradients.nbytes)} bytes, float32); correct: within the rounding of the sum"
    )
    print_results(results, console)
    if not same:
        console.print("[bold red]an algorithm of mpidist did not give every rank the same bits[/]")
