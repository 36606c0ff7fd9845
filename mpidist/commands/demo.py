"""``mpidist demo``: the main job, then every allreduce on its gradients."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console

from ..bench.cases import BARE
from ..errors import InvalidArgument
from ..measure import format_size
from .bench import header, print_results
from .console import examples, make_console, measuring
from .options import Names, Size, check_files, load_option

NATIVE = (BARE, "native")  # whose bits are reported, not promised


@click.command(
    "demo",
    short_help="Train on real digits on all ranks, then compare every allreduce.",
    epilog=examples(
        "mpidist run -n 4 -- mpidist demo",
        "mpidist run -n 4 -- mpidist demo --report report.html --epochs 40",
    ),
)
@click.option("--epochs", default=20, show_default=True, help="Passes over the digits.")
@click.option("--seed", default=0, show_default=True, help="Of the weights and the order.")
@click.option("--algorithm", default="auto", show_default=True, help="Of the training's allreduce.")
@click.option("--algorithms", type=Names(), help="To be compared; by default all.")
@click.option("--bytes-limit", type=Size(), help="Compare on so many bytes of gradients at most.")
@click.option("--budget", default=3.0, show_default=True, help="Seconds for the comparison.")
@click.option(
    "--report", type=click.Path(), metavar="FILE", help="Write a page of HTML, with plots."
)
@click.option(
    "--json", "json_file", type=click.Path(), metavar="FILE", help="Write the comparison."
)
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
    imports: Any,
) -> int:
    """Train a classifier of handwritten digits on all ranks, then compare every allreduce on it.

    Checked are that the replicas are bit-identical, that loss and accuracy are those of one
    process, and every result of every allreduce of the model's gradients.  The exit code is 1
    otherwise.
    """
    import mpidist

    from ..demo import train

    check_files(json_file, report=report)
    if bytes_limit is not None and bytes_limit < 4:
        raise InvalidArgument(f"--bytes-limit {bytes_limit}: allowed are 4 bytes and more")
    comm = mpidist.init()
    console = make_console()
    say_progress(comm.rank, console)
    result = train(comm, epochs=epochs, seed=seed, algorithm=algorithm, console=live())
    if comm.rank == 0:
        print_training(console, result)
    gradients = result.gradients[: None if bytes_limit is None else bytes_limit // 4]
    results = compare(comm, gradients, algorithms, budget)
    same = all(results.identical[name] for name in results.identical if name not in NATIVE)
    if comm.rank == 0:
        print_comparison(console, results, gradients, same)
        if json_file:
            results.save(json_file)
        if report:
            write_report(report, result, results)
    return 0 if result.passed and results.correct and same else 1


def compare(comm: Any, gradients: np.ndarray, algorithms: Any, budget: float) -> Any:
    """Measure every allreduce on the gradients."""
    from ..bench import Settings, measure, steps

    settings = Settings(
        sizes=[gradients.nbytes], algorithms=algorithms, budget=budget, data=gradients, bits=True
    )
    with measuring(steps(["allreduce"], settings)) as step:
        results = measure(comm, ["allreduce"], settings, step)
    results.header = header(comm, results)
    return results


def write_report(path: str, result: Any, results: Any) -> None:
    """Write the page of HTML."""
    from ..bench.report import demo_page

    Path(path).write_text(demo_page(result, results), encoding="utf-8")
    click.echo(f"report: {path}")


def live() -> Console | None:
    """Give the terminal for live progress; None where there is none: then the log tells."""
    console = make_console(stderr=True)
    return console if console.is_terminal else Console(quiet=True)


def say_progress(rank: int, console: Console) -> None:
    """Where there is no terminal, print the epochs as lines."""
    if rank or console.is_terminal:
        return
    log = logging.getLogger("mpidist.demo")
    if not log.handlers:
        log.addHandler(logging.StreamHandler())
    log.setLevel(logging.INFO)


def print_training(console: Console, result: Any) -> None:
    """Print how the training went, and whether it was right."""
    good, bad = "[green]yes[/]", "[bold red]NO[/]"
    console.print(
        f"{result.ranks} rank{'s' * (result.ranks > 1)}, layers "
        f"{'-'.join(map(str, result.layers))}, {result.parameters:,} parameters, "
        f"{result.epochs} epochs of {result.train_samples} digits, "
        f"{result.seconds:.1f} s ({result.sync_seconds:.1f} s of it for gradients)"
    )
    console.print(
        f"loss {result.losses[-1]:.6g}, test accuracy {100 * result.accuracy:.2f} % "
        f"of {result.test_samples} digits never seen"
    )
    console.print(f"replicas bit-identical: {good if result.identical else bad}")
    if result.matches is not None:
        console.print(
            f"as in one process: {good if result.matches else bad} (loss "
            f"{result.reference_losses[-1]:.6g}, accuracy {100 * result.reference_accuracy:.2f} %, "
            f"largest difference of losses {result.max_loss_difference:.1e})"
        )


def print_comparison(console: Console, results: Any, gradients: np.ndarray, same: bool) -> None:
    """Print the one table: every allreduce on the model's gradients."""
    console.print(
        f"\nEvery allreduce on the {gradients.size:,} gradients "
        f"({format_size(gradients.nbytes)} bytes, float32); right: within the rounding of the sum"
    )
    print_results(results, console)
    if not same:
        console.print("[bold red]an algorithm of ours did not give every rank the same bits[/]")
