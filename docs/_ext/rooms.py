"""A Sphinx extension: the rooms of the package, drawn from the layers that `make lint` checks.

``.. rooms::`` is replaced by a picture of the layers in setup.cfg, each with the first line of its
docstring, so that the picture cannot differ from the code.
"""

from __future__ import annotations

import ast
import configparser
import re
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive

ROOT = Path(__file__).resolve().parents[2]
CONTRACT = "importlinter:contract:rooms"
WIDTH, HEIGHT, NAME = 880, 30, 200


def layers() -> list[list[str]]:
    """Return the layers of the package from top to bottom, each a list of modules."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    lines = settings[CONTRACT]["layers"].split("\n")
    return [[name.strip() for name in line.replace(":", "|").split("|")] for line in lines if line]


def summary(module: str) -> str:
    """Return the first line of the docstring of a module of mpidist."""
    place = ROOT / "mpidist" / module
    path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    found = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    return re.sub(r":\w+:`|`", "", found.split("\n")[0]).rstrip(".")


def picture() -> str:
    """Return the layers as SVG: a module may import those below it."""
    rows = [name for layer in layers() for name in layer]
    parts = []
    at = 4
    for layer in layers():
        height = HEIGHT * len(layer)
        parts.append(
            f'<rect x="4" y="{at}" width="{WIDTH - 8}" height="{height}" rx="4" '
            'fill="var(--color-background-secondary)" stroke="var(--color-foreground-border)"/>'
        )
        for number, name in enumerate(layer):
            y = at + HEIGHT * number + 20
            parts.append(f'<text x="16" y="{y}" font-weight="bold">{escape(name)}</text>')
            parts.append(f'<text x="{NAME}" y="{y}">{escape(summary(name))}</text>')
        at += height + 4
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {at}" role="img" '
        f'font-family="sans-serif" font-size="13" fill="var(--color-foreground-primary)">'
        f"<title>{len(rows)} rooms; imports go down only</title>{''.join(parts)}</svg>"
    )


class Rooms(Directive):
    """The picture, in the page."""

    def run(self) -> list[nodes.Node]:
        """Return the picture as raw HTML."""
        return [nodes.raw("", picture(), format="html")]


def setup(app: Any) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("rooms", Rooms)
    return {"parallel_read_safe": True}
