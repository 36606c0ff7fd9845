"""The exception that ends a rank, as text for the user.

Standard library only: ``launcher/rank_program.py`` loads this file alone, before any package.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FULL_TRACEBACK = "MPIDIST_FULL_TRACEBACK"
NOTES = "MPIDIST_RUN_NOTES"  # as in launcher_notes.py
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_BESIDE = ("<frozen runpy>", "/runpy.py", "/mpi4py/__main__.py", "/mpi4py/run.py")
_RUNNERS = (*_BESIDE, f"{_PACKAGE}launcher/rank_program.py")


def describe(kind: Any, error: Any, trace: Any, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the texts of an exception: "kind" (its class), "line" (class and message), "text".

    The last is the traceback, as :func:`written` returns it.
    """
    last = traceback.format_exception_only(kind, error)
    line = next((line for line in last if not line.startswith(" ")), kind.__name__)
    return {
        "kind": kind.__name__,
        "line": line.strip().partition("\n")[0].removeprefix(f"{kind.__module__}."),
        "text": written(kind, error, of_the_program(trace), environ),
    }


def of_the_program(trace: Any) -> Any:
    """Return a traceback without its first frames: runpy, mpi4py, ``mpidist run``."""
    left = trace
    while left is not None and left.tb_frame.f_code.co_filename.endswith(_RUNNERS):
        left = left.tb_next
    return trace if left is None else left


def written(kind: Any, error: Any, trace: Any, environ: Mapping[str, str]) -> str:
    """Return a traceback as text, without the frames inside mpidist that the program called.

    ``MPIDIST_FULL_TRACEBACK=1`` keeps them.  A traceback that has no other frames keeps them too.
    """
    told = traceback.TracebackException(kind, error, trace)
    cut, chain, seen = 0, [told], set()
    while chain and environ.get(FULL_TRACEBACK, "") in ("", "0"):
        part = chain.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        chain += [other for other in (part.__cause__, part.__context__) if other is not None]
        outside = [frame for frame in part.stack if not frame.filename.startswith(_PACKAGE)]
        if outside:
            cut += len(part.stack) - len(outside)
            part.stack = traceback.StackSummary.from_list(outside)
    text = "".join(told.format())
    if cut:
        frames = f"{cut} frame{'s' * (cut > 1)}"
        how = "mpidist run --full-traceback" if NOTES in environ else f"{FULL_TRACEBACK}=1"
        text += f"({frames} inside mpidist left out; {how} shows them)\n"
    return text
