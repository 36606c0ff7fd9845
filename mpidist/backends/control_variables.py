"""Control variables of the MPI library: its settings, read and written in the running job.

MPI's tool interface (MPI 5.0, chapter 15) has them; mpi4py does not wrap it.  So its functions are
called in the library that mpi4py has loaded.
"""

from __future__ import annotations

import ctypes
import re
from ctypes import byref, c_int, c_void_p
from functools import lru_cache

from ..errors import Unsupported
from ..foreign import read_file

_TEXT = 8192  # bytes of a name or a description


class ControlVariable:
    """A control variable of the MPI library whose value is a whole number or one of a few names.

    `name` is that of the library, such as ``coll_tuned_allreduce_algorithm``; `values` has the
    numbers by their names, where the library names them.  Raises Unsupported if it has no such
    variable.
    """

    def __init__(self, name: str):
        self.name, index, count = name, c_int(), c_int()
        if _library().MPI_T_cvar_get_index(name.encode(), byref(index)):
            raise Unsupported(f"this MPI library has no control variable {name}")
        self._handle = c_void_p()
        self._check("handle_alloc", index, None, byref(self._handle), byref(count))
        self.values = self._values(index)

    def set(self, value: int) -> None:
        """Set the value on this rank; what has read it before does not change."""
        self._check("write", self._handle, byref(c_int(value)))

    def get(self) -> int:
        """Return the value."""
        value = c_int()
        self._check("read", self._handle, byref(value))
        return value.value

    def _values(self, index: c_int) -> dict[str, int]:
        name, text = (ctypes.create_string_buffer(_TEXT) for _ in range(2))
        name_length, text_length = c_int(_TEXT), c_int(_TEXT)
        level, bind, scope, kind, names = c_int(), c_int(), c_int(), c_void_p(), c_void_p()
        self._check(
            "get_info",
            *(index, name, byref(name_length), byref(level), byref(kind), byref(names)),
            *(text, byref(text_length), byref(bind), byref(scope)),
        )
        if names:
            return _named(names)
        # MPICH numbers the values in the order in which their descriptions begin with the names.
        lines = re.findall(r"^\s*(\w+)\s+- ", text.value.decode(), re.MULTILINE)
        return {value: k for k, value in enumerate(lines)}

    def _check(self, action: str, *arguments: object) -> None:
        error = getattr(_library(), f"MPI_T_cvar_{action}")(*arguments)
        if error:
            raise Unsupported(f"this MPI library refuses {action} of {self.name}: error {error}")


def _named(names: c_void_p) -> dict[str, int]:
    """Return the values of one of the library's enumerations by name."""
    library, count, length = _library(), c_int(), c_int(_TEXT)
    text = ctypes.create_string_buffer(_TEXT)
    if library.MPI_T_enum_get_info(names, byref(count), text, byref(length)):
        return {}
    found = {}
    for k in range(count.value):
        value, length = c_int(), c_int(_TEXT)
        if not library.MPI_T_enum_get_item(names, k, byref(value), text, byref(length)):
            found[text.value.decode()] = value.value
    return found


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    """Return the loaded MPI library, with its tool interface initialized for good."""
    from mpi4py import MPI

    library, provided = ctypes.CDLL(library_path()), c_int()
    try:
        # The level that MPI has: Open MPI would take a lower one for all its calls from now on.
        error = library.MPI_T_init_thread(c_int(MPI.Query_thread()), byref(provided))
    except AttributeError:
        raise Unsupported("this MPI library has no tool interface (MPI_T)") from None
    if error:
        raise Unsupported(f"this MPI library's tool interface cannot be used: error {error}")
    return library


def library_path() -> str:
    """Return the path of the MPI library that mpi4py has loaded; Unsupported if it is not seen."""
    from mpi4py import MPI  # noqa: F401  (loads it)

    maps = read_file("/proc/self/maps").decode(errors="replace")
    found = re.search(r"(/[^\n]*/libmpi(?:ch)?\.so[^\n/]*)$", maps, re.MULTILINE)
    if found is None:
        raise Unsupported("the file of the MPI library is not among those of this process")
    return found[1]
