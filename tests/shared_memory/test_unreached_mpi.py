"""Arrays that no other rank reaches: they may be anywhere, at another place on each rank."""

import numpy as np
import pytest
from mpi4py import MPI

import mpidist
from mpidist.selection.tuning import Key, TuningEntry, TuningTable, rules_of
from tests.support.pretended import on_nodes

pytestmark = pytest.mark.one_node
# The argument that others do not reach, if the collective is served in memory of the other one.
UNREACHED = {
    **dict.fromkeys(("broadcast", "allgather", "scatter"), "x"),
    **dict.fromkeys(("reduce", "reduce_scatter", "gather", "alltoall", "scan", "exscan"), "out"),
}
ROOTED = ("reduce", "broadcast", "gather", "scatter")
PART = {"x": ("allgather", "gather"), "out": ("reduce_scatter", "scatter")}
PER_RANK = (*PART["x"], *PART["out"])
PLACES = ("same", "own row", "private on some", "private", "none")
LONG = 630_000  # elements: between nodes, the rules for shared memory in the nodes hold


def places(collective):
    """Where the unreached array may be; the result of a scan is the one that must be symmetric."""
    if collective == "scan":
        return PLACES[:2]
    return PLACES if UNREACHED[collective] == "out" else PLACES[:-1]


def array(comm, count, length, where):
    """`count` elements on this rank, `length` on the rank that has most; None for "none"."""
    if where == "none":
        return None
    rows = comm.empty((comm.size + 1, length + 1), "float32")
    if where == "private" or (where == "private on some" and comm.rank % 2 == 0):
        return np.zeros(count, "float32")
    return rows[comm.rank + 1 if where == "own row" else 0, :count]


def result(comm, collective, inputs, root, counts):
    """The result of this rank, None where it has none."""
    begin = sum(counts[: comm.rank])
    mine = slice(begin, begin + counts[comm.rank])
    return {
        "reduce": lambda: sum(inputs) if comm.rank == root else None,
        "broadcast": lambda: inputs[root],
        "allgather": lambda: np.concatenate(inputs),
        "gather": lambda: np.concatenate(inputs) if comm.rank == root else None,
        "reduce_scatter": lambda: sum(inputs)[mine],
        "scatter": lambda: inputs[root][mine],
        "alltoall": lambda: np.concatenate([x[mine] for x in inputs]),
        "scan": lambda: sum(inputs[: comm.rank + 1]),
        "exscan": lambda: sum(inputs[: comm.rank]) if comm.rank else None,
    }[collective]()


def check(comm, collective, counts, where, algorithm="auto", begin="", turns=2):
    """Make calls in which the unreached array is where `where` says, and check their results."""
    root, whole = comm.size - 1, sum(counts)
    arrays, lengths = {}, {}
    for argument, parted in PART.items():
        lengths[argument] = counts if collective in parted else [whole] * comm.size
        # A rank's own part in a gather or scatter may be in another row as well.
        reached = "own row" if collective in ("gather", "scatter") else "same"
        at = where if UNREACHED[collective] == argument else reached
        mine, most = lengths[argument][comm.rank], max(lengths[argument])
        arrays[argument] = array(comm, mine, most, at)
    x, out = arrays["x"], arrays["out"]
    given = {"algorithm": algorithm} | ({"root": root} if collective in ROOTED else {})
    if collective in PER_RANK:
        given["counts"] = counts
    for turn in range(turns):
        inputs = [
            ((np.arange(n) + rank + turn) % 7).astype("float32")
            for rank, n in enumerate(lengths["x"])
        ]
        x[...] = inputs[comm.rank]
        expected = result(comm, collective, inputs, root, counts)
        got = getattr(comm, begin + collective)(
            x if collective != "scatter" or comm.rank == root else None,
            out=out if collective not in ("reduce", "gather") or comm.rank == root else None,
            **given,
        )
        got = got.wait() if begin else got
        assert (got is None) == (expected is None)
        assert expected is None or np.array_equal(got, expected)


@pytest.fixture(params=["one node", "two nodes"])
def shaped(comm, request):
    """A communicator that a test may break, on one node or on two that it pretends to have."""
    made = on_nodes(comm, comm.size if request.param == "one node" else (comm.size + 1) // 2)
    yield made
    if made._service.sequencer.broken is None:
        made.free()


def even(comm, count):
    return [count // comm.size] * comm.size


@pytest.mark.parametrize("count", [10, LONG])
@pytest.mark.parametrize("collective", UNREACHED)
def test_calls(shaped, collective, count):
    """One place after the other: what was chosen for one is kept for all."""
    for where in places(collective):
        check(shaped, collective, even(shaped, count), where)


@pytest.mark.parametrize("collective", UNREACHED)
def test_in_the_background(shaped, collective):
    for where in places(collective):
        check(shaped, collective, even(shaped, LONG), where, begin="i")


@pytest.mark.parametrize("collective", PER_RANK)
@pytest.mark.parametrize(("first", "step"), [(0, LONG // 4), (2, 3)])
def test_uneven_and_empty_parts(shaped, collective, first, step):
    """A gather or scatter with an empty part is not served in symmetric memory."""
    counts = [first + rank * step for rank in range(shaped.size)]
    for where in places(collective):
        check(shaped, collective, counts, where)


ON_ONE_NODE = [("reduce", "in_place_fetched"), ("gather", "in_place_fetched")]
ON_ONE_NODE += [("scatter", "in_place_stored")]
ON_ONE_NODE += [(name, "in_place") for name in UNREACHED if name not in ROOTED]
ON_ONE_NODE += [("broadcast", "in_place")]
LEADERS = {
    "allgather": "in_place/ring",
    "broadcast": "in_place/binomial",
    "reduce": "in_place_fetched/binomial",
    "reduce_scatter": "in_place_fetched/ring",
}


@pytest.mark.parametrize(("collective", "name"), ON_ONE_NODE)
def test_schedules_by_name(comm, collective, name):
    own = on_nodes(comm, comm.size)
    for where in places(collective):
        check(own, collective, even(own, 1000), where, name)
    own.free()


@pytest.mark.parametrize("collective", LEADERS)
def test_schedules_between_nodes_by_name(comm, collective):
    two = on_nodes(comm, (comm.size + 1) // 2)
    for where in places(collective):
        name = f"hierarchical_leaders/{LEADERS[collective]}"
        check(two, collective, even(two, 1000), where, name)
    two.free()


@pytest.mark.parametrize(("collective", "name"), [("reduce", "in_place"), ("gather", "in_place")])
def test_a_table_names_a_schedule_that_stores_in_the_roots_result(comm, collective, name):
    """Only the root knows whether that is in symmetric memory: the ranks do not take it."""
    if comm.size == 1:
        pytest.skip("needs at least 2 ranks")
    vendor, version = MPI.get_vendor()
    library = f"{vendor} {'.'.join(map(str, version))}"
    kind = "float" if collective == "reduce" else "any"
    key = Key(library, (comm.size,), kind, collective, "symmetric")
    table = TuningTable([TuningEntry(key, rules_of(((0, name),)), {8: {name: 1e-6}})])
    tuned = mpidist.init(comm=MPI.COMM_WORLD, tuning=table)
    for where in PLACES:
        check(tuned, collective, even(tuned, 1000), where)
    why = tuned.explain(collective, 4000, memory="symmetric")[0].why
    assert f"names {name}, but only each rank knows whether its out is" in why
    tuned.free()
