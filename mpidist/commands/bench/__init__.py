"""``mpidist bench``: one subcommand for each benchmark."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

from ...errors import UnknownName
from ...schedule.contract import COLLECTIVES
from ..console import examples
from ..options import complete
from .collectives import collectives_command
from .compare import compare_command
from .ddp import ddp_command
from .gpu import gpu_command
from .overhead import overhead_command
from .pipeline import pipeline_command
from .predict import predict_command
from .scaling import scaling_command
from .torch import torch_command

DEFAULT = "collectives"


class BenchGroup(click.Group):
    """The group of benchmarks, of which ``collectives`` is the default and may be left out."""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the benchmarks, collectives and options of the default that fit `incomplete`."""
        items = [
            *super().shell_complete(ctx, incomplete),
            *complete(COLLECTIVES, incomplete),
            *self.commands[DEFAULT].shell_complete(ctx, incomplete),
        ]
        return list({item.value: item for item in items}.values())  # both have --help

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert ``collectives`` into the arguments if they name no benchmark."""
        first = args[0] if args else None
        if first is not None and first not in (*self.commands, *ctx.help_option_names):
            if not first.startswith("-") and first not in COLLECTIVES:
                raise UnknownName("benchmark", first, [*self.commands, *COLLECTIVES])
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)


@click.group(
    "bench",
    cls=BenchGroup,
    short_help="Measure collectives, training, pipelines and overheads.",
    epilog=examples(
        "mpidist run -n 4 -- mpidist bench allreduce --bytes 8,64K,1M,64M",
        "mpidist run -n 2 -- mpidist bench ddp --overlap",
        "mpidist run -n 2 -- mpidist bench pipeline",
        "mpidist bench compare before.json after.json",
    ),
)
def bench_command() -> None:
    """Measure collectives, training steps, pipelines, and the overhead of mpidist itself.

    `mpidist bench allreduce …` is short for `mpidist bench collectives allreduce …`.
    """


for _command in (
    collectives_command,
    scaling_command,
    gpu_command,
    ddp_command,
    pipeline_command,
    torch_command,
    overhead_command,
    predict_command,
    compare_command,
):
    bench_command.add_command(_command)
