"""A Sphinx extension: what the theme leaves out of a page for search engines and screen readers.

That is a description in its head, and the level of the captions in its lists of pages.
"""

from __future__ import annotations

from html import escape
from typing import Any

from docutils import nodes

LENGTH = 160  # characters of a description that search engines show


def description(tree: nodes.document | None, title: str) -> str:
    """Return the page's first paragraph, cut at a word; without one its title."""
    paragraphs = (tree or nodes.section()).findall(nodes.paragraph)
    text = next((p.astext() for p in paragraphs if isinstance(p.parent, nodes.section)), "")
    words = " ".join(text.split()) or f"{title or 'Index'} of mpidist"
    return words if len(words) <= LENGTH else words[:LENGTH].rpartition(" ")[0] + " …"


def complete(
    app: Any, _page: str, _template: str, context: dict[str, Any], tree: nodes.document | None
) -> None:
    """Add the description, and the level without which ``role="heading"`` is none."""
    words = description(tree, context.get("title", ""))
    context["metatags"] = (
        context.get("metatags", "") + f'\n<meta name="description" content="{escape(words)}">'
    )
    for part in ("body", "furo_navigation_tree"):
        if part in context:
            context[part] = context[part].replace(
                '<p class="caption" role="heading">',
                '<p class="caption" role="heading" aria-level="2">',
            )


def setup(app: Any) -> dict[str, Any]:
    """Complete each page after the theme."""
    app.connect("html-page-context", complete, priority=900)
    return {"parallel_read_safe": True}
