"""Shared memory of the ranks of a node: symmetric arrays, and executors of collectives in it.

============  ==============================================================================
executors     slots (``staged``), single_copy; in_place: what ``symmetric`` needs; host
kernels       kernel (phases), fold (combine), barrier, conditional (skippable actions)
memory        heap: symmetric arrays, the staging slots and the words of the barriers
run           steps: a kernel as steps of compiled code
C code        compiled (ctypes bindings), compiled.c, steps.c, module.c
============  ==============================================================================

The engine lists the executors and runs their programs.
"""

from ..calls.arrays import check_shape
from .heap import Heap, Location
from .in_place import NEEDS, location_of, memory_key

__all__ = [
    "NEEDS",
    "Heap",
    "Location",
    "check_shape",
    "location_of",
    "memory_key",
]
