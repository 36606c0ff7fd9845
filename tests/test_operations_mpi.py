"""Dtypes and operations, what numpy accepts as an array, and counts that differ."""

import ml_dtypes
import numpy as np
import pytest

from mpidist import Op
from mpidist.errors import InvalidArgument, Unsupported, UnsupportedDtype
from mpidist.operations import OPS, divides_first
from mpidist.schedule import algorithms
from mpidist.shared_memory.exact import combine_exactly
from tests.support import collectives as cases

INTS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "longlong"]
FLOATS = ["float16", "float32", "float64", "longdouble", ">f4", ">f8"]
DTYPES = {
    **{name: np.dtype(name) for name in ["bool", *INTS, ">i4", *FLOATS]},
    **{name: np.dtype(name) for name in ["complex64", "complex128", "clongdouble"]},
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
RECORD = np.dtype([("id", "i4"), ("place", "f8", (3,)), ("name", "S5")])
MOVED = {
    **DTYPES,
    "record": RECORD,
    "S3": np.dtype("S3"),
    "U4": np.dtype("U4"),
    "datetime64": np.dtype("M8[us]"),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
}
KIND = {"b": "bool", "i": "int", "u": "int", "f": "float", "c": "complex", "V": "float"}
NUMPY = {
    "sum": np.add,
    "mean": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
NAMES = cases.names("allreduce")


def values(rank, dtype, n=5):
    """Small numbers whose sums and products every dtype holds exactly."""
    if dtype.kind == "b":
        return (np.arange(n) + rank) % 3 == 0
    numbers = (np.arange(n) + rank) % 2 + 1
    if dtype.kind == "c":
        return (numbers * (1 if rank % 2 else 1j)).astype(dtype)
    return numbers.astype(dtype)


def allowed(op, dtype):
    return KIND[dtype.kind] in OPS[op].kinds


def served(comm, collective="allreduce"):
    return [n for n in cases.names(collective) if cases.cannot(comm, collective, n) is None]


@pytest.mark.parametrize("op", NUMPY)
@pytest.mark.parametrize("name", DTYPES)
def test_allreduce_of_every_dtype(comm, name, op):
    """Native and one other algorithm, another one for each dtype and operation."""
    dtype = DTYPES[name]
    x = values(comm.rank, dtype)
    if not allowed(op, dtype):
        with pytest.raises(UnsupportedDtype, match=f"rank {comm.rank}: op='{op}'.*{dtype}"):
            comm.allreduce(x, op)
        return
    expected = values(0, dtype)
    for rank in range(1, comm.size):
        expected = NUMPY[op](expected, values(rank, dtype))
    if op == "mean":
        expected = expected / np.asarray(comm.size, dtype)
    able = served(comm)
    turn = (list(DTYPES).index(name) * len(NUMPY) + list(NUMPY).index(op)) % len(able)
    for algorithm in dict.fromkeys(("native", able[turn])):  # no set: the ranks must go alike
        got = comm.allreduce(x, op, algorithm=algorithm)
        assert got.dtype == dtype, algorithm
        if divides_first(OPS[op], dtype):  # as exact as the sum of quotients in half precision
            room = comm.size * float(ml_dtypes.finfo(dtype).eps)
            wide = got.astype("f8"), expected.astype("f8")
            np.testing.assert_allclose(*wide, rtol=room, err_msg=algorithm)
            continue
        np.testing.assert_array_equal(got, expected.astype(dtype), err_msg=algorithm)


@pytest.mark.parametrize("name", MOVED)
def test_movement_of_every_dtype(comm, name):
    """Bytes arrive as they are, in every collective that moves data."""
    dtype, p, rank = MOVED[name], comm.size, comm.rank
    random = np.random.default_rng(3)
    bits = random.integers(0, 2, (p, p, 3, dtype.itemsize), np.uint8)  # valid as bool too
    data = bits.view(dtype)[..., 0]  # data[r]: what rank r has, p parts of 3

    def same(got, expected):
        assert got.dtype == dtype and got.shape == expected.shape
        assert got.tobytes() == expected.tobytes()

    for k, collective in enumerate(("broadcast", "allgather", "gather", "scatter", "alltoall")):
        able = served(comm, collective)
        root = k % p
        turn = list(MOVED).index(name) % len(able)
        for algorithm in dict.fromkeys(("native", able[turn])):
            mine = data[rank].reshape(-1)
            if collective == "broadcast":
                x = mine.copy() if rank == root else np.zeros(3 * p, dtype)
                same(comm.broadcast(x, root, algorithm=algorithm), data[root].reshape(-1))
            elif collective == "allgather":
                same(comm.allgather(mine, algorithm=algorithm), data.reshape(-1))
            elif collective == "gather":
                got = comm.gather(mine, root, algorithm=algorithm)
                assert rank == root or got is None
                if rank == root:
                    same(got, data.reshape(-1))
            elif collective == "scatter":
                got = comm.scatter(mine if rank == root else None, root, algorithm=algorithm)
                same(got, data[root, rank])
            else:
                same(comm.alltoall(mine, algorithm=algorithm), data[:, rank].reshape(-1))


def test_object_arrays_are_refused(comm):
    with pytest.raises(UnsupportedDtype, match="send_object"):
        comm.allreduce(np.array([{}], object))


# -- the users' own operations -----------------------------------------------------------------


def affine(a, b):
    """Composition of x -> s x + t, packed into one complex number: not commutative."""
    return a.real * b.real + 1j * (a.real * b.imag + a.imag)


def join(a, b):
    """Concatenation of short strings of digits: number and length, packed into one integer."""
    (x, n), (y, m) = divmod(a, 100), divmod(b, 100)
    return (x * 10**m + y) * 100 + (n + m)


@pytest.mark.parametrize("collective", ["allreduce", "reduce", "reduce_scatter"])
def test_operations_that_do_not_commute(comm, collective):
    """In rank order where an algorithm says that it can, refused where it does not."""
    p, rank, n = comm.size, comm.rank, 6
    digits = np.array([(rank + 1) % 10 * 100 + 1] * n * p)
    maps = np.full(n * p, complex(rank % 2 + 2, rank + 1))
    word = int("".join(str((r + 1) % 10) for r in range(p))) * 100 + p
    composed = np.full(1, complex(2, 1))
    for r in range(1, p):
        composed = affine(composed, np.full(1, complex(r % 2 + 2, r + 1)))
    call = getattr(comm, collective)
    for algorithm in algorithms(collective):
        if algorithm.unsupported(p, groups=comm.topology.groups) is not None:
            continue
        if not algorithm.ordered:
            with pytest.raises(Unsupported, match="not commutative.*linear"):
                call(digits, join, commute=False, algorithm=algorithm.name)
            continue
        for x, f, expected in ((digits, join, word), (maps, affine, composed[0])):
            got = call(x, Op(f, commute=False), algorithm=algorithm.name)
            assert got is None or (got == expected).all(), algorithm.name
    for name in ("auto", "native"):
        got = call(digits, join, commute=False, algorithm=name)
        assert got is None or (got == word).all(), name


def test_functions_as_operations(comm):
    x = np.full(300, comm.rank + 1.0)
    for name in served(comm):
        got = comm.allreduce(x, lambda a, b: np.hypot(a, b), commute=True, algorithm=name)
        np.testing.assert_allclose(got, np.sqrt(sum((r + 1) ** 2 for r in range(comm.size))))
    record = np.zeros(4, RECORD)
    record["id"] = comm.rank

    def latest(a, b):
        return np.where(a["id"] >= b["id"], a, b)

    for name in ("native", "linear", "ring"):
        got = comm.allreduce(record, Op(latest, name="latest"), algorithm=name)
        assert got.dtype == RECORD and (got["id"] == comm.size - 1).all()


def test_any_number_of_functions(comm):
    """MPI lets a process make only a few operations; users may write a lambda in a loop."""
    for k in range(80):
        got = comm.allreduce(1.0, lambda a, b, k=k: a + b + k, commute=True, algorithm="native")
        assert got == comm.size + k * (comm.size - 1)
    for dtype in (np.float16, ml_dtypes.bfloat16, ">f4", ">i8", ">c8"):
        for op in ("sum", "prod"):
            got = comm.allreduce(np.ones(3, dtype), op, algorithm="native")
            assert (got == (comm.size if op == "sum" else 1)).all()


@pytest.mark.mpi(min_size=2)
def test_a_function_is_told_apart_by_commute(comm):
    x, out = np.full(4, comm.rank + 1.0), np.empty(4)
    for _ in range(3):
        assert (comm.allreduce(x, np.maximum, out, "ring", commute=True) == comm.size).all()
        with pytest.raises(Unsupported, match=f"rank {comm.rank}: .*not commutative.*ring"):
            comm.allreduce(x, np.maximum, out, "ring", commute=False)


@pytest.mark.parametrize("op", ["max", "min"])
def test_nan_and_signed_zeros(comm, op):
    """The same bits on every rank and from every algorithm of ours."""
    p, rank = comm.size, comm.rank
    x = np.array([1.0, np.nan if rank == p // 2 else rank, -0.0 if rank % 2 else 0.0, -rank] * p)
    nan = np.array([0x7FF8000000000000 + rank], np.uint64).view("f8")[0]
    x[-1] = nan
    results = {}
    for name in served(comm):
        if name != "native":
            results[name] = comm.allreduce(x, op, algorithm=name)
    for name, got in results.items():
        assert np.isnan(got[1]) and np.isnan(got[-1])
        everyone = comm.allgather(got.view("i8")).reshape(p, -1)
        assert (everyone == everyone[0]).all(), name
    if p == 2:  # with more ranks the order of combination may pick another NaN
        assert len({got.tobytes() for got in results.values()}) == 1


# -- what numpy takes ---------------------------------------------------------------------------


def test_scalars_and_lists(comm):
    p, rank = comm.size, comm.rank
    total = cases.total(p)
    got = comm.allreduce(rank + 1)
    assert got == total and isinstance(got, np.int64)
    assert isinstance(comm.allreduce(1.5), np.float64)
    got = comm.allreduce(np.array(rank + 1))
    assert got.shape == () and got == total
    assert comm.allreduce([[rank, 1], [2, 3]]).tolist() == [[total - p, p], [2 * p, 3 * p]]
    assert comm.allgather(rank).tolist() == list(range(p))
    got = comm.gather(rank, p - 1)
    assert (got is None) == (rank != p - 1) and (got is None or got.tolist() == list(range(p)))
    filled = np.zeros(())
    assert comm.broadcast(p + 6.5 if rank == p - 1 else filled, p - 1) == p + 6.5
    assert comm.broadcast([5] * 3 if rank == 0 else np.empty(3, int), 0).tolist() == [5, 5, 5]
    got = comm.reduce(True, "and")
    assert rank or got
    assert comm.scatter(list(range(p)) if rank == 0 else None).tolist() == [rank]
    assert comm.alltoall([rank] * p).tolist() == list(range(p))
    out = np.empty(())
    assert comm.allreduce(np.array(2.0), out=out) is out and out == 2 * p


def test_arrays_that_are_not_contiguous(comm):
    p, rank = comm.size, comm.rank
    whole = np.arange(48.0).reshape(6, 8) * (rank + 1)
    expected = np.arange(48.0).reshape(6, 8) * cases.total(p)
    for view in (np.s_[::2], np.s_[:, 1:5], np.s_[::-1, ::3]):
        for name in ("native", "linear"):
            out = np.zeros((12, 16))[::2, ::2]
            assert comm.allreduce(whole[view], out=out[view], algorithm=name).base is not None
            np.testing.assert_array_equal(out[view], expected[view])
            out[view] = 0
            assert not out.any()  # nothing else was written
        same = whole.copy()
        comm.allreduce(same[view], out=same[view])
        np.testing.assert_array_equal(same[view], expected[view])
        given = whole.copy()[view] if rank == 0 else np.zeros((6, 8))[view]
        np.testing.assert_array_equal(comm.broadcast(given), np.arange(48.0).reshape(6, 8)[view])
    fortran = np.asfortranarray(whole)
    np.testing.assert_array_equal(comm.allreduce(fortran), expected)
    out = np.zeros((6, 8), order="F")
    np.testing.assert_array_equal(comm.allreduce(fortran, out=out), expected)
    out = np.zeros((6 * p, 8), order="F")
    comm.allgather(fortran, out)
    np.testing.assert_array_equal(out[6 * (p - 1) :], np.arange(48.0).reshape(6, 8) * p)
    out = np.zeros((6, 16))[:, ::2]
    rows = np.asfortranarray(np.tile(whole, (p, 1)))
    np.testing.assert_array_equal(comm.reduce_scatter(rows, out=out), expected)
    np.testing.assert_array_equal(comm.scatter(rows, p - 1, out), np.arange(48.0).reshape(6, 8) * p)
    columns = whole.T[::2]  # overlapping in bounds only
    np.testing.assert_array_equal(comm.allreduce(columns), expected.T[::2])


def test_empty_arrays(comm):
    p = comm.size
    for shape in ((0,), (0, 3), (4, 0)):
        for name in ("native", "linear"):
            x = np.empty(shape, "f4")
            assert comm.allreduce(x, algorithm=name).shape == shape
            assert comm.broadcast(x, p - 1, algorithm=name).shape == shape
            rows = (shape[0] * p, *shape[1:])
            assert comm.allgather(x, algorithm=name).shape == rows
            many = np.empty(rows, "f4")
            assert comm.alltoall(many, algorithm=name).shape == rows
            assert comm.scatter(many, algorithm=name).shape == shape
            assert comm.reduce_scatter(many, algorithm=name).shape == shape


def test_higher_dimensions(comm):
    p, rank = comm.size, comm.rank
    x = np.full((2, 3, 4), rank)
    got = comm.allgather(x)
    assert got.shape == (2 * p, 3, 4) and (got[2 * rank : 2 * rank + 2] == rank).all()
    rows = np.arange(p * 24).reshape(2 * p, 3, 4)
    np.testing.assert_array_equal(comm.reduce_scatter(rows), p * rows[2 * rank : 2 * rank + 2])
    got = comm.alltoall(rows + 1000 * rank)
    for r in range(p):
        np.testing.assert_array_equal(
            got[2 * r : 2 * r + 2], rows[2 * rank : 2 * rank + 2] + 1000 * r
        )


# -- counts -------------------------------------------------------------------------------------


def uneven(p):
    """Rows that differ, some of them none."""
    return [(3 * r + 2) % 5 for r in range(p)], [0] * (p - 1) + [4], [7] + [0] * (p - 1), [2] * p


@pytest.mark.parametrize("collective", ["allgather", "gather", "scatter", "reduce_scatter"])
def test_uneven_counts(comm, collective):
    p, rank = comm.size, comm.rank
    call = getattr(comm, collective)
    for turn, counts in enumerate(uneven(p)):
        starts = np.concatenate([[0], np.cumsum(counts)])
        mine = slice(starts[rank], starts[rank + 1])
        data = np.arange(2.0 * sum(counts)).reshape(-1, 2) + 1
        root = turn % p
        for name in served(comm, collective):
            given = {"algorithm": name, "counts": counts}
            if collective == "allgather":
                np.testing.assert_array_equal(call(data[mine], **given), data)
                out = np.full_like(data, 7)
                out[mine] = data[mine]
                np.testing.assert_array_equal(call(out[mine], out, **given), data)
            elif collective == "gather":
                got = call(data[mine], root, **given)
                if rank == root:
                    np.testing.assert_array_equal(got, data)
            elif collective == "scatter":
                x = data if rank == root else None
                out = np.full((counts[rank], 2), 7.0)
                np.testing.assert_array_equal(call(x, root, **given), data[mine])
                np.testing.assert_array_equal(call(x, root, out, **given), data[mine])
            else:
                np.testing.assert_array_equal(
                    call(data * (rank + 1), **given), data[mine] * cases.total(p)
                )


def test_uneven_alltoall(comm):
    """Amounts that differ by sender and receiver; all to rank 0, which gets, while others get none.

    Also equal ones, given as counts.  A rank gives its own counts, or the table of all ranks'.
    """
    p, rank = comm.size, comm.rank
    for table in (
        [[(r + 2 * d) % 4 for d in range(p)] for r in range(p)],
        [[r * (d == 0) for d in range(p)] for r in range(p)],
        [[3] * p] * p,
    ):
        sends = table[rank]
        x = np.concatenate([part_for(rank, d, sends[d]) for d in range(p)])
        expected = np.concatenate([part_for(r, rank, table[r][rank]) for r in range(p)])
        for name in ["auto", *cases.names("alltoall")]:
            algorithm = next((a for a in algorithms("alltoall") if a.name == name), None)
            if algorithm is not None and algorithm.equal_blocks:
                with pytest.raises(Unsupported, match="equal counts"):
                    comm.alltoall(x, algorithm=name, counts=sends)
                continue
            for counts in (sends, table):
                got = comm.alltoall(x, algorithm=name, counts=counts)
                np.testing.assert_array_equal(got, expected, err_msg=name)
            work = comm.ialltoall(x, algorithm=name, counts=table)
            np.testing.assert_array_equal(work.wait(), expected, err_msg=name)


def part_for(source, target, n):
    return source * 1000 + target * 100 + np.arange(n)


def test_counts_that_are_wrong(comm):
    p, rank = comm.size, comm.rank
    x = np.ones((2, 3))
    for counts in ([2] * (p + 1), [-1] * p, [1.5] * p, "ab", [1] * p):
        with pytest.raises(InvalidArgument, match=f"^rank {rank}: .*counts"):
            comm.allgather(x, counts=counts)
    with pytest.raises(InvalidArgument, match="counts.* add up to"):
        comm.reduce_scatter(np.ones(5 * p), counts=[1] * p)
    if p > 1:
        with pytest.raises(InvalidArgument, match="counts="):
            comm.alltoall(np.ones(p + 1))
    assert comm.allreduce(1) == p


def magnitudes(dtype, n, rank):
    """Numbers of many magnitudes, of which none of the ranks' sums is exact; infinities and NaN."""
    random, few = np.random.default_rng(rank), np.dtype(dtype).itemsize <= 2
    with np.errstate(all="ignore"):
        x = np.ldexp(
            random.standard_normal(n), random.integers(*((-9, 9) if few else (-60, 60)), n)
        )
        if np.dtype(dtype).kind == "c":
            x = x + 1j * x[::-1]
        x = x.astype(dtype)
    special = [np.inf, -np.inf, np.nan, -0.0, 0.0]
    x[: len(special)] = special[rank % 2 :] + special[: rank % 2]
    return x


@pytest.mark.parametrize("op", ["exact_sum", "exact_mean"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "complex64"])
def test_exact_sums_have_the_same_bits_by_every_way_and_in_any_order_of_the_ranks(comm, dtype, op):
    """Executors, algorithms, symmetric and private arrays, in place and not, in the background."""
    n, p = 240 * comm.size, comm.size
    terms = [magnitudes(dtype, n, rank) for rank in range(p)]
    expected = np.empty(n, dtype)
    combine_exactly(terms, expected, p if op == "exact_mean" else 0)
    if p == 1:
        expected = terms[0]
    part = slice(n // p * comm.rank, n // p * (comm.rank + 1))
    wanted = {
        "allreduce": expected.tobytes(),
        "reduce": expected.tobytes() if comm.rank == p - 1 else None,
        "reduce_scatter": expected[part].tobytes(),
    }
    for turn in range(min(p, 2)):
        x = terms[(comm.rank + turn) % p]
        shared = comm.empty(n, dtype)
        for collective, right in wanted.items():
            how = {"root": p - 1} if collective == "reduce" else {}
            for name in ("auto", *served(comm, collective)):
                got = getattr(comm, collective)
                try:
                    result = got(x, op, algorithm=name, **how)
                except Unsupported as error:
                    assert "at once" in str(error) or "MPI has no" in str(error), error
                    continue
                assert result is None or result.tobytes() == right, (collective, name)
            shared[:] = x
            result = getattr(comm, collective)(shared, op, **how)
            assert result is None or result.tobytes() == right, collective
        shared[:] = x
        comm.allreduce(shared, op, out=shared)
        assert shared.tobytes() == wanted["allreduce"]
        begun = comm.iallreduce(x, op)
        assert begun.wait().tobytes() == wanted["allreduce"]


def test_exact_sums_are_refused_by_what_sends_partial_results(comm):
    for name in ("ring", "linear", "tree:3"):
        with pytest.raises(
            Unsupported, match=f"{name}.*'exact_sum' needs all terms at once.*direct"
        ):
            comm.allreduce(np.ones(7), "exact_sum", algorithm=name)


def of_tree(terms, function):
    """The terms combined as the fixed tree: it splits at the largest power of two below."""
    if len(terms) == 1:
        return terms[0]
    half = 1 << (len(terms) - 1).bit_length() - 1
    return function(of_tree(terms[:half], function), of_tree(terms[half:], function))


@pytest.mark.parametrize("op", ["sum", "mean", "prod", "max", "user"])
@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "float16", "bfloat16", "complex64", "int8"]
)
def test_a_fixed_tree_has_the_same_bits_by_every_way(comm, dtype, op):
    """Those of numpy, in the dtype; a mean of half precision divides the terms first."""
    if (op == "mean" and dtype == "int8") or (op == "max" and dtype == "complex64"):
        return pytest.raises(UnsupportedDtype, comm.allreduce, np.ones(3, dtype), op)
    n, p = 120 * comm.size, comm.size
    random, size = np.random.default_rng(1), 0.5 if op == "user" and dtype != "int8" else 16
    terms = [(size * random.standard_normal(n)).astype(dtype) for _ in range(p)]
    function = {**NUMPY, "user": lambda a, b: a + b - a * b}[op]
    given = {"op": op} if op != "user" else {"op": function, "commute": True}
    with np.errstate(all="ignore"):
        if op == "mean" and divides_first(OPS["mean"], np.dtype(dtype)):
            expected = of_tree([(x / np.float32(p)).astype(dtype) for x in terms], np.add)
        else:
            expected = of_tree(terms, function)
            expected = expected / np.asarray(p, dtype) if op == "mean" else expected
    part = slice(n // p * comm.rank, n // p * (comm.rank + 1))
    shared, x = comm.empty(n, dtype), terms[comm.rank]
    for collective in ("allreduce", "reduce", "reduce_scatter"):
        right = expected[part] if collective == "reduce_scatter" else expected
        roots = range(min(p, 2)) if collective == "reduce" else (None,)
        for root in roots:
            how = {**given, "order": "tree", **({} if root is None else {"root": root})}
            done = []
            for name in ("auto", *served(comm, collective)):
                try:
                    result = getattr(comm, collective)(x, algorithm=name, **how)
                except Unsupported as error:
                    assert "in order='tree'" in str(error), error
                    continue
                done.append(name)
                assert result is None or result.tobytes() == right.tobytes(), (collective, name)
            assert "direct" in done and "native" not in done and ("ring" not in done or p < 3)
            shared[:] = x
            result = getattr(comm, collective)(shared, **how)
            assert result is None or result.tobytes() == right.tobytes(), collective
    shared[:] = x
    comm.allreduce(shared, out=shared, order="tree", **given)
    assert shared.tobytes() == expected.tobytes()
    assert comm.iallreduce(x, order="tree", **given).wait().tobytes() == expected.tobytes()


def test_an_order_that_is_none_is_refused(comm):
    x = np.ones(3)
    with pytest.raises(InvalidArgument, match="order='ring': expected None or 'tree'"):
        comm.allreduce(x, order="ring")
    with pytest.raises(InvalidArgument, match="order='tree': op='exact_sum' has the same result"):
        comm.allreduce(x, "exact_sum", order="tree")


@pytest.mark.mpi(min_size=3)
def test_a_fixed_tree_is_refused_by_what_groups_the_ranks_otherwise(comm):
    for name in ("ring", "double_binary_tree"):
        with pytest.raises(Unsupported, match=f"op 'sum' in order='tree': {name} groups.*direct"):
            comm.allreduce(np.ones(3), order="tree", algorithm=name)
