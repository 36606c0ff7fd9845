"""MPICH's selection of algorithms: a tree of conditions in JSON, read by ``csel.c``.

The keys of an object are conditions in their order, the first that holds counts, and a leaf names
an algorithm.  A file *replaces* the library's own tree, for every collective.  So rules are put
into that tree, which the library has in its constants::

    collective=allreduce
      comm_type=intra
        comm_size<4      as before
        comm_size<=4     commutative and built in, one element a rank: by bytes; else as before
        comm_size=any    as before
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from ..errors import InvalidArgument, Unsupported
from ..foreign import read_json
from .library_rules import LibraryCollective, LibraryRule, check_rules

Tree = dict[str, Any]

# Those that need no parameter, and no nodes, besides; with our schedule of each.
COLLECTIVES = {
    "allgather": LibraryCollective(
        "allgather",
        {"brucks": "bruck", "recursive_doubling": "recursive_doubling", "ring": "ring"},
    ),
    "allreduce": LibraryCollective(
        "allreduce",
        {
            "recursive_doubling": "recursive_doubling",
            "reduce_scatter_allgather": "rabenseifner",
            "ring": "ring",
        },
    ),
    "alltoall": LibraryCollective(
        "alltoall", {"brucks": "bruck", "pairwise": "pairwise", "scattered": "linear"}
    ),
    "broadcast": LibraryCollective(
        "bcast",
        {
            "binomial": "binomial",
            "scatter_recursive_doubling_allgather": None,
            "scatter_ring_allgather": "scatter_allgather",
        },
    ),
    "reduce": LibraryCollective(
        "reduce",
        {"binomial": "binomial", "reduce_scatter_gather": "reduce_scatter_gather"},
    ),
    # Of equal parts: MPI_Reduce_scatter_block.
    "reduce_scatter": LibraryCollective(
        "reduce_scatter_block",
        {"recursive_halving": "recursive_halving", "pairwise": None},
    ),
}
POWERS_OF_TWO = {
    "allgather": ("recursive_doubling",),
    "broadcast": ("scatter_recursive_doubling_allgather",),
}
"""Algorithms for a power of two of ranks alone, which a tree would name for others too."""
VERSIONS = ((4, 3), (5, 0))
"""First and last version, major and minor number, whose format and tree are known."""
_FILE = "MPIR_CVAR_COLL_SELECTION_TUNING_JSON_FILE"
_WHOLE = {"allreduce", "bcast", "reduce"}  # avg_msg_size is that of the buffer, which rules have
_MOST = (1 << 31) - 1  # bytes; conditions are read by atoi
_PAGE = 4096


def environment(path: str) -> dict[str, str]:
    """Return the environment variables with which MPICH follows the tree of a file."""
    return {_FILE: path}


def check_version(version: tuple[int, ...]) -> None:
    """Raise Unsupported unless the tree's form in this version of MPICH is known."""
    if not VERSIONS[0] <= version[:2] <= VERSIONS[1]:
        first, last = (".".join(map(str, known)) for known in VERSIONS)
        raise Unsupported(
            f"MPICH {'.'.join(map(str, version)) or 'of an unknown version'}: the form of its "
            f"selection is not known; expected {first} to {last}"
        )


def serves(collective: str, algorithm: str, ranks: int) -> bool:
    """Return whether an algorithm serves this number of ranks."""
    return not ranks & (ranks - 1) or algorithm not in POWERS_OF_TWO.get(collective, ())


def own_tree(library: bytes) -> str:
    """Return the tree of algorithms in the file of an MPICH library, as JSON.

    Raises
    ------
    Unsupported
        If there is none.
    """
    for found in re.finditer(rb'\{"collective=[^\0]*\}(?=\0)', library):
        if b'"algorithm=MPIR_Allreduce_intra_' in found[0]:
            return found[0].decode()
    raise Unsupported("the file of this MPI library has no tree of MPICH's algorithms")


def export_mpich(rules: Sequence[LibraryRule], tree: str) -> str:
    """Return rules as a file for MPICH: its own tree, in JSON, with them in it.

    Parameters
    ----------
    rules : sequence of LibraryRule
        Rules that do not overlap.  Where there is none, and for operations that are not built in,
        or not commutative, the tree is as it was.
    tree : str
        The library's own tree (:func:`own_tree`).

    Raises
    ------
    InvalidArgument
        If MPICH has no such collective or algorithm, or not for these ranks, the tree is none, or a
        rule is for 2 GiB and more.
    """
    check_rules(rules, COLLECTIVES, "MPICH")
    for rule in rules:
        if not serves(rule.collective, rule.algorithm, rule.ranks):
            raise InvalidArgument(f"{rule}: expected a power of two of ranks")
    merged: Tree = read_json(tree, "the tree of MPICH", dict[str, Any])
    ordered = sorted(rules, key=lambda rule: (rule.collective, rule.ranks, rule.first))
    for name, of_collective in groupby(ordered, lambda rule: rule.collective):
        where = merged.get(f"collective={COLLECTIVES[name].name}", {})
        if "comm_type=intra" not in where:
            raise InvalidArgument(f"the tree of MPICH: it has no comm_type=intra of {name}")
        where["comm_type=intra"] = _by_ranks(list(of_collective), where["comm_type=intra"])
    text = json.dumps(merged, indent=1) + "\n"
    # The library maps the file, and takes it for a string: a zero must follow within its last page.
    return text + "\n" * (len(text) % _PAGE == 0)


def _by_ranks(rules: Sequence[LibraryRule], before: Tree) -> Tree:
    cases: Tree = {}
    for ranks, inside in groupby(rules, lambda rule: rule.ranks):
        cases.setdefault(f"comm_size<{ranks}", before)
        cases[f"comm_size<={ranks}"] = _where_allowed(
            _by_bytes(list(inside), before), before, rules
        )
    return cases | {"comm_size=any": before}


def _where_allowed(chosen: Tree, before: Tree, rules: Sequence[LibraryRule]) -> Tree:
    """Return a tree with `chosen` for calls that every algorithm can serve, else `before`.

    What the library asks itself, its tree must ask: a ring adds in another order than the ranks'.
    """
    name = COLLECTIVES[rules[0].collective].name
    if name in ("allreduce", "reduce"):
        # Algorithms that cut the buffer need an element for each rank.
        chosen = {"count<pow2": before, "count=any": chosen}
        chosen = {"is_op_built_in=yes": chosen, "is_op_built_in=no": before}
    if name in ("allreduce", "reduce", "reduce_scatter_block"):
        return {"is_commutative=yes": chosen, "is_commutative=no": before}
    if name == "alltoall":
        return {"is_sendbuf_inplace=yes": before, "is_sendbuf_inplace=no": chosen}
    return chosen


def _by_bytes(rules: Sequence[LibraryRule], before: Tree) -> Tree:
    cases: Tree = {}
    name = COLLECTIVES[rules[0].collective].name
    # Of an alltoall avg_msg_size is the part for one rank; elsewhere it is not defined.
    key = "avg_msg_size" if name in _WHOLE else "total_msg_size"
    for rule in rules:
        if rule.last > _MOST:
            raise InvalidArgument(f"{rule}: expected less than 2 GiB, as MPICH reads 32 bits")
        if rule.first:
            cases.setdefault(f"{key}<={rule.first - 1}", before)
        leaf = f"algorithm=MPIR_{name.capitalize()}_intra_{rule.algorithm}"
        cases[f"{key}<={rule.last}"] = {leaf: {}}
    return cases | {f"{key}=any": before}
