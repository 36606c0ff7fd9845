"""MPICH's selection: rules in a tree of its form, walked as the library walks it."""

import json

import pytest

from mpidist.errors import InvalidArgument, Unsupported
from mpidist.interchange.library_rules import MEASURED, LibraryRule
from mpidist.interchange.mpich import (
    COLLECTIVES,
    check_version,
    environment,
    export_mpich,
    own_tree,
)
from mpidist.schedule.registry import find


def rule(collective, ranks, first, last, algorithm):
    return LibraryRule(collective, ranks, first, last, algorithm, MEASURED, (1.25, 1.5))


def leaf(name):
    return {f"algorithm=MPIR_{name}": {}}


def by_kind(name, inside):
    return {"comm_type=intra": inside, "comm_type=inter": leaf(f"{name}_inter_x")}


# A tree of the form of MPICH's, with other choices.
TREE = {
    "collective=allreduce": by_kind(
        "Allreduce",
        {
            "avg_msg_size<=8": leaf("Allreduce_intra_smp"),
            "avg_msg_size=any": leaf("Allreduce_intra_tree"),
        },
    ),
    "collective=allgather": by_kind("Allgather", leaf("Allgather_intra_old")),
    "collective=alltoall": by_kind(
        "Alltoall",
        {
            "is_sendbuf_inplace=yes": leaf("Alltoall_intra_replace"),
            "is_sendbuf_inplace=no": leaf("Alltoall_intra_old"),
        },
    ),
    "collective=reduce_scatter_block": by_kind("R", leaf("Reduce_scatter_block_intra_old")),
    "collective=scan": leaf("Scan_old"),
}
RULES = [
    rule("allreduce", 5, 1024, 65535, "ring"),
    rule("allreduce", 4, 4096, 1 << 20, "ring"),
    rule("allreduce", 4, 64, 1023, "recursive_doubling"),
    rule("allgather", 4, 0, 4095, "brucks"),
    rule("alltoall", 4, 8, 4095, "scattered"),
    rule("reduce_scatter", 4, 8, 4095, "pairwise"),
]


def holds(condition, call):
    """Whether a condition of csel.c holds for a call, as far as these trees have conditions."""
    name, sign, value = (
        condition.partition(sign) for sign in ("<=", "<", "=") if sign in condition
    ).__next__()
    if value == "any":
        return True
    if value == "pow2":
        assert (name, sign) == ("count", "<")
        return call["count"] < 1 << (call["comm_size"].bit_length() - 1)
    if sign == "=":
        return call[name] == value
    assert -(2**31) <= int(value) < 2**31
    return call[name] <= int(value) if sign == "<=" else call[name] < int(value)


def walk(tree, call):
    """Return the algorithm that the first conditions lead to."""
    for key, inside in tree.items():
        if key.startswith("algorithm="):
            return key.removeprefix("algorithm=MPIR_")
        if holds(key, call):
            return walk(inside, call)
    raise AssertionError("no condition holds: the library would abort")


def selected(text, collective, comm_size, nbytes, **more):
    reduces = collective in ("allreduce", "reduce_scatter_block")
    call = {"collective": collective, "comm_type": "intra", "comm_size": comm_size}
    call |= {"avg_msg_size" if collective == "allreduce" else "total_msg_size": nbytes}
    call |= {"is_commutative": "yes"} if reduces else {}
    if collective == "allreduce":
        call |= {"is_op_built_in": "yes", "count": nbytes // 4}
    call |= {"is_sendbuf_inplace": "no"} if collective == "alltoall" else {}
    return walk(json.loads(text), call | more)


@pytest.fixture(scope="module")
def text():
    return export_mpich(RULES, json.dumps(TREE))


@pytest.mark.parametrize(
    ("ranks", "nbytes", "expected"),
    (
        (4, 8, "smp"),
        (4, 63, "tree"),
        (4, 64, "recursive_doubling"),
        (4, 1023, "recursive_doubling"),
        (4, 1024, "tree"),
        (4, 4096, "ring"),
        (4, 1 << 20, "ring"),
        (4, (1 << 20) + 1, "tree"),
        (5, 1023, "tree"),
        (5, 1024, "ring"),
        (5, 65536, "tree"),
        (3, 4096, "tree"),
        (6, 4096, "tree"),
        (2, 8, "smp"),
    ),
)
def test_allreduce_is_chosen_on_its_ranks_and_bytes_alone(text, ranks, nbytes, expected):
    assert selected(text, "allreduce", ranks, nbytes) == f"Allreduce_intra_{expected}"


def test_calls_that_an_algorithm_may_not_serve_are_as_before(text):
    for more in ({"is_commutative": "no"}, {"is_op_built_in": "no"}, {"count": 3}):
        assert selected(text, "allreduce", 4, 4096, **more) == "Allreduce_intra_tree"
    assert selected(text, "allreduce", 4, 4096, comm_type="inter") == "Allreduce_inter_x"
    in_place = selected(text, "alltoall", 4, 64, is_sendbuf_inplace="yes")
    assert in_place == "Alltoall_intra_replace"
    before = selected(text, "reduce_scatter_block", 4, 64, is_commutative="no")
    assert before == "Reduce_scatter_block_intra_old"


def test_collectives_without_an_average_size_ask_for_the_total(text):
    """avg_msg_size is not defined for them: the library would abort."""
    assert selected(text, "allgather", 4, 0) == "Allgather_intra_brucks"
    assert selected(text, "allgather", 4, 4096) == "Allgather_intra_old"
    assert selected(text, "alltoall", 4, 4095) == "Alltoall_intra_scattered"
    assert selected(text, "reduce_scatter_block", 4, 8) == "Reduce_scatter_block_intra_pairwise"
    assert selected(text, "reduce_scatter_block", 4, 7) == "Reduce_scatter_block_intra_old"


def test_other_collectives_stay(text):
    """A file replaces the whole tree."""
    assert list(json.loads(text)) == list(TREE)
    assert json.loads(text)["collective=scan"] == TREE["collective=scan"]
    assert json.loads(export_mpich([], json.dumps(TREE))) == TREE


def test_file_ends_within_its_last_page():
    """The library maps the file, and reads on to a zero."""
    base = len(export_mpich([], json.dumps(TREE | {"collective=pad": {}})))
    pad = {"collective=pad" + "x" * (-base % 4096): {}}
    text = export_mpich([], json.dumps(TREE | pad))
    assert len(text) % 4096 == 1 and json.loads(text) == TREE | pad


def test_own_tree_is_the_one_of_algorithms():
    own = json.dumps(TREE, separators=(",", ":"))
    other = '{"collective=bcast":{"composition=MPIDI_Bcast_x":{}}}'
    assert own_tree(f"\0x\0{other}\0\0{own}\0collective=\0".encode()) == own
    with pytest.raises(Unsupported, match="no tree"):
        own_tree(f"\0{other}\0".encode())


def test_every_schedule_is_registered():
    for name, collective in COLLECTIVES.items():
        for ours in filter(None, collective.schedules.values()):
            assert find(name, ours).algorithm.collective == name


def test_environment_names_the_file():
    assert environment("/x") == {"MPIR_CVAR_COLL_SELECTION_TUNING_JSON_FILE": "/x"}


@pytest.mark.parametrize("version", ((4, 2, 3), (5, 1, 0), ()))
def test_other_versions_are_refused(version):
    with pytest.raises(Unsupported, match=r"expected 4\.3 to 5\.0"):
        check_version(version)
    check_version((4, 3, 0))
    check_version((5, 0, 2))


def test_what_the_form_cannot_express_is_refused():
    tree = json.dumps(TREE)
    with pytest.raises(InvalidArgument, match="'recexch'"):
        export_mpich([rule("allreduce", 4, 0, 8, "recexch")], tree)
    with pytest.raises(InvalidArgument, match="gather: MPICH has no choice"):
        export_mpich([rule("gather", 4, 0, 8, "binomial")], tree)
    with pytest.raises(InvalidArgument, match="allgather on 5 .* power of two"):
        export_mpich([rule("allgather", 5, 0, 8, "recursive_doubling")], tree)
    export_mpich([rule("allgather", 8, 0, 8, "recursive_doubling")], tree)
    with pytest.raises(InvalidArgument, match="less than 2 GiB"):
        export_mpich([rule("allreduce", 4, 0, 1 << 31, "ring")], tree)
    with pytest.raises(InvalidArgument, match="no comm_type=intra of reduce"):
        export_mpich([rule("reduce", 4, 0, 8, "binomial")], tree)
    with pytest.raises(InvalidArgument, match="the tree of MPICH is not JSON"):
        export_mpich([], "{")
