"""``python -m mpidist``."""

from .cli import main

main(prog_name="mpidist")
