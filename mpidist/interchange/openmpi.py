"""Open MPI's rules for its component ``tuned``: the classic text below 6, and JSON from 6 on.

Read by ``coll_tuned_dynamic_file.c``.  The classic text is one of whole numbers in nested counts::

    collectives { collective, numbers of ranks { ranks, rules { bytes, algorithm, fan, segment } } }

A set of rules holds up to the next number of ranks, the first also below its own; algorithm 0 is
the library's own choice.  So sets with it stand on both sides, and no other communicator of the job
changes.  The reader of 6.0 moves the sets of a classic text by one: it gets JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from ..errors import Unsupported
from .library_rules import LibraryCollective, LibraryRule, check_rules, collective_of

# Algorithms in the order of their numbers, which begin with 1; with our schedule of each.
COLLECTIVES = {
    "allgather": LibraryCollective(
        "allgather",
        {
            "linear": None,
            "bruck": "bruck",
            "recursive_doubling": "recursive_doubling",
            "ring": "ring",
            "neighbor": "neighbor_exchange",
            "two_proc": None,
            "sparbit": None,
        },
        0,
    ),
    "allreduce": LibraryCollective(
        "allreduce",
        {
            "basic_linear": "linear",
            "nonoverlapping": "binomial",
            "recursive_doubling": "recursive_doubling",
            "ring": "ring",
            "segmented_ring": None,
            "rabenseifner": "rabenseifner",
        },
        2,
    ),
    "alltoall": LibraryCollective(
        "alltoall",
        {
            "linear": "linear",
            "pairwise": "pairwise",
            "modified_bruck": "bruck",
            "linear_sync": None,
            "two_proc": None,
        },
        3,
    ),
    "barrier": LibraryCollective(
        "barrier",
        {
            "linear": "linear",
            "double_ring": None,
            "recursive_doubling": None,
            "bruck": "dissemination",
            "two_proc": None,
            "tree": "tree:2",
        },
        6,
    ),
    "broadcast": LibraryCollective(
        "bcast",
        {
            "basic_linear": "linear",
            "chain": None,
            "pipeline": "chain",
            "split_binary_tree": None,
            "binary_tree": "tree:2",
            "binomial": "binomial",
            "knomial": None,
            "scatter_allgather": None,
            "scatter_allgather_ring": "scatter_allgather",
        },
        7,
    ),
    "gather": LibraryCollective(
        "gather", {"basic_linear": "linear", "binomial": "binomial", "linear_sync": None}, 9
    ),
    "reduce": LibraryCollective(
        "reduce",
        {
            "linear": "linear",
            "chain": None,
            "pipeline": None,
            "binary": "tree:2",
            "binomial": "binomial",
            "in-order_binary": None,
            "rabenseifner": "reduce_scatter_gather",
        },
        11,
    ),
    # Of equal parts: MPI_Reduce_scatter_block.
    "reduce_scatter": LibraryCollective(
        "reduce_scatter_block",
        {
            "basic_linear": "linear",
            "recursive_doubling": None,
            "recursive_halving": "recursive_halving",
            "butterfly": None,
        },
        13,
    ),
    "scatter": LibraryCollective(
        "scatter", {"basic_linear": "linear", "binomial": "binomial", "linear_nb": None}, 15
    ),
}
COMMUTATIVE = {
    "allreduce": ("ring", "segmented_ring"),
    "reduce": ("chain", "pipeline", "binary", "binomial"),
}
"""Algorithms that combine in another order than that of the ranks, also operations that are not
commutative, where a rule names them: with those their results are wrong, without a word."""
VERSIONS = (4, 5, 6)
"""Major versions whose format is known."""
CLASSIC_BELOW = 6
_CHAINS = 4  # of algorithm "chain": coll_tuned_init_chain_fanout, with which a forced one runs
_VALUES = "coll_tuned_use_dynamic_rules", "coll_tuned_dynamic_rules_filename"


def number(collective: str, algorithm: str) -> int:
    """Return the number of an algorithm, as rules and MCA parameters have it."""
    return 1 + [*COLLECTIVES[collective].schedules].index(algorithm)


def algorithms(collectives: Iterable[str], commutative: bool) -> dict[str, LibraryCollective]:
    """Return collectives with their algorithms; without `commutative` those for every operation."""
    found = {}
    for name in collectives:
        known = collective_of(name, COLLECTIVES, "Open MPI")
        left_out = () if commutative else COMMUTATIVE.get(name, ())
        kept = {n: ours for n, ours in known.schedules.items() if n not in left_out}
        found[name] = replace(known, schedules=kept)
    return found


def check_version(version: int) -> None:
    """Raise Unsupported unless the rules of this major version of Open MPI are known."""
    if version not in VERSIONS:
        raise Unsupported(
            f"Open MPI {version}: its rules are not known; expected version "
            f"{', '.join(map(str, VERSIONS))}"
        )


def environment(path: str) -> dict[str, str]:
    """Return the environment variables with which Open MPI follows the rules of a file."""
    return {f"OMPI_MCA_{name}": value for name, value in zip(_VALUES, ("1", path))}


def export_openmpi(rules: Sequence[LibraryRule], version: int, about: Sequence[str] = ()) -> str:
    """Return rules as a file for a major version of Open MPI: classic text, or JSON from 6 on.

    Parameters
    ----------
    rules : sequence of LibraryRule
        Rules that do not overlap.  Where there is none, the library chooses.
    version : int
        Major version: 4, 5 or 6.
    about : sequence of str
        Lines on the machine, the library and the date; those of the rules follow them.

    Raises
    ------
    Unsupported
        If the version's format is not known.
    InvalidArgument
        If Open MPI has no such collective or algorithm.
    """
    check_version(version)
    check_rules(rules, COLLECTIVES, "Open MPI")
    about = [*about, *map(_warning, filter(_commutes, rules))]
    ordered = sorted(rules, key=lambda r: (COLLECTIVES[r.collective].number, r.ranks, r.first))
    if version < CLASSIC_BELOW:
        return _classic(ordered, about)
    return _json(ordered, about)


def _commutes(rule: LibraryRule) -> bool:
    return rule.algorithm in COMMUTATIVE.get(rule.collective, ())


def _warning(rule: LibraryRule) -> str:
    return (
        f"{rule.collective} on {rule.ranks} ranks by {rule.algorithm}: WRONG RESULTS with "
        "operations that are not commutative"
    )


def _classic(rules: Sequence[LibraryRule], about: Sequence[str]) -> str:
    use = " ".join(f"--mca {name} {value}" for name, value in zip(_VALUES, ("1", "FILE")))
    lines = [f"# {line}" for line in (*about, "for Open MPI below 6", f"mpirun {use}")]
    every = [(name, list(of)) for name, of in groupby(rules, lambda r: r.collective)]
    lines.append(f"{len(every)}  # collectives")
    for name, of_collective in every:
        collective = COLLECTIVES[name]
        sets = _sets(of_collective)
        lines += ["", f"{collective.number}  # {collective.name}", f"{len(sets)}  # sets of rules"]
        for ranks, inside in sets:
            rows = _rows(inside)
            lines += [f"{ranks}  # ranks", f"{len(rows)}  # rules"]
            lines += [
                f"{' '.join(map(str, row))}{f'  # {rule}' * bool(rule)}" for row, rule in rows
            ]
    return "\n".join(lines) + "\n"


def _sets(rules: Iterable[LibraryRule]) -> list[tuple[int, list[LibraryRule]]]:
    """Return (ranks, rules) of one collective in the order of ranks, with empty ones between."""
    sets: dict[int, list[LibraryRule]] = {}
    for ranks, inside in groupby(rules, lambda r: r.ranks):
        if not sets and ranks > 1:
            sets[1] = []
        sets[ranks] = list(inside)
        sets[ranks + 1] = []
    return list(sets.items())


def _rows(rules: Sequence[LibraryRule]) -> list[tuple[tuple[int, ...], LibraryRule | None]]:
    """Return the numbers of each rule of one set, from 0 bytes on, with the rule they stand for."""
    rows: dict[int, tuple[tuple[int, ...], LibraryRule | None]] = {0: ((0, 0, 0, 0), None)}
    for rule in rules:
        which = number(rule.collective, rule.algorithm)
        rows[rule.first] = (rule.first, which, _fan(rule.algorithm), 0), rule
        rows[rule.last + 1] = (rule.last + 1, 0, 0, 0), None
    return list(rows.values())


def _fan(algorithm: str) -> int:
    return _CHAINS if algorithm == "chain" else 0


def _json(rules: Sequence[LibraryRule], about: Sequence[str]) -> str:
    collectives: dict[str, list[dict[str, Any]]] = {}
    for (name, ranks), inside in groupby(rules, lambda r: (r.collective, r.ranks)):
        collectives.setdefault(COLLECTIVES[name].name, []).append(
            {
                **{"comm_size_min": ranks, "comm_size_max": ranks},
                "comm_rank_distribution": "any",
                "rules": [
                    {
                        **{"msg_size_min": rule.first, "msg_size_max": rule.last},
                        "alg": rule.algorithm,
                        **{"faninout": _fan(rule.algorithm), "seg_size": 0, "reqs": 0},
                    }
                    for rule in inside
                ],
            }
        )
    # Its reader asks for the keys that it knows, so one more may hold the comment.
    head = {"rule_file_version": 3, "module": "tuned", "about": [*about, *map(str, rules)]}
    return json.dumps(head | {"collectives": collectives}, indent=1) + "\n"
