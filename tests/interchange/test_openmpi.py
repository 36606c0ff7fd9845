"""Open MPI's rules, read as its readers do: those of 5 and 6 for the text, that of 6 for JSON."""

import json

import pytest

from mpidist.errors import InvalidArgument, Unsupported
from mpidist.interchange.library_rules import MEASURED, LibraryRule
from mpidist.interchange.openmpi import COLLECTIVES, algorithms, environment, export_openmpi, number
from mpidist.schedule.registry import find


def rule(collective, ranks, first, last, algorithm):
    return LibraryRule(collective, ranks, first, last, algorithm, MEASURED, (1.25, 1.5))


RULES = [
    rule("broadcast", 4, 1024, 65535, "chain"),
    rule("allreduce", 4, 65536, 1 << 20, "ring"),
    rule("allreduce", 4, 0, 65535, "recursive_doubling"),
    rule("allreduce", 5, 4096, 8191, "rabenseifner"),
    rule("allreduce", 9, 8, 16, "basic_linear"),
]
TEXT = """\
# made here
# allreduce on 4 ranks by ring: WRONG RESULTS with operations that are not commutative
# for Open MPI below 6
# mpirun --mca coll_tuned_use_dynamic_rules 1 --mca coll_tuned_dynamic_rules_filename FILE
2  # collectives

2  # allreduce
6  # sets of rules
1  # ranks
1  # rules
0 0 0 0
4  # ranks
3  # rules
0 3 0 0  # allreduce on 4 ranks, 0 to 64K: recursive_doubling, measured: 1.25 to 1.50 times as fast as the library's choice
65536 4 0 0  # allreduce on 4 ranks, 64K to 1M: ring, measured: 1.25 to 1.50 times as fast as the library's choice
1048577 0 0 0
5  # ranks
3  # rules
0 0 0 0
4096 6 0 0  # allreduce on 5 ranks, 4K to 8K: rabenseifner, measured: 1.25 to 1.50 times as fast as the library's choice
8192 0 0 0
6  # ranks
1  # rules
0 0 0 0
9  # ranks
3  # rules
0 0 0 0
8 1 0 0  # allreduce on 9 ranks, 8 to 16: basic_linear, measured: 1.25 to 1.50 times as fast as the library's choice
17 0 0 0
10  # ranks
1  # rules
0 0 0 0

7  # bcast
3  # sets of rules
1  # ranks
1  # rules
0 0 0 0
4  # ranks
3  # rules
0 0 0 0
1024 2 4 0  # broadcast on 4 ranks, 1K to 64K: chain, measured: 1.25 to 1.50 times as fast as the library's choice
65536 0 0 0
5  # ranks
1  # rules
0 0 0 0
"""  # noqa: E501


def read_classic(text):
    """Return {collective: [(ranks, [(bytes, algorithm, fan, segment)])]}; ValueError if wrong."""
    words = [word for line in text.splitlines() for word in line.partition("#")[0].split()]
    numbers = iter(map(int, words))
    found = {}
    for _ in range(next(numbers)):
        sets = found.setdefault(next(numbers), [])
        for _ in range(next(numbers)):
            ranks = next(numbers)
            rows = [tuple(next(numbers) for _ in range(4)) for _ in range(next(numbers))]
            # The whole file is dropped, without a word, unless these hold.
            assert rows and rows[0][0] == 0 and rows == sorted(rows), rows
            assert not sets or sets[-1][0] < ranks
            sets.append((ranks, rows))
    assert list(numbers) == [] and list(found) == sorted(found)
    return found


def chosen(sets, ranks, nbytes):
    """Return the number that Open MPI below 6 chooses: the last set and row not beyond."""
    fitting = [rows for p, rows in sets if p <= ranks] or [sets[0][1]]
    return [algorithm for first, algorithm, *_ in fitting[-1] if first <= nbytes][-1]


def test_classic_text():
    assert export_openmpi(RULES, 5, ["made here"]) == TEXT
    assert export_openmpi(RULES, 4, ["made here"]) == TEXT


def test_classic_rules_hold_on_their_ranks_and_bytes_alone():
    read = read_classic(export_openmpi(RULES, 5))
    assert list(read) == [2, 7]
    expected = {
        **{(4, 0): 3, (4, 65535): 3, (4, 65536): 4, (4, 1 << 20): 4, (4, (1 << 20) + 1): 0},
        **{(5, 0): 0, (5, 4096): 6, (5, 8191): 6, (5, 8192): 0},
        **{(9, 7): 0, (9, 8): 1, (9, 16): 1, (9, 17): 0},
        **dict.fromkeys([(1, 8), (2, 8), (3, 1 << 16), (6, 4096), (8, 8), (10, 8), (99, 8)], 0),
    }
    assert {at: chosen(read[2], *at) for at in expected} == expected


def test_json_of_version_6():
    content = json.loads(export_openmpi(RULES, 6, ["made here"]))
    assert content["rule_file_version"] == 3 and content["module"] == "tuned"
    assert content["about"][0] == "made here" and len(content["about"]) == 2 + len(RULES)
    assert "WRONG RESULTS" in content["about"][1]
    assert list(content["collectives"]) == ["allreduce", "bcast"]
    sets = content["collectives"]["allreduce"]
    assert [(s["comm_size_min"], s["comm_size_max"]) for s in sets] == [(4, 4), (5, 5), (9, 9)]
    rows = [(r["msg_size_min"], r["msg_size_max"], r["alg"]) for r in sets[0]["rules"]]
    assert rows == [(0, 65535, "recursive_doubling"), (65536, 1 << 20, "ring")]
    (chain,) = content["collectives"]["bcast"][0]["rules"]
    assert (chain["alg"], chain["faninout"], chain["seg_size"]) == ("chain", 4, 0)


def test_numbers_are_those_of_the_parameters():
    assert number("allreduce", "rabenseifner") == 6
    assert number("broadcast", "scatter_allgather_ring") == 9
    assert number("allgather", "neighbor") == 5 and number("reduce", "rabenseifner") == 7
    assert number("barrier", "tree") == 6 and number("alltoall", "modified_bruck") == 3


def test_every_schedule_is_registered():
    for name, collective in COLLECTIVES.items():
        for ours in filter(None, collective.schedules.values()):
            assert find(name, ours).algorithm.collective == name


def test_environment_names_the_file():
    assert environment("/a/b") == {
        "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
        "OMPI_MCA_coll_tuned_dynamic_rules_filename": "/a/b",
    }


def test_algorithms_for_every_operation():
    """By a rule, Open MPI's ring combines in its own order, and a tree for reduce too."""
    safe = algorithms(["allreduce", "reduce", "broadcast"], commutative=False)
    assert "rabenseifner" in safe["allreduce"].schedules
    assert not {"ring", "segmented_ring"} & set(safe["allreduce"].schedules)
    assert list(safe["reduce"].schedules) == ["linear", "in-order_binary", "rabenseifner"]
    every = algorithms(COLLECTIVES, commutative=True)
    assert every == COLLECTIVES and safe["broadcast"] == COLLECTIVES["broadcast"]
    with pytest.raises(InvalidArgument, match="scan: Open MPI"):
        algorithms(["scan"], commutative=False)


def test_other_versions_and_algorithms_are_refused():
    with pytest.raises(Unsupported, match="Open MPI 3: .* expected version 4, 5, 6"):
        export_openmpi(RULES, 3)
    with pytest.raises(InvalidArgument, match="'direct'"):
        export_openmpi([rule("allreduce", 4, 0, 8, "direct")], 5)
    with pytest.raises(InvalidArgument, match="scan: Open MPI"):
        export_openmpi([rule("scan", 4, 0, 8, "linear")], 5)
