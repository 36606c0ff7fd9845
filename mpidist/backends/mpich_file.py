"""MPICH's own file in ``/dev/shm``: its name goes as soon as every rank has it mapped.

MPICH 5 keeps the name until ``MPI_Finalize``, so each job that is killed would leave 2 MiB and more
behind.  Nothing opens the file again once ``MPI_Init`` has returned on all ranks.
"""

from __future__ import annotations

import os
from contextlib import suppress

_BEGINNING = "/dev/shm/mpich_shm_"


def take_name_away() -> None:
    """Remove the name of what MPICH has mapped here; to be called when all ranks have started."""
    for path in _mapped():
        with suppress(OSError):  # another rank was the first
            os.unlink(path)


def _mapped() -> set[str]:
    """Give the files of MPICH that this process has mapped and that still have a name."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
            paths = {line.split(maxsplit=5)[-1].strip() for line in lines if _BEGINNING in line}
    except OSError:
        return set()
    return {path for path in paths if not path.endswith(" (deleted)")}
