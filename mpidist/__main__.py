"""Entry point of ``python -m mpidist``, the same as the command ``mpidist``."""

from .cli import main

main(prog_name="mpidist")
