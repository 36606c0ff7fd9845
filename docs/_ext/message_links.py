"""A Sphinx extension: each message of the troubleshooting page shows the link to itself."""

from __future__ import annotations

from typing import Any

from docutils import nodes


def complete(app: Any, document: nodes.document) -> None:
    """Add the link to the first cell of each row of a table, to the id that it has."""
    if app.env.docname != "troubleshooting":
        return
    for row in document.findall(nodes.row):
        message = next(row.findall(nodes.paragraph))
        if message["ids"]:
            link = nodes.reference("", "¶", refid=message["ids"][0], classes=["headerlink"])
            message += [nodes.Text(" "), link]


def setup(app: Any) -> dict[str, Any]:
    """Complete the page after it was read."""
    app.connect("doctree-read", complete)
    return {"parallel_read_safe": True}
