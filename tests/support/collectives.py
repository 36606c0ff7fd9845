"""Every collective with data whose results are closed forms of rank and size."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from mpidist.errors import Unsupported
from mpidist.schedule import algorithms


def names(collective: str) -> list[str]:
    """What can be asked for: native, every registered algorithm, and trees of another arity."""
    found = ["native"]
    for algorithm in algorithms(collective):
        found.append(algorithm.name)
        if "arity" in algorithm.uses:
            found.append(f"{algorithm.name}:3")
    return found


def cannot(comm, collective: str, name: str) -> str | None:
    """Why an algorithm does not serve this communicator, or None."""
    if name == "native":
        return None if comm.backend.native is not None else "no native collectives"
    found = next(a for a in algorithms(collective) if a.name == name.partition(":")[0])
    return found.unsupported(comm.size, groups=comm.topology.groups)


def factors(n: int) -> np.ndarray:
    """1 … 13 again and again: elements that change places are found out."""
    return np.arange(n) % 13 + 1


def part(rank: int, n: int) -> np.ndarray:
    """`n` elements that only `rank` has."""
    return rank * 10_000 + np.arange(n)


def total(size: int) -> int:
    return size * (size + 1) // 2


Check = Callable[..., None]


def allreduce(comm, name, n, dtype, root, in_place):
    x = ((comm.rank + 1) * factors(n)).astype(dtype)
    kept = x.copy()
    out = x if in_place else np.full(n, 77, dtype)
    assert comm.allreduce(x, out=out, algorithm=name) is out
    np.testing.assert_array_equal(out, total(comm.size) * factors(n))
    assert in_place or np.array_equal(x, kept)
    new = comm.allreduce(kept, "max", algorithm=name)
    np.testing.assert_array_equal(new, comm.size * factors(n))


def reduce(comm, name, n, dtype, root, in_place):
    x = ((comm.rank + 1) * factors(n)).astype(dtype)
    kept = x.copy()
    out = None
    if comm.rank == root:
        out = x if in_place else np.full(n, 77, dtype)
    assert comm.reduce(x, root=root, out=out, algorithm=name) is out
    if comm.rank == root:
        np.testing.assert_array_equal(out, total(comm.size) * factors(n))
    if comm.rank != root or not in_place:
        assert np.array_equal(x, kept)
    new = comm.reduce(kept, "min", root, algorithm=name)
    if comm.rank == root:
        np.testing.assert_array_equal(new, factors(n))
    else:
        assert new is None


def scan(comm, name, n, dtype, root, in_place):
    x = ((comm.rank + 1) * factors(n)).astype(dtype)
    kept = x.copy()
    out = x if in_place else np.full(n, 77, dtype)
    assert comm.scan(x, out=out, algorithm=name) is out
    np.testing.assert_array_equal(out, total(comm.rank + 1) * factors(n))
    assert in_place or np.array_equal(x, kept)
    new = comm.scan(kept, "min", algorithm=name)
    np.testing.assert_array_equal(new, factors(n))


def exscan(comm, name, n, dtype, root, in_place):
    x = ((comm.rank + 1) * factors(n)).astype(dtype)
    kept = x.copy()
    out = x if in_place else np.full(n, 77, dtype)
    before = out.copy()
    got, new = comm.exscan(x, out=out, algorithm=name), comm.exscan(kept, "max", algorithm=name)
    if comm.rank == 0:
        assert got is None and new is None
        np.testing.assert_array_equal(out, before)
    else:
        assert got is out
        np.testing.assert_array_equal(out, total(comm.rank) * factors(n))
        np.testing.assert_array_equal(new, comm.rank * factors(n))
    assert in_place or np.array_equal(x, kept)


def broadcast(comm, name, n, dtype, root, in_place):
    x = part(root, n).astype(dtype) if comm.rank == root else np.full(n, 77, dtype)
    out = None if in_place else np.full(n, 78, dtype)
    given = comm.broadcast(x, root, out, algorithm=name)
    assert given is (x if in_place else out)
    np.testing.assert_array_equal(given, part(root, n).astype(dtype))
    if not in_place and comm.rank != root:
        assert (x == 77).all()


def allgather(comm, name, n, dtype, root, in_place):
    p, rank = comm.size, comm.rank
    out = np.full(p * n, 77, dtype)
    x = out[rank * n : (rank + 1) * n] if in_place else np.empty(n, dtype)
    x[...] = part(rank, n)
    assert comm.allgather(x, out, algorithm=name) is out
    expected = np.concatenate([part(r, n) for r in range(p)]).astype(dtype)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(x, part(rank, n).astype(dtype))


def gather(comm, name, n, dtype, root, in_place):
    p, rank = comm.size, comm.rank
    out = np.full(p * n, 77, dtype) if rank == root else None
    x = np.empty(n, dtype)
    if rank == root and in_place:
        x = out[rank * n : (rank + 1) * n]
    x[...] = part(rank, n)
    assert comm.gather(x, root, out, algorithm=name) is out
    if rank == root:
        expected = np.concatenate([part(r, n) for r in range(p)]).astype(dtype)
        np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(x, part(rank, n).astype(dtype))


def reduce_scatter(comm, name, n, dtype, root, in_place):
    p, rank = comm.size, comm.rank
    x = ((rank + 1) * factors(p * n)).astype(dtype)
    mine = slice(rank * n, (rank + 1) * n)
    kept = x.copy()
    out = x[mine] if in_place else np.full(n, 77, dtype)
    assert comm.reduce_scatter(x, out=out, algorithm=name) is out
    np.testing.assert_array_equal(out, total(p) * factors(p * n)[mine])
    if not in_place:
        np.testing.assert_array_equal(x, kept)


def scatter(comm, name, n, dtype, root, in_place):
    p, rank = comm.size, comm.rank
    x = part(root, p * n).astype(dtype) if rank == root else None
    kept = None if x is None else x.copy()
    out = np.full(n, 77, dtype)
    if in_place and rank == root:
        out = x[rank * n : (rank + 1) * n]
    assert comm.scatter(x, root, out, algorithm=name) is out
    np.testing.assert_array_equal(out, part(root, p * n)[rank * n : (rank + 1) * n].astype(dtype))
    if kept is not None:
        np.testing.assert_array_equal(x, kept)


def alltoall(comm, name, n, dtype, root, in_place):
    p, rank = comm.size, comm.rank
    x = part(rank, p * n).astype(dtype)
    out = x if in_place else np.full(p * n, 77, dtype)
    assert comm.alltoall(x, out, algorithm=name) is out
    mine = slice(rank * n, (rank + 1) * n)
    expected = np.concatenate([part(r, p * n)[mine] for r in range(p)]).astype(dtype)
    np.testing.assert_array_equal(out, expected)
    if not in_place:
        np.testing.assert_array_equal(x, part(rank, p * n).astype(dtype))


CHECKS: dict[str, Check] = {
    f.__name__: f
    for f in (
        allreduce,
        reduce,
        broadcast,
        allgather,
        gather,
        reduce_scatter,
        scatter,
        alltoall,
        scan,
        exscan,
    )
}
ROOTED = ("reduce", "broadcast", "gather", "scatter")
PAIRS = [(collective, name) for collective in CHECKS for name in names(collective)]
WITHOUT_NATIVE = [(collective, name) for collective, name in PAIRS if name != "native"]


def lengths(size: int) -> list[int]:
    """0, 1, one less than the ranks, as many, one more, and a large prime."""
    return sorted({0, 1, size - 1, size, size + 1, 1009})


def check(comm, collective, name, *arguments):
    """Check one call; where the algorithm cannot serve this communicator, that it says so."""
    why = cannot(comm, collective, name)
    if why is None:
        CHECKS[collective](comm, name, *arguments)
    else:
        able = "able to serve this call: native"
        said = re.escape(why) if comm.backend.native is None else able
        with pytest.raises(Unsupported, match=said):
            CHECKS[collective](comm, name, *arguments)


def check_lengths(comm, collective, name):
    """Check calls of awkward lengths, in place and not, with other roots."""
    for number, n in enumerate(lengths(comm.size)):
        for in_place in (False, True):
            check(comm, collective, name, n, "int64", (number + 1) % comm.size, in_place)
