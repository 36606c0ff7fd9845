"""Parts of the documentation made from the code: the commands' help, the fields of the settings."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator

WIDTH = {"terminal_width": 90, "max_content_width": 90}  # the same wherever the pages are built


def row(*cells: str) -> Iterator[str]:
    """Give one row of a list table."""
    for number, cell in enumerate(cells):
        yield f"   {' ' if number else '*'} - {cell}"


def command_sections() -> str:
    """Give a section with the help of every command, as ``--help`` prints it."""
    import click

    from mpidist.cli import main

    parts = []
    for name, command in [("mpidist", main), *main.commands.items()]:
        title = name if name == "mpidist" else f"mpidist {name}"
        top = click.Context(main, info_name="mpidist", **{**main.context_settings, **WIDTH})
        context = top
        if command is not main:
            settings = {**command.context_settings, **WIDTH}
            context = click.Context(command, info_name=name, parent=top, **settings)
        shown = textwrap.indent(click.unstyle(command.get_help(context)), "   ")
        parts.append(f"{title}\n{'-' * len(title)}\n\n::\n\n{shown}\n")
    return "\n".join(parts)


def settings_table() -> str:
    """Give the fields of the configuration: name, variable, default, meaning."""
    from mpidist.config import ENVIRONMENT_PREFIX, FIELDS, CollectiveConfig

    lines = [".. list-table::", "   :header-rows: 1", "   :widths: 22 28 14 36", ""]
    lines += row("field", "environment variable", "default", "meaning")
    default, meanings = CollectiveConfig(), field_meanings(CollectiveConfig)
    for name in FIELDS:
        value = getattr(default, name)
        shown = str(value) if isinstance(value, str) else repr(value)
        variable = ENVIRONMENT_PREFIX + name.upper()
        lines += row(f"``{name}``", f"``{variable}``", f"``{shown}``", meanings[name])
    return "\n".join(lines) + "\n"


def field_meanings(documented: type) -> dict[str, str]:
    """Read the section ``Parameters`` of a numpydoc docstring: what stands under each name."""
    part = (inspect.getdoc(documented) or "").partition("Parameters\n----------\n")[2]
    meanings: dict[str, list[str]] = {}
    names: list[str] = []
    for line in part.partition("\n\n")[0].splitlines():
        if not line.startswith(" "):
            names = [name.strip() for name in line.partition(" :")[0].split(",")]
            continue
        for name in names:
            meanings.setdefault(name, []).append(line.strip())
    return {name: " ".join(lines) for name, lines in meanings.items()}
