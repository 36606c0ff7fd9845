"""Ask the CUDA driver for a GPU: `make test-gpu` begins with it, before anything is installed.

    python tests/gpu_here.py 12     # or 13: the CUDA that cupy will be made for

Status 1, and why, if there is none.  Standard library only.
"""

from __future__ import annotations

import ctypes
import sys

LIBRARY = "libcuda.so.1"
ELSE = (
    "Nothing was installed or tested.  `make test` runs what can be run without one, on a device "
    "that is emulated"
)


def driver(library: str = LIBRARY) -> tuple[int, int] | str:
    """Give the number of GPUs and the newest CUDA that the driver knows, or why there is none."""
    try:
        cuda = ctypes.CDLL(library)
    except OSError as error:
        return f"there is no CUDA driver: {error}"
    count, version = ctypes.c_int(), ctypes.c_int()
    for call, arguments in (
        (cuda.cuInit, (0,)),
        (cuda.cuDeviceGetCount, (ctypes.byref(count),)),
        (cuda.cuDriverGetVersion, (ctypes.byref(version),)),
    ):
        if status := call(*arguments):
            return f"{call.__name__} of the CUDA driver gives status {status}"
    return (count.value, version.value // 1000) if count.value else "the CUDA driver shows none"


def main(wanted: int, library: str = LIBRARY) -> str | None:
    """Say what is wrong, or nothing."""
    found = driver(library)
    if isinstance(found, str):
        return f"no GPU here: {found}.  {ELSE}"
    count, newest = found
    print(f"{count} GPU{'s' * (count > 1)}; the driver knows CUDA {newest}")
    if newest < wanted:
        return f"cupy for CUDA {wanted} needs a newer driver: make test-gpu CUDA={newest}"
    return None


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
