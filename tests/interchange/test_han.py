"""Rules for Open MPI's han, read as its reader does."""

import pytest

from mpidist.errors import InvalidArgument
from mpidist.interchange.han import COLLECTIVES, environment, export_han
from mpidist.interchange.library_rules import PREDICTED, LibraryRule, predicted
from mpidist.schedule.cost import Link
from mpidist.schedule.registry import find

COMPONENTS = ("self", "basic", "libnbc", "tuned", "sm", "adapt", "han")


def rule(collective, ranks, first, last, component):
    return LibraryRule(collective, ranks, first, last, component, PREDICTED, (1.25, 1.5))


RULES = [
    rule("broadcast", 8, 0, 4095, "tuned"),
    rule("allreduce", 8, 4096, 65535, "han"),
    rule("allreduce", 8, 64, 4095, "tuned"),
    rule("allreduce", 9, 64, 127, "tuned"),
]
TEXT = """\
# made here
# for Open MPI 5
# mpirun --mca coll_han_use_dynamic_file_rules true --mca coll_han_dynamic_rules_filename FILE
2  # collectives

2  # allreduce
1  # level
2  # global_communicator
4  # sets of rules
1  # ranks
1  # rules
0 han
8  # ranks
4  # rules
0 han
64 tuned  # allreduce on 8 ranks, 64 to 4K: tuned, predicted: 1.25 to 1.50 times as fast as the next by the model
4096 han  # allreduce on 8 ranks, 4K to 64K: han, predicted: 1.25 to 1.50 times as fast as the next by the model
65536 han
9  # ranks
3  # rules
0 han
64 tuned  # allreduce on 9 ranks, 64 to 127: tuned, predicted: 1.25 to 1.50 times as fast as the next by the model
128 han
10  # ranks
1  # rules
0 han

7  # bcast
1  # level
2  # global_communicator
3  # sets of rules
1  # ranks
1  # rules
0 han
8  # ranks
2  # rules
0 tuned  # broadcast on 8 ranks, 0 to 4K: tuned, predicted: 1.25 to 1.50 times as fast as the next by the model
4096 han
9  # ranks
1  # rules
0 han
"""  # noqa: E501


def read(text):
    """Return {collective: [(ranks, [(bytes, component)])]} of the level of all ranks."""
    words = iter([w for line in text.splitlines() for w in line.partition("#")[0].split()])

    def number():
        return int(next(words))

    found = {}
    for _ in range(number()):
        collective = number()
        for _ in range(number()):
            assert number() == 2
            sets = found[collective] = []
            for _ in range(number()):
                ranks = number()
                rows = [(number(), next(words)) for _ in range(number())]
                assert rows[0][0] == 0 and rows == sorted(rows)
                assert {component for _, component in rows} <= set(COMPONENTS)
                sets.append((ranks, rows))
            assert sets[0][0] == 1, "the first must be 1, or the file is dropped"
            assert [ranks for ranks, _ in sets] == sorted({ranks for ranks, _ in sets})
    assert list(words) == []
    return found


def chosen(sets, ranks, nbytes):
    rows = [rows for p, rows in sets if p <= ranks][-1]
    return [component for first, component in rows if first <= nbytes][-1]


def test_text():
    assert export_han(RULES, ["made here"]) == TEXT


def test_rules_hold_on_their_ranks_and_bytes_alone():
    sets = read(export_han(RULES))[2]
    for nbytes, component in ((63, "han"), (64, "tuned"), (4095, "tuned"), (4096, "han")):
        assert chosen(sets, 8, nbytes) == component
    assert chosen(sets, 9, 127) == "tuned" and chosen(sets, 9, 128) == "han"
    for ranks in (1, 2, 7, 10, 64):
        assert chosen(sets, ranks, 64) == "han"


def test_link_between_nodes_decides():
    """Where it is as good as the others, a tree that knows no nodes is as fast."""
    schedules, groups = COLLECTIVES["allreduce"].schedules, ((0, 1, 2, 3), (4, 5, 6, 7))
    model = {"alpha": 1e-6, "beta": 1e-10}

    def components(link):
        found = predicted("allreduce", schedules, 8, [8, 1 << 20], model, groups=groups, link=link)
        return [rule.algorithm for rule in found]

    assert components(Link(1e-4, 1e-10))[0] == "han", "one message of a node, not four"
    assert components(Link(1e-6, 1e-10))[-1] == "tuned"


def test_every_schedule_is_registered():
    for name, collective in COLLECTIVES.items():
        assert find(name, collective.schedules["han"])
        assert all(find(name, one) for one in collective.schedules["tuned"])


def test_environment_names_the_file():
    assert environment("/x") == {
        "OMPI_MCA_coll_han_use_dynamic_file_rules": "true",
        "OMPI_MCA_coll_han_dynamic_rules_filename": "/x",
    }


def test_other_components_and_collectives_are_refused():
    with pytest.raises(InvalidArgument, match="'adapt'"):
        export_han([rule("allreduce", 8, 0, 8, "adapt")])
    with pytest.raises(InvalidArgument, match="allgather: Open MPI's han"):
        export_han([rule("allgather", 8, 0, 8, "tuned")])
