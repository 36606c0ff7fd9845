"""Rules for Open MPI's component ``han``: by nodes, or all ranks alike, on several nodes.

``han`` reduces in each node and then between their leaders; in its place a rule can name ``tuned``,
which knows no nodes.  Read by ``coll_han_dynamic_file.c``, in nested counts::

    collectives { collective, levels { level, sets { ranks, rules { bytes, component } } } }

The last rule whose ranks and bytes are not beyond counts, so the first of each are 1 and 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from .library_rules import LibraryCollective, LibraryRule, check_rules

# `tuned` chooses further: the fastest of these.  Bytes are those of the whole buffer; of an
# allgather han would count the part of one rank.
COLLECTIVES = {
    "allreduce": LibraryCollective(
        "allreduce",
        {
            "han": "hierarchical_leaders",
            "tuned": ("recursive_doubling", "ring", "rabenseifner"),
        },
    ),
    "broadcast": LibraryCollective(
        "bcast", {"han": "hierarchical_leaders", "tuned": ("binomial", "scatter_allgather")}
    ),
    "reduce": LibraryCollective(
        "reduce", {"han": "hierarchical_leaders", "tuned": ("binomial", "reduce_scatter_gather")}
    ),
}
LEVEL = "global_communicator"
_NUMBERS = {"bcast": 7, "allreduce": 2, "reduce": 11}
_LEVEL = 2
_VALUES = "coll_han_use_dynamic_file_rules", "coll_han_dynamic_rules_filename"
_USUAL = "han"  # what serves such a communicator without a rule


def environment(path: str) -> dict[str, str]:
    """Return the environment variables with which Open MPI follows the rules of a file."""
    return {f"OMPI_MCA_{name}": value for name, value in zip(_VALUES, ("true", path))}


def export_han(rules: Sequence[LibraryRule], about: Sequence[str] = ()) -> str:
    """Return rules as a file for Open MPI's component ``han``.

    Parameters
    ----------
    rules : sequence of LibraryRule
        Rules of the components "han" and "tuned", for all ranks of a communicator on several nodes.
        Where there is none, "han" serves.
    about : sequence of str
        Lines on the machine, the library and the date.

    Raises
    ------
    InvalidArgument
        If there are no such rules for a collective, or no such component.
    """
    check_rules(rules, COLLECTIVES, "Open MPI's han")
    use = " ".join(f"--mca {name} {value}" for name, value in zip(_VALUES, ("true", "FILE")))
    lines = [f"# {line}" for line in (*about, "for Open MPI 5", f"mpirun {use}")]
    ordered = sorted(rules, key=lambda rule: (rule.collective, rule.ranks, rule.first))
    every = [(name, list(of)) for name, of in groupby(ordered, lambda rule: rule.collective)]
    lines.append(f"{len(every)}  # collectives")
    for name, of_collective in every:
        sets: dict[int, list[LibraryRule]] = {1: []}
        for ranks, of_ranks in groupby(of_collective, lambda rule: rule.ranks):
            sets |= {ranks: list(of_ranks), ranks + 1: []}
        collective = COLLECTIVES[name].name
        lines += ["", f"{_NUMBERS[collective]}  # {collective}", "1  # level"]
        lines += [f"{_LEVEL}  # {LEVEL}", f"{len(sets)}  # sets of rules"]
        for ranks, inside in sets.items():
            rows: dict[int, str] = {0: _USUAL}
            for rule in inside:
                rows[rule.first] = f"{rule.algorithm}  # {rule}"
                rows[rule.last + 1] = _USUAL
            lines += [f"{ranks}  # ranks", f"{len(rows)}  # rules"]
            lines += [f"{first} {component}" for first, component in rows.items()]
    return "\n".join(lines) + "\n"
