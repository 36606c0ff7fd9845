"""How much of the communication is hidden behind a backward that leaves the cores free.

Each rank is on a node of its own.  Prints what a thread, and what "auto" hid, in percent.
"""

import sys

import mpidist
from mpidist.bench.training import overlaps, waiting


def main():
    comm = mpidist.init(timeout=30.0)
    assert comm.topology.num_nodes == comm.size == 2
    rows = overlaps(comm, 6, "training", waiting, autos=1)
    found = {row.name: row.hidden for row in rows}
    if comm.rank == 0:
        auto = next(name for name in found if name.startswith("auto"))
        print(f"{auto}: {100 * found[auto]:.0f}, thread: {100 * found['thread']:.0f}")


if __name__ == "__main__":
    sys.exit(main())
