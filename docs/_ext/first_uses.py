"""A Sphinx extension: the first use of a glossary's term on a page is a link to it.

Only terms whose plain word has no other sense are linked; :data:`AMBIGUOUS` has the others, which
a page links by ``:term:`` where it means them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref

GLOSSARY = "glossary"
# fmt: off
AMBIGUOUS = frozenset((
    "size", "root", "step", "round", "block", "segment", "contract", "reduce", "broadcast",
    "scatter", "gather", "tree", "ring", "direct", "linear", "ordered", "native", "staged",
    "program", "kernel", "pending", "leader", "stage", "F", "B", "I", "W", "α", "β", "γ",
))
# fmt: on
# Text in these is not prose, or a link already.
NOT_IN = (nodes.literal, nodes.reference, pending_xref, nodes.emphasis, nodes.math, nodes.caption)


def terms_of(source: str) -> list[str]:
    """Return the terms that the text of the glossary's page defines."""
    return re.findall(r"^   (?! |:)(\S.*)$", source.partition(".. glossary::")[2], re.MULTILINE)


def link_terms(document: nodes.document, page: str, terms: Iterable[str]) -> None:
    """Link the first use of each unambiguous term in the paragraphs of a page."""
    left = {term.lower(): term for term in terms if term not in AMBIGUOUS}
    while left:
        words = "|".join(map(re.escape, sorted(left, key=len, reverse=True)))
        pattern = re.compile(rf"(?<![\w-])({words})s?(?![\w-])", re.IGNORECASE)
        found = next(_matches(document, pattern), None)
        if found is None:
            break
        text, match = found
        _link(text, match, left.pop(match[1].lower()), page)


def _matches(
    document: nodes.document, pattern: re.Pattern[str]
) -> Iterator[tuple[nodes.Text, re.Match[str]]]:
    for paragraph in document.findall(nodes.paragraph):
        for text in paragraph.findall(nodes.Text):
            match = pattern.search(text.astext())
            if match and not _inside(text, paragraph):
                yield text, match


def _inside(text: nodes.Text, paragraph: nodes.paragraph) -> bool:
    node: Any = text.parent
    while node is not paragraph:
        if isinstance(node, NOT_IN):
            return True
        node = node.parent
    return False


def _link(text: nodes.Text, match: re.Match[str], term: str, page: str) -> None:
    whole = text.astext()
    link = pending_xref(
        "",
        nodes.inline("", match[0], classes=["xref", "std", "std-term"]),
        **{"refdomain": "std", "reftype": "term", "reftarget": term},
        **{"refdoc": page, "refexplicit": True, "refwarn": True},
    )
    parts = [nodes.Text(whole[: match.start()]), link, nodes.Text(whole[match.end() :])]
    text.parent.replace(text, [part for part in parts if part.astext()])


def complete(app: Any, document: nodes.document) -> None:
    """Link the terms of a user's page: one at the top of docs, but not the glossary."""
    page = app.env.docname
    if "/" not in page and page != GLOSSARY:
        glossary = str(app.env.doc2path(GLOSSARY))
        link_terms(document, page, terms_of(Path(glossary).read_text(encoding="utf-8")))
        app.env.note_dependency(glossary)


def setup(app: Any) -> dict[str, Any]:
    """Complete each page after it was read."""
    app.connect("doctree-read", complete)
    return {"parallel_read_safe": True}
