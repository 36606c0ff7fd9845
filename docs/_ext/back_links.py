"""A Sphinx extension: the links from the listings of the sources back to the pages.

viewcode takes it that all names of a module are documented under one prefix.  Here some are
documented as ``mpidist.shard`` and others as ``mpidist.data.Order``, so some of its links would
lead nowhere.
"""

from __future__ import annotations

import re
from typing import Any

LINK = re.compile(r'<a class="viewcode-back" href="[^"#]*#(?P<name>[^"]*)">\[docs\]</a>')


def correct(app: Any, pagename: str, _template: str, context: dict[str, Any], _tree: Any) -> None:
    """Replace the links of a listing by those to the documented names; drop those without one."""
    if not pagename.startswith("_modules/mpidist/") or "body" not in context:
        return
    module = pagename.removeprefix("_modules/").replace("/", ".")
    objects = app.env.domains["py"].objects

    def link(match: re.Match[str]) -> str:
        parts = match["name"].split(".")
        ends = [".".join(parts[k:]) for k in range(1, len(parts))]
        names = [f"{prefix}.{end}" for end in ends for prefix in (module, "mpidist")]
        for name in [match["name"], *names]:
            found = objects.get(name)
            if found and not found.aliased:
                page = app.builder.get_relative_uri(pagename, found.docname)
                return f'<a class="viewcode-back" href="{page}#{found.node_id}">[docs]</a>'
        return ""

    context["body"] = LINK.sub(link, context["body"])


def setup(app: Any) -> dict[str, Any]:
    """Correct each listing before it is written."""
    app.connect("html-page-context", correct)
    return {"parallel_read_safe": True}
