"""Random sequences of calls: collectives, algorithms, sizes, dtypes, roots, blocking and not.

All ranks draw from one seed, so they make the same calls; every result is exact.
"""

import os
import time

import numpy as np
import pytest

from mpidist.schedule import COLLECTIVES, algorithms

SECONDS = float(os.environ.get("MPIDIST_STRESS_SECONDS", "60"))
DTYPES = ("int8", "uint16", "int32", "int64", "float32", "float64", "complex64")
SIZES = (0, 1, 2, 3, 5, 17, 64, 1009, 4096, 30_011, 262_147)


class Player:
    """Draws calls, makes them, and knows what must come out."""

    def __init__(self, comm, seed):
        self.comm, self.random = comm, np.random.default_rng(seed)
        self.kept = [np.zeros(n, "float64") for n in (17, 1009, 30_011)]  # used again and again
        if comm.topology.num_nodes == 1 and comm.backend.native is not None:
            self.kept += [comm.empty(n, "float64") for n in (1009, 30_011)]
        self.pending = []
        self.calls = 0

    def pick(self, values):
        return values[int(self.random.integers(len(values)))]

    def value(self, n, dtype, rank, salt):
        return ((np.arange(n) * 7 + rank * 3 + salt) % 11).astype(dtype)

    def play(self):
        self.calls += 1
        collective = self.pick(sorted(COLLECTIVES))
        able = [a for a in algorithms(collective) if self.able(a)]
        name = self.pick([*(a.name for a in able), "native", "auto"])
        background = self.random.random() < 0.35
        work, check = getattr(self, collective)(name, "i" if background else "")
        if background:
            self.pending.append((work, check))
            if len(self.pending) > 6 or self.random.random() < 0.3:
                self.settle()
        else:
            check(work)

    def able(self, algorithm):
        return algorithm.unsupported(self.comm.size, groups=self.comm.topology.groups) is None

    def settle(self):
        for k in self.random.permutation(len(self.pending)):
            work, check = self.pending[int(k)]
            check(work.wait())
        self.pending = []

    def data(self, rows=1):
        """Give (array, salt): sometimes one of the kept arrays, refilled."""
        salt = int(self.random.integers(5))
        if rows == 1 and not self.pending and self.random.random() < 0.4:
            x = self.pick(self.kept)
            x[:] = self.value(x.size, x.dtype, self.comm.rank, salt)
            return x, salt
        n, dtype = self.pick(SIZES), self.pick(DTYPES)
        return self.value(n * rows, dtype, self.comm.rank, salt), salt

    def everyone(self, x, salt):
        return [self.value(x.size, x.dtype, r, salt) for r in range(self.comm.size)]

    def expect(self, expected):
        def check(got):
            if expected is None:
                assert got is None
            else:
                assert got.dtype == expected.dtype and got.shape == expected.shape
                assert (got == expected).all()

        return check

    def total(self, x, salt):
        return sum(self.everyone(x, salt)).astype(x.dtype)

    def allreduce(self, name, form):
        x, salt = self.data()
        out = x if self.random.random() < 0.5 else None
        call = getattr(self.comm, form + "allreduce")
        return call(x, out=out, algorithm=name), self.expect(self.total(x, salt))

    def reduce(self, name, form):
        x, salt = self.data()
        root = int(self.random.integers(self.comm.size))
        expected = self.total(x, salt) if self.comm.rank == root else None
        return getattr(self.comm, form + "reduce")(x, root=root, algorithm=name), self.expect(
            expected
        )

    def broadcast(self, name, form):
        x, salt = self.data()
        root = int(self.random.integers(self.comm.size))
        expected = self.value(x.size, x.dtype, root, salt)
        call = getattr(self.comm, form + "broadcast")
        return call(x, root=root, algorithm=name), self.expect(expected)

    def allgather(self, name, form):
        x, salt = self.data()
        expected = np.concatenate(self.everyone(x, salt))
        return getattr(self.comm, form + "allgather")(x, algorithm=name), self.expect(expected)

    def gather(self, name, form):
        x, salt = self.data()
        root = int(self.random.integers(self.comm.size))
        expected = np.concatenate(self.everyone(x, salt)) if self.comm.rank == root else None
        return getattr(self.comm, form + "gather")(x, root=root, algorithm=name), self.expect(
            expected
        )

    def reduce_scatter(self, name, form):
        x, salt = self.data(self.comm.size)
        each = x.size // self.comm.size
        expected = self.total(x, salt)[self.comm.rank * each : (self.comm.rank + 1) * each]
        call = getattr(self.comm, form + "reduce_scatter")
        return call(x, algorithm=name), self.expect(expected)

    def scatter(self, name, form):
        x, salt = self.data(self.comm.size)
        root = int(self.random.integers(self.comm.size))
        each = x.size // self.comm.size
        mine = slice(self.comm.rank * each, (self.comm.rank + 1) * each)
        expected = self.value(x.size, x.dtype, root, salt)[mine]
        out = np.empty(each, x.dtype)
        call = getattr(self.comm, form + "scatter")
        given = x if self.comm.rank == root else None
        return call(given, root=root, out=out, algorithm=name), self.expect(expected)

    def alltoall(self, name, form):
        x, salt = self.data(self.comm.size)
        each = x.size // self.comm.size
        mine = slice(self.comm.rank * each, (self.comm.rank + 1) * each)
        expected = np.concatenate([v[mine] for v in self.everyone(x, salt)])
        return getattr(self.comm, form + "alltoall")(x, algorithm=name), self.expect(expected)

    def barrier(self, name, form):
        return getattr(self.comm, form + "barrier")(algorithm=name), self.expect(None)


@pytest.mark.timeout(0)
def test_random_sequences(comm):
    seed = comm.broadcast_object(int(time.time()) if comm.rank == 0 else None)
    seed = int(os.environ.get("MPIDIST_STRESS_SEED", seed))
    player = Player(comm, seed)
    until = time.monotonic() + SECONDS
    go_on = True
    while go_on:
        try:
            for _ in range(100):
                player.play()
            player.settle()
        except Exception as error:
            raise AssertionError(f"seed {seed}, call {player.calls}: {error}") from error
        go_on = bool(comm.broadcast(np.array([time.monotonic() < until]), root=0)[0])
    if comm.rank == 0:
        print(f"\n{player.calls} calls on {comm.size} ranks, seed {seed}")
