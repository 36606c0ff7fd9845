"""The command line: the group ``mpidist`` of all commands."""

from __future__ import annotations

import click

from . import __version__
from .commands.bench import bench_command
from .commands.console import examples
from .commands.demo import demo_command
from .commands.explain import explain_command
from .commands.info import info_command
from .commands.list import list_command
from .commands.main import Main
from .commands.prove import prove_command
from .commands.run import run_command
from .commands.show import show_command
from .commands.tune import tune_command


@click.group(
    cls=Main,
    epilog=examples(
        "mpidist run -n 4 -- mpidist demo   train on real digits, compare every allreduce",
        "mpidist list                       every algorithm",
        "mpidist show allreduce ring        one of them as a picture",
        "mpidist run -n 4 train.py          your own script on 4 ranks",
    ),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, message="mpidist %(version)s")
def main() -> None:
    """Distributed training with MPI: collectives, data parallelism, pipelines."""


for _command in (
    info_command,
    list_command,
    show_command,
    prove_command,
    bench_command,
    tune_command,
    demo_command,
    explain_command,
    run_command,
):
    main.add_command(_command)
