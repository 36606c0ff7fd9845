"""Write rules for the MPI library here, start jobs with them, and print what the bits say."""

import sys
from pathlib import Path

import mpidist
from mpidist.bench.forced import own_tree
from mpidist.commands.export.library import check
from mpidist.interchange import mpich, openmpi
from mpidist.interchange.library_rules import MEASURED, LibraryRule
from mpidist.launcher.mpi import find_library


def main(path: str, ranks: int, written: int) -> None:
    """Check rules for `ranks` ranks, where the file is for as many as are `written`."""
    library = find_library().vendor
    rows = (
        ("allreduce", 1024, 8191, "ring"),
        ("allreduce", 8192, 65535, "recursive_doubling"),
        ("reduce", 4096, 65535, "binomial"),
        ("reduce_scatter", 65536, 1 << 20, "recursive_halving"),
    )

    def rules_for(ranks: int) -> list[LibraryRule]:
        return [LibraryRule(c, ranks, a, b, name, MEASURED, (1.5, 1.5)) for c, a, b, name in rows]

    rules = rules_for(written)
    if library == "MPICH":
        text, environment = (
            mpich.export_mpich(rules, mpidist.run(own_tree, 1)[0]),
            mpich.environment(path),
        )
    else:
        text, environment = openmpi.export_openmpi(rules, 5), openmpi.environment(path)
    Path(path).write_text(text, encoding="utf-8")
    for line in check(library, rules_for(ranks), environment):
        where = line.within.rule.collective, line.within.rule.algorithm, line.within.nbytes
        print(*where, str(line).replace(" ", "-"))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
