"""``mpidist bench torch``: collectives of torch.distributed, and training steps over them."""

from __future__ import annotations

import click

from ..console import examples, progress_bar
from ..options import SIZES, Count, check_not_given
from .collectives import files_options, report_results, watched

STEPS = ("fsdp2", "tensor_parallel")  # of bench.torch, not imported here


@click.command(
    "torch",
    short_help="Measure torch.distributed over mpidist beside gloo.",
    epilog=examples(
        "mpidist run -n 2 -- mpidist bench torch all_reduce --bytes 4,64K,4M",
        "mpidist run -n 2 -- mpidist bench torch --step fsdp2 --step tensor_parallel",
    ),
)
@click.argument(
    "collectives",
    nargs=-1,
    type=click.Choice(["all_reduce", "all_gather", "broadcast"]),
    metavar="[COLLECTIVE]...",
)
@click.option(
    "--bytes",
    "sizes",
    type=SIZES,
    default="4,1K,64K,1M,4M,16M",
    show_default=True,
    help="Sizes of the whole buffer.",
)
@click.option(
    "--step",
    "steps",
    multiple=True,
    type=click.Choice(STEPS),
    help="Training step to measure in place of collectives; may be repeated.",
)
@click.option(
    "--width",
    "widths",
    multiple=True,
    type=Count(),
    default=(256, 512),
    show_default=True,
    help="With --step: width of the model; may be repeated.",
)
@click.option(
    "--layers", type=Count(), default=4, show_default=True, help="With --step: layers of the model."
)
@click.option(
    "--samples",
    type=Count(),
    default=8,
    show_default=True,
    help="With --step: samples of a batch, of 32 words each for fsdp2.",
)
@click.option(
    "--iterations",
    type=Count(),
    default=15,
    show_default=True,
    help="Timed blocks of calls, or steps.",
)
@click.option(
    "--way",
    "ways",
    type=click.Choice(["blocking", "async_op", "functional", "queued"]),
    multiple=True,
    default=("blocking", "async_op"),
    show_default=True,
    help="How the collectives are called: async_op is followed by wait(); functional is the call "
    "of DTensor and tensor parallelism; queued are up to 100 of async_op before the first wait(). "
    "May be given several times.",
)
@files_options
@click.pass_context
def torch_command(
    context: click.Context,
    collectives: tuple[str, ...],
    sizes: list[int],
    steps: tuple[str, ...],
    widths: tuple[int, ...],
    layers: int,
    samples: int,
    iterations: int,
    ways: tuple[str, ...],
    json_file: str | None,
    csv_file: str | None,
) -> int:
    """Measure collectives of torch.distributed with the backend "mpidist", and with gloo.

    COLLECTIVE is all_reduce, all_gather or broadcast; by default all three.  The candidates take
    turns; "x gloo" is the time of gloo, called in the same way, divided by this time: above 1 is
    faster.  The exit code is 1 if any result was wrong.

    With --step, training steps: fsdp2 (transformer layers, fully_shard), tensor_parallel (an MLP,
    parallelize_module), over mpidist, over gloo and without communication.  A result is right if
    the steps changed the parameters as they do on one rank with the whole batch.
    """
    if steps:
        check_not_given(context, ("collectives", "sizes", "ways"), "collectives, without --step")
    else:
        check_not_given(context, ("widths", "layers", "samples"), "training steps, with --step")
    import mpidist

    from ...bench.training import NO_TORCH, ranks_have
    from ...errors import Unsupported

    comm = mpidist.init()
    if not ranks_have(comm, "torch", "torch.distributed"):
        raise Unsupported(NO_TORCH)
    from ...bench.torch import Scale, measure_torch, measure_torch_steps

    machine = watched(comm)
    if steps:
        scales = [Scale(width, layers, samples) for width in widths]
        with progress_bar("measuring"):
            results = measure_torch_steps(comm, steps, scales, iterations)
    else:
        results = measure_torch(comm, collectives, sizes, iterations, ways)
    machine.end(results)
    if comm.rank == 0:
        report_results(results, json_file, csv_file)
    return 0 if results.correct else 1
