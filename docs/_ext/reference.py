"""Parts of the documentation made from the code: the commands' help, the fields of the settings."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator

WIDTH = {"terminal_width": 90, "max_content_width": 90}  # the same wherever the pages are built


def row(*cells: str) -> Iterator[str]:
    """Return one row of a list table."""
    for number, cell in enumerate(cells):
        yield f"   {' ' if number else '*'} - {cell}"


def command_sections() -> str:
    """Return a section with the help of every command, as ``--help`` prints it."""
    import click

    from mpidist.cli import main

    def sections(name: str, command: click.Command, parent: click.Context | None) -> Iterator[str]:
        settings = {**command.context_settings, **WIDTH}
        context = click.Context(command, info_name=name, parent=parent, **settings)
        title = context.command_path
        shown = textwrap.indent(click.unstyle(command.get_help(context)), "   ")
        yield f"{title}\n{'-' * len(title)}\n\n::\n\n{shown}\n"
        for below in command.list_commands(context) if isinstance(command, click.Group) else ():
            yield from sections(below, command.get_command(context, below), context)

    return "\n".join(sections("mpidist", main, None))


def settings_table() -> str:
    """Return the fields of the configuration: name, variable, default, meaning."""
    from mpidist.selection.config import ENVIRONMENT_PREFIX, FIELDS, CollectiveConfig

    lines = [".. list-table::", "   :header-rows: 1", "   :widths: 22 28 14 36", ""]
    lines += row("field", "environment variable", "default", "meaning")
    default, meanings = CollectiveConfig(), field_meanings(CollectiveConfig)
    for name in FIELDS:
        value = getattr(default, name)
        shown = str(value) if isinstance(value, str) else repr(value)
        variable = ENVIRONMENT_PREFIX + name.upper()
        lines += row(f"``{name}``", f"``{variable}``", f"``{shown}``", meanings[name])
    return "\n".join(lines) + "\n"


def shared_table() -> str:
    """Give, by collective, which array is to be symmetric and the bytes for which "auto" acts."""
    from mpidist.selection.rules import RULES, Place
    from mpidist.shared_memory.in_place import NEEDS

    lines = [".. list-table::", "   :header-rows: 1", "   :widths: 24 28 24 24", ""]
    lines += row("collective", "what must be symmetric", '``"auto"`` from', "ranks > cores: from")
    for collective in RULES:
        need = f"``{NEEDS[collective]}``" if collective in NEEDS else "nothing"
        starts = []
        for crowded in (False, True):
            rules = [r for r in RULES[collective] if r.at(Place(2, 1, crowded))]
            found = [r for r in rules if r.choose == "symmetric"]
            starts += [_bytes(rule.start) for rule in found[:1]]
        if starts:
            lines += row(collective, need, *starts)
    return "\n".join(lines) + "\n"


def _bytes(number: float) -> str:
    """Return a size as the pages do; the odd byte of a limit that is included is left out."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if number >= unit:
            return f"{number // unit:g} {name}"
    return "every size" if number == 0 else f"{number:g} B"


def field_meanings(documented: type) -> dict[str, str]:
    """Read the section ``Parameters`` of a numpydoc docstring: the text under each name."""
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
