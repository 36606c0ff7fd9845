"""``mpidist bench torch``: collectives of torch.distributed, and training steps over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from ..console import examples
from ..options import SIZES, Count, check_only, only
from .benchmark import benchmark, device_option

CALLS, TRAINING = "collectives, without --step", "training steps, with --step"
STEPS = ("fsdp2", "tensor_parallel")  # of bench.torch, not imported here

if TYPE_CHECKING:
    from ...bench import Results
    from ...communicator.communicator import Communicator


@click.command(
    "torch",
    short_help="Measure torch.distributed over mpidist beside gloo.",
    epilog=examples(
        "mpidist run -n 2 -- mpidist bench torch all_reduce --bytes 4,64K,4M",
        "mpidist run -n 2 -- mpidist bench torch --step fsdp2 --step tensor_parallel",
        "mpidist run -n 2 -- mpidist bench torch --device cuda all_reduce --bytes 64K,64M",
    ),
)
@only(
    CALLS,
    click.argument(
        "collectives",
        nargs=-1,
        type=click.Choice(["all_reduce", "all_gather", "broadcast"]),
        metavar="[COLLECTIVE]...",
    ),
    click.option(
        "--bytes",
        "sizes",
        type=SIZES,
        default="4,1K,64K,1M,4M,16M",
        show_default=True,
        help="Sizes of the whole buffer.",
    ),
)
@click.option(
    "--step",
    "steps",
    multiple=True,
    type=click.Choice(STEPS),
    help="Training step to measure in place of collectives; may be repeated.",
)
@only(
    TRAINING,
    click.option(
        "--width",
        "widths",
        multiple=True,
        type=Count(),
        default=(256, 512),
        show_default=True,
        help="With --step: width of the model; may be repeated.",
    ),
    click.option(
        "--layers",
        type=Count(),
        default=4,
        show_default=True,
        help="With --step: layers of the model.",
    ),
    click.option(
        "--samples",
        type=Count(),
        default=8,
        show_default=True,
        help="With --step: samples of a batch, of 32 words each for fsdp2.",
    ),
)
@device_option
@click.option(
    "--iterations",
    type=Count(),
    default=15,
    show_default=True,
    help="Timed blocks of calls, or steps.",
)
@only(
    CALLS,
    click.option(
        "--way",
        "ways",
        type=click.Choice(["blocking", "async_op", "functional", "queued"]),
        multiple=True,
        default=("blocking", "async_op"),
        show_default=True,
        help="How the collectives are called: async_op is followed by wait(); functional is the "
        "call of DTensor and tensor parallelism; queued are up to 100 of async_op before the first "
        "wait(). May be given several times.",
    ),
)
@click.pass_context
@benchmark
def torch_command(
    context: click.Context,
    collectives: tuple[str, ...],
    sizes: list[int],
    steps: tuple[str, ...],
    widths: tuple[int, ...],
    layers: int,
    samples: int,
    device: str,
    iterations: int,
    ways: tuple[str, ...],
) -> Callable[[Communicator], Results]:
    """Measure collectives of torch.distributed with the backend "mpidist", and with gloo.

    COLLECTIVE is all_reduce, all_gather or broadcast; by default all three.  The candidates take
    turns; "x gloo" is the time of gloo, called in the same way, divided by this time: above 1 is
    faster.  The bare mpi4py call, and tensors in symmetric memory, are measured on the CPU only.
    The exit code is 1 if any result was wrong.

    With --step, training steps: fsdp2 (transformer layers, fully_shard), tensor_parallel (an MLP,
    parallelize_module), over mpidist, over gloo and without communication.  A result is right if
    the steps changed the parameters as they do on one rank with the whole batch.
    """
    check_only(context, TRAINING if steps else CALLS)
    from ...bench.training import NO_TORCH, ranks_have
    from ...errors import Unsupported

    def measure(comm: Communicator) -> Results:
        if not ranks_have(comm, "torch", "torch.distributed"):
            raise Unsupported(NO_TORCH)
        from ...bench.torch import Scale, measure_torch, measure_torch_steps

        if steps:
            scales = [Scale(width, layers, samples) for width in widths]
            return measure_torch_steps(comm, steps, scales, iterations, device)
        return measure_torch(comm, collectives, sizes, iterations, ways, device)

    return measure
