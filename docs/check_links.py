"""Check the links of the built pages: ``python docs/check_links.py docs/_build/html``.

Every link and picture of a page must lead to a file that exists, and every fragment (``#name``) to
an element of that file.  Links to other sites are not followed.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LINKS = {"a": "href", "link": "href", "img": "src", "script": "src", "object": "data"}


class Page(HTMLParser):
    """The identifiers of a page and the links in it, each with its line."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.names = {"", "top"}
        self.links: list[tuple[int, str]] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record the identifier and the link of an element."""
        found = dict(attrs)
        self.names |= {found[key] or "" for key in ("id", "name") if key in found}
        if tag in LINKS and LINKS[tag] in found:
            self.links.append((self.getpos()[0], found[LINKS[tag]] or ""))


def dead_links(folder: Path) -> list[str]:
    """Return a line for each link that leads nowhere."""
    pages = {path.resolve(): Page(path) for path in sorted(folder.rglob("*.html"))}
    dead = []
    for path, page in pages.items():
        for line, link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            where = f"{path.relative_to(folder.resolve())}:{line}: {link}"
            if not target.is_file():
                dead.append(f"{where}: no such file")
            elif target in pages and unquote(parts.fragment) not in pages[target].names:
                dead.append(f"{where}: no such anchor")
    return dead


def main() -> int:
    """Print the dead links; return 1 if there are any, 2 without pages."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/_build/html")
    pages = len(list(folder.rglob("*.html")))
    if not pages:
        sys.stderr.write(f"{folder}: no pages: run make docs\n")
        return 2
    dead = dead_links(folder)
    sys.stdout.write("".join(f"{line}\n" for line in dead))
    sys.stdout.write(f"{pages} pages, {len(dead)} dead links\n")
    return 1 if dead else 0


if __name__ == "__main__":
    raise SystemExit(main())
