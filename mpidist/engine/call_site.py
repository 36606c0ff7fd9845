"""The place in the user's program where a call was made."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep


_WRAPPERS = ("contextlib", "functools", "typing_extensions", "warnings")


class _Within(dict[str, bool]):
    """Whether a source file, the key, belongs to this package, to PyTorch, or to `_WRAPPERS`.

    Those are the modules whose functions stand between PyTorch's and the user's in a call.
    """

    def __missing__(self, filename: str) -> bool:
        torch = getattr(sys.modules.get("torch"), "__file__", None)  # loaded if a file of it runs
        packages = PACKAGE if torch is None else (PACKAGE, str(Path(torch).parent) + os.sep)
        wrappers = [getattr(sys.modules.get(name), "__file__", None) for name in _WRAPPERS]
        self[filename] = filename.startswith(packages) or filename in wrappers
        return self[filename]


WITHIN = _Within()


def users_frame(frame: FrameType) -> FrameType:
    """Return the innermost frame, from `frame` outwards, of neither this package nor PyTorch."""
    while WITHIN[frame.f_code.co_filename] and frame.f_back is not None:
        frame = frame.f_back
    return frame


_BEGUN = threading.local()  # site: where the operation was begun that this thread performs


def begun_here(act: Callable[[], object]) -> Callable[[], None]:
    """Return a function that calls `act`, in which :func:`call_site` is that of this call.

    It may be called in another thread, or where the operation is waited for.
    """
    site = call_site()

    def performed() -> None:
        _BEGUN.site = site
        try:
            act()
        finally:
            _BEGUN.site = None

    return performed


def call_site() -> str:
    """Return "FILE:LINE" of the innermost frame outside this package and PyTorch.

    In a function of :func:`begun_here`, it is the place where that was made.
    """
    begun = getattr(_BEGUN, "site", None)
    if begun is not None:
        return begun
    frame = users_frame(sys._getframe(1))
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
