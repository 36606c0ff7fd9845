"""Random sequences of calls, messages and memory, drawn by hypothesis; every result is exact.

Rank 0 draws, and shrinks what fails; the others play what it tells them, over a communicator that
mpidist knows nothing of.  A sequence has failed if it failed on any rank.

Steps are plain data that hypothesis draws, shrinks and prints.  A sequence means the same on every
rank.  Numbers are taken modulo what there is (roots, algorithms, ranks), so that every sequence
that can be drawn can be played on any number of ranks.
"""

from __future__ import annotations

import os
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from mpi4py import MPI

from mpidist import CollectiveConfig, Communicator, Op
from mpidist.backends.mpi import MpiBackend
from mpidist.errors import Unsupported
from mpidist.topology import pretended_hosts

COLLECTIVES = (
    "allreduce",
    "reduce",
    "broadcast",
    "allgather",
    "gather",
    "reduce_scatter",
    "scatter",
    "alltoall",
    "scan",
    "exscan",
    "barrier",
)
SCANS = ("scan", "exscan")
COMMS = ("world", "twin", "half")
DTYPES = (
    *("float32", "float64", "float16", "bfloat16", "int8", "uint8", "uint16", "int32", "int64"),
    *("uint64", "complex64", "complex128", "bool", "record"),
)
LAYOUTS = ("plain", "plain", "plain", "plain", "strided", "reversed", "0-d")
GUISES = ("array", "array", "tensor", "buffer")
PRIVATE = ("fresh", "kept")
SIZES = (0, 1, 2, 3, 5, 15, 17, 64, 251, 1009, 4096, 16_387, 30_011, 70_001)


@dataclass(frozen=True)
class Delay:
    """One rank comes later: it spins for so many microseconds."""

    rank: int
    microseconds: int


@dataclass(frozen=True)
class Call:
    """One collective, made `repeat` times in a row on the same arrays with new data.

    `way` is "auto", "symmetric" or a number that counts through all names there are.  `counts` are
    the parts of the ranks, in thirds of `n`; empty for equal parts.  `x` and `out` say whose
    memory it is: "fresh", "kept", or symmetric memory of a communicator, "own" that of the call;
    `out` may be "none", or "same" as x.  `layout` is that of both; arrays that are not contiguous
    are private.  `x_guise` and `out_guise` say as what they are passed, where that is possible for
    the dtype; `frozen` inputs are read-only.  `wild` data overflow or are NaN where the result is
    exact all the same.
    """

    collective: str
    comm: str
    way: str | int
    dtype: str
    n: int
    op: int
    root: int
    counts: tuple[int, ...]
    x: str
    out: str
    offset: int
    background: bool
    repeat: int
    salt: int
    delay: Delay
    layout: str
    x_guise: str
    out_guise: str
    frozen: bool
    wild: bool


@dataclass(frozen=True)
class Renew:
    """Give one piece of symmetric memory back, by name or by dropping it, and take another."""

    comm: str
    which: str
    free: bool
    n: int


@dataclass(frozen=True)
class Traffic:
    """Messages of plain mpi4py to a neighbour, under way while collectives go on."""

    distance: int
    n: int


@dataclass(frozen=True)
class Settle:
    """Wait for all that is in the background, in an order of its own."""

    seed: int


def calls() -> st.SearchStrategy[Call]:
    """Draw a call; half of them small, most of them blocking."""
    memory = st.sampled_from(("own", "own", "own", *COMMS, *PRIVATE))
    return st.builds(
        Call,
        collective=st.sampled_from(COLLECTIVES),
        comm=st.sampled_from(("world", *COMMS)),
        way=st.sampled_from(("auto", "symmetric", "symmetric")) | st.integers(0, 31),
        dtype=st.sampled_from(DTYPES),
        n=st.sampled_from(SIZES) | st.integers(0, 300),
        op=st.integers(0, 7),
        root=st.integers(0, 4),
        counts=st.just(()) | st.tuples(*[st.integers(0, 4)] * 5),
        x=memory,
        out=memory | st.sampled_from(("none", "same", "same")),
        offset=st.integers(0, 9),
        background=st.sampled_from((False, False, False, True)),
        repeat=st.integers(1, 4),
        salt=st.integers(0, 4),
        delay=st.builds(Delay, st.integers(0, 4), st.sampled_from((0, 0, 20, 300))),
        layout=st.sampled_from(LAYOUTS),
        x_guise=st.sampled_from(GUISES),
        out_guise=st.sampled_from(GUISES),
        frozen=st.sampled_from((False, False, True)),
        wild=st.booleans(),
    )


def sequences(longest: int = 30) -> st.SearchStrategy[list]:
    """Draw a sequence of steps."""
    others = st.one_of(
        st.builds(
            Renew,
            st.sampled_from(COMMS),
            st.sampled_from(("x", "out")),
            st.booleans(),
            st.sampled_from((1, 4097, 300_007, 1_100_000)),
        ),
        st.builds(Traffic, st.integers(1, 4), st.sampled_from((0, 1, 1000, 100_000))),
        st.builds(Settle, st.integers(0, 5)),
    )
    step = st.one_of(calls(), calls(), calls(), calls(), calls(), calls(), others)
    length = st.integers(1, longest)  # lists alone would mostly be short
    return length.flatmap(lambda n: st.lists(step, min_size=n, max_size=n))


BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HALVES = (np.dtype("float16"), BFLOAT16)
RECORD = np.dtype([("id", "i4"), ("place", "f8", (3,)), ("name", "S5")])


def _last(a, b):
    return b


def _larger(a, b):
    return np.maximum(a, b)


LAST = Op(_last, commute=False, name="last")
LARGER = Op(_larger, commute=True, name="larger")
OF_NUMBERS = ("sum", "max", "mean", "min", "prod", LAST, LARGER, "sum")
OPERATIONS = {
    "f": OF_NUMBERS,
    "i": ("sum", "max", "xor", "min", "prod", LAST, LARGER, "or"),
    "c": ("sum", "mean", "prod", LAST, "sum", "mean", "prod", LAST),
    "b": ("or", "and", "xor", "max", "min", LAST, "or", "xor"),
    "record": (LAST,) * 8,
}


def dtype_of(name: str) -> np.dtype:
    """Give the dtype of a name, also of ml_dtypes."""
    return {"bfloat16": BFLOAT16, "record": RECORD}.get(name) or np.dtype(name)


def value(n: int, dtype: np.dtype, rank: int, salt: int, product: bool = False) -> np.ndarray:
    """Give small whole numbers: sums, and products where asked for, are exact in every dtype."""
    numbers = np.arange(n) * 7 + rank * 3 + salt
    if dtype == RECORD:
        made = np.zeros(n, dtype)
        made["id"], made["place"] = numbers, numbers[:, None] / 8
        made["name"] = [b"%d" % (k % 99_999) for k in numbers]
        return made
    if dtype.kind == "b":
        return numbers % 3 == 0
    return (numbers % 2 + 1 if product else numbers % 5).astype(dtype)


def wild(n: int, dtype: np.dtype, op: Any, rank: int, salt: int) -> np.ndarray | None:
    """Give data that overflow, or with NaN, if the result is exact all the same; else None.

    Integers take all their values; what max and min compare is NaN here and there; the sum of half
    precisions does not fit into them, their mean does.
    """
    random = np.random.default_rng((n, rank, salt))
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        return random.integers(bounds.min, bounds.max, n, dtype, endpoint=True)
    if dtype.kind == "b":
        return random.integers(0, 2, n).astype(bool)
    if op in ("max", "min", LARGER) and (dtype.kind == "f" or dtype == BFLOAT16):
        numbers = random.integers(-100, 100, n).astype(dtype)
        numbers[random.random(n) < 0.2] = np.nan
        return numbers
    if op == "mean" and dtype == np.float16:
        return (random.integers(1200, 1500, n) * 32).astype(dtype)
    if op == "mean" and dtype == BFLOAT16:  # as wide as float32, but with 8 bits of precision
        return random.integers(1, 257, n).astype(dtype)
    return None


def alike(got: np.ndarray, expected: np.ndarray, op: Any, size: int) -> bool:
    """Tell whether a result is right: to the bit, but for what an algorithm may choose.

    That is which NaN max and min give; and whether a mean of half precision is added up in float32
    or each of the `size` inputs is divided first, which rounds as often.
    """
    dtype = expected.dtype
    if got.dtype != dtype or got.shape != expected.shape:
        return False
    if got.tobytes() == expected.tobytes():
        return True
    if op == "mean" and dtype in HALVES:
        bound = size * float(ml_dtypes.finfo(dtype).eps)
        return np.allclose(got.astype("f8"), expected.astype("f8"), rtol=bound, atol=0)
    both = (got != got) & (expected != expected)
    return op in ("max", "min", LARGER) and bool(((got == expected) | both).all())


def combined(op: Any, parts: list[np.ndarray]) -> np.ndarray:
    """Give what a reduction of the ranks' arrays must be, to the bit.

    Numpy's rules: integers wrap, max and min of a NaN are NaN.  A mean of half precision is what
    float32 gives: it does not overflow where the sum would.
    """
    dtype, rest = parts[0].dtype, parts[1:]
    if op == "mean" and dtype in HALVES:
        total = sum(part.astype(np.float32) for part in parts)
        return (total / np.float32(len(parts))).astype(dtype)
    if op is LAST:
        return parts[-1]
    known = {
        "sum": np.add,
        "mean": np.add,
        "prod": np.multiply,
        "max": np.maximum,
        "min": np.minimum,
        "or": np.bitwise_or,
        "and": np.bitwise_and,
        "xor": np.bitwise_xor,
        LARGER: np.maximum,
    }[op]
    total = parts[0]
    for part in rest:
        total = known(total, part).astype(dtype)
    if op == "mean":
        total = np.true_divide(total, np.asarray(len(parts), dtype)).astype(dtype)
    return total


SCALARS = ("allreduce", "reduce", "broadcast", "allgather", "gather", *SCANS)
"""Collectives that take an array of no axis."""
JOINING = ("allgather", "gather")


@dataclass
class Shape:
    """How many elements a call takes and gives on this rank, and at most on any."""

    takes: int
    gives: int
    most: int
    counts: Any = None


class Case:
    """A call of a sequence as rank `rank` of `size` makes it."""

    def __init__(self, call: Call, rank: int, size: int):
        self.call, self.rank, self.size = call, rank, size
        self.root = call.root % size
        self.dtype = dtype_of(call.dtype)
        kind = {"u": "i", "V": "f"}.get(self.dtype.kind, self.dtype.kind)
        self.op = OPERATIONS["record" if self.dtype == RECORD else kind][call.op]
        if self.op == "mean" and call.collective in SCANS:
            self.op = "sum"
        self.uneven = bool(call.counts)
        self.table = self.uneven and call.collective == "alltoall"
        self.scalar = call.layout == "0-d" and call.collective in SCALARS and not self.uneven
        self.n = 1 if self.scalar else call.n
        self.stride = {"strided": 2, "reversed": -1}.get(call.layout, 1)
        self.only_receives = call.collective == "broadcast" and rank != self.root
        self.counts = [self.n] * size
        if self.uneven:
            self.counts = [call.n * w // 3 for w in call.counts[:size]]
        self.shape = getattr(self, f"_{call.collective}")()

    # -- how many elements --------------------------------------------------------------------

    def _allreduce(self):
        return Shape(self.n, self.n, self.n)

    def _reduce(self):
        gives = self.n if self.rank == self.root else 0
        return Shape(self.n, gives, self.n)

    _broadcast = _scan = _allreduce

    def _exscan(self):
        return Shape(self.n, self.n if self.rank else 0, self.n)

    def _allgather(self):
        total = sum(self.counts)
        return Shape(self.counts[self.rank], total, total, self._given())

    def _gather(self):
        total = sum(self.counts)
        gives = total if self.rank == self.root else 0
        return Shape(self.counts[self.rank], gives, total, self._given())

    def _reduce_scatter(self):
        total = sum(self.counts)
        return Shape(total, self.counts[self.rank], total, self._given())

    def _scatter(self):
        total = sum(self.counts)
        takes = total if self.rank == self.root else 0
        return Shape(takes, self.counts[self.rank], total, self._given())

    def _alltoall(self):
        table = [self._row(r) for r in range(self.size)]
        most = max(max(map(sum, table)), max(map(sum, zip(*table))))
        given = None
        if self.uneven:
            given = table if self.call.salt % 2 else table[self.rank]
        return Shape(sum(table[self.rank]), sum(row[self.rank] for row in table), most, given)

    def _barrier(self):
        return Shape(0, 0, 0)

    def _given(self):
        return self.counts if self.uneven else None

    def _row(self, source: int) -> list[int]:
        """What `source` sends to each rank in alltoall."""
        if not self.uneven:
            return [self.n] * self.size
        weights = self.call.counts
        return [self.call.n * weights[(source + 2 * d) % 5] // 3 for d in range(self.size)]

    # -- what goes in and what comes out --------------------------------------------------------

    def data(self, salt: int, rank: int | None = None) -> np.ndarray:
        """Give what a rank brings; this rank if none is named."""
        of = self.rank if rank is None else rank
        takes = Case(self.call, of, self.size).shape.takes
        made = wild(takes, self.dtype, self.op, of, salt) if self.call.wild else None
        return value(takes, self.dtype, of, salt, self.op == "prod") if made is None else made

    def expected(self, salt: int) -> np.ndarray | None:
        """Give what this rank must get; None where it gets nothing."""
        name, rank, parts = self.call.collective, self.rank, []
        if name == "barrier" or (name in ("reduce", "gather") and rank != self.root):
            return None
        if name in ("broadcast", "scatter"):
            whole = self.data(salt, self.root)
            return whole if name == "broadcast" else whole[self._mine(self.counts)]
        if name == "exscan" and rank == 0:
            return None
        parts = [self.data(salt, r) for r in range(self.size)]
        if name in SCANS:
            return combined(self.op, parts[: rank + (name == "scan")])
        if name in ("allgather", "gather"):
            return np.concatenate(parts)
        if name == "alltoall":
            rows = [self._row(r) for r in range(self.size)]
            return np.concatenate([p[self._mine(row)] for p, row in zip(parts, rows)])
        total = combined(self.op, parts)
        return total[self._mine(self.counts)] if name == "reduce_scatter" else total

    def _mine(self, counts: list[int]) -> slice:
        start = sum(counts[: self.rank])
        return slice(start, start + counts[self.rank])

    @property
    def own_part(self) -> slice:
        """Where this rank's part lies in what all parts make up."""
        return self._mine(self.counts)


try:
    import torch

    from mpidist.device.tensors import as_tensor
except ImportError:
    torch = None

POOL = 600_007  # bytes of a piece at first: no multiple of anything
EDGE = 64  # bytes on either side of an array that nobody may touch
JUNK = 0x5A
Place = tuple[str, str]  # whose memory, and whether inputs or results lie there


@dataclass
class Arrays:
    """The arrays of one call on this rank, and what is passed for them."""

    x: np.ndarray
    out: np.ndarray | None
    places: tuple[Place, ...]
    edges: list[np.ndarray] = field(default_factory=list)
    given_x: Any = None
    given_out: Any = None

    def fill(self, data: np.ndarray | None) -> None:
        """Make ready for a call: `data` into x, junk into the rest."""
        for array in (*self.edges, self.out, self.x):
            if array is not None:
                array[...] = np.frombuffer(bytes([JUNK]) * array.itemsize, array.dtype)[0]
        if data is not None:
            self.x[...] = data.reshape(self.x.shape)

    def pass_on(self, case: Case) -> None:
        """Make what is passed: the arrays, or tensors and buffers on their memory."""
        step, x, out = case.call, self.x, self.out
        if case.scalar:
            x = x.reshape(())
            if out is not None and out.size and step.collective not in JOINING:
                out = out.reshape(())
        read = step.collective == "broadcast" and case.rank == case.root and out is None
        written = case.only_receives or (out is not None and np.may_share_memory(x, out))
        frozen = step.frozen and (read or not written)
        if frozen:
            x = x.view()
            x.flags.writeable = False
        # PyTorch would warn of read-only memory, and has reversed tensors of one element only; the
        # kind of the result is to be alike everywhere: a scatter's is that of the root's array.
        no_tensor = step.frozen or step.layout == "reversed"
        guise = "array" if no_tensor and step.x_guise == "tensor" else step.x_guise
        self.given_x = disguised(x, guise)
        if out is not None:
            self.given_out = disguised(out, step.out_guise)
            if self.out is self.x and not frozen and guise == step.out_guise:
                self.given_out = self.given_x

    def edges_hold(self) -> bool:
        """Tell whether nobody wrote beside an array."""
        return all((edge == JUNK).all() for edge in self.edges)


def disguised(array: np.ndarray, guise: str) -> Any:
    """Return what is passed for an array: itself, a tensor or a buffer, if there is such a one."""
    if guise == "tensor" and torch is not None and array.dtype != RECORD:
        return array if any(step < 0 for step in array.strides) else as_tensor(array)
    if guise == "buffer" and array.dtype != BFLOAT16:
        room = getattr(array.base, "obj", None)
        return room if isinstance(room, bytearray) else memoryview(array)
    return array


def undisguised(got: Any) -> Any:
    """Return an array on the memory of a result."""
    if torch is not None and isinstance(got, torch.Tensor):
        made = got.numpy() if got.dtype is not torch.bfloat16 else got.view(torch.int16).numpy()
        return made.view(BFLOAT16) if got.dtype is torch.bfloat16 else made
    return np.asarray(got)


class Memory:
    """Pieces of memory by place; a piece of 0 bytes is not there yet."""

    def __init__(self) -> None:
        self.pieces = {("kept", which): np.zeros(POOL, np.uint8) for which in ("x", "out")}

    def arrays(self, case: Case) -> Arrays:
        """Choose the memory of a call, and as what it is passed."""
        made = self._arrays(case)
        made.pass_on(case)
        return made

    def _arrays(self, case: Case) -> Arrays:
        """Choose the memory of a call: alike on all ranks, for all know the longest array."""
        step, shape, edges = case.call, case.shape, []

        def array(place: Place, n: int) -> np.ndarray:
            return self._array(place, n, case, edges)

        here, there = (self._kind(step.x, case), "x"), (self._kind(step.out, case), "out")
        root, same = case.rank == case.root, step.out == "same"
        if step.collective in ("gather", "scatter") and here[0] not in PRIVATE:
            same = False  # the root's own part has another place than the others' arrays
        if same or there[0] == "same":
            there = (here[0], "out")
        if same and (step.collective == "allgather" or (step.collective == "gather" and root)):
            out = array(there, shape.gives)
            return Arrays(out[case.own_part], out, (there,), edges)
        x, out = array(here, shape.takes), None
        if not same or (step.collective == "scatter" and not root):
            if there[0] != "none":
                out = array(there, shape.gives)
            return Arrays(x, out, (here, there), edges)
        if step.collective in ("reduce_scatter", "scatter"):
            out = x[case.own_part]
        elif step.collective in ("allreduce", "reduce", "alltoall", *SCANS) and not case.table:
            out = x
        return Arrays(x, out, (here,), edges)

    def _kind(self, kind: str, case: Case) -> str:
        if kind in ("fresh", "none", "same"):
            return kind
        kind = case.call.comm if kind == "own" else kind
        kind = "kept" if case.stride != 1 and kind not in PRIVATE else kind
        kind = kind if (kind, "x") in self.pieces else "kept"
        most = case.shape.most * abs(case.stride)
        need = (case.call.offset + most) * case.dtype.itemsize + 2 * EDGE
        fits = all(self.pieces[kind, which].size >= need for which in ("x", "out"))
        return kind if fits else "fresh"

    def _array(self, place: Place, n: int, case: Case, edges: list) -> np.ndarray:
        size, many = case.dtype.itemsize, n * abs(case.stride)
        if place[0] == "fresh":
            if case.dtype == np.uint8 and case.stride == 1:
                return np.frombuffer(bytearray(n), np.uint8)
            return np.empty(many, case.dtype)[:: case.stride]
        piece, start = self.pieces[place], EDGE + case.call.offset * size
        stop = start + many * size
        edges += [piece[start - EDGE : start], piece[stop : stop + EDGE]]
        if case.stride == 2:
            edges.append(piece[start:stop].reshape(n, 2, size)[:, 1])
        return piece[start:stop].view(case.dtype)[:: case.stride]


class Player:
    """One rank in one sequence: communicators and memory of its own, and what is under way.

    Attributes
    ----------
    counts : Counter
        How often each way served a call, and what else was done.
    wrong : list of str
        What was not as it must be.
    """

    def __init__(self, timeout: float):
        self.counts: Counter = Counter()
        self.wrong: list[str] = []
        self.timeout, self.plain = timeout, MPI.COMM_WORLD.Dup()
        hosts = pretended_hosts(MPI.COMM_WORLD.size, os.environ)
        backend = MpiBackend(MPI.COMM_WORLD, hosts)
        world = Communicator(backend, CollectiveConfig(timeout=timeout))
        twin = world.split(0, key=-world.rank)  # the same ranks in reverse order
        half = world.split(world.rank % 2)
        self.comms = {"world": world, "twin": twin, "half": half}
        self.memory = Memory()
        self.pending: list = []  # (places in use, work, check)
        self.messages: list = []
        self.step = "the beginning"
        for name in self.comms:
            for which in ("x", "out"):
                self._take(name, which, POOL)

    def play(self, sequence: list) -> None:
        """Play to the end: a wrong result must not keep the other ranks waiting."""
        for number, step in enumerate(sequence):
            self.step = f"step {number}: {step}"
            getattr(self, f"_{type(step).__name__.lower()}")(step)
        self.step = "the end"
        self._settle(Settle(0))
        self._receive()
        for comm in reversed(self.comms.values()):
            comm.free()
        self.plain.Free()

    def _note(self, right: bool, text: str) -> None:
        if not right:
            self.wrong.append(f"{text}, in {self.step}")

    # -- steps other than calls -----------------------------------------------------------------

    def _settle(self, step: Settle) -> None:
        for k in np.random.default_rng(step.seed).permutation(len(self.pending)):
            _, work, check = self.pending[int(k)]
            check(work.wait())
        self.pending = []

    def _free_of_work(self, *places) -> None:
        if any(place in busy for busy, _, _ in self.pending for place in places):
            self._settle(Settle(0))

    def _traffic(self, step: Traffic) -> None:
        rank, size = self.plain.rank, self.plain.size
        to, source = (rank + step.distance) % size, (rank - step.distance) % size
        here, there = np.full(step.n, rank, "i4"), np.empty(step.n, "i4")
        requests = [self.plain.Irecv(there, source), self.plain.Isend(here, to)]
        self.messages.append((requests, there, source, here))
        self.counts["messages"] += 1
        if len(self.messages) > 3:
            self._receive()

    def _receive(self) -> None:
        until = time.monotonic() + self.timeout
        for requests, there, source, _ in self.messages:
            while not MPI.Request.Testall(requests):
                if time.monotonic() > until:
                    raise TimeoutError(f"the message of rank {source} has not come")
                os.sched_yield()
            self._note((there == source).all(), f"the message of rank {source} is another")
        self.messages = []

    def _renew(self, step: Renew) -> None:
        place = (step.comm, step.which)
        self._free_of_work(place)
        old = self.memory.pieces.pop(place)
        if step.free:
            self.comms[step.comm].free(old)
        del old
        self._take(*place, step.n)
        self.counts["renewed"] += 1

    def _take(self, name: str, which: str, n: int) -> None:
        made = self.comms[name].empty(n, "uint8")
        self._note(not made.any(), "memory that comm.empty() gave is not zero")
        self.memory.pieces[name, which] = made

    # -- calls ----------------------------------------------------------------------------------

    def _call(self, step: Call) -> None:
        comm = self.comms[step.comm]
        case = Case(step, comm.rank, comm.size)
        arrays = self.memory.arrays(case)
        self._free_of_work(*arrays.places)
        name = self._way(comm, step)
        for again in range(1 if step.background else step.repeat):
            salt = step.salt + again
            arrays.fill(None if case.only_receives else case.data(salt))
            if step.delay.rank % comm.size == comm.rank:
                spin(step.delay.microseconds)
            try:
                given = self._make(comm, case, name, arrays)
            except Unsupported:  # on every rank, or the next call shows that it was not
                self.counts["refused"] += 1
                return
            self.counts[f"{'i' * step.background}{name}"] += 1
            if torch is not None:
                self.counts["tensors"] += isinstance(arrays.given_x, torch.Tensor)
            if not step.background:
                self._check(case, arrays, given, salt)
                continue
            self.pending.append(
                (arrays.places, given, lambda got, s=salt: self._check(case, arrays, got, s))
            )
            if len(self.pending) > 5:
                self._settle(Settle(step.salt))

    @staticmethod
    def _way(comm: Communicator, step: Call) -> str:
        if isinstance(step.way, str):
            return step.way
        names = [way.name for way in comm.explain(step.collective, 64)[1]]
        return names[step.way % len(names)]

    @staticmethod
    def _make(comm: Communicator, case: Case, name: str, arrays: Arrays):
        step = case.call
        call = getattr(comm, "i" * step.background + step.collective)
        options: dict = {"algorithm": name}
        if step.collective == "barrier":
            return call(**options)
        if step.collective in ("allreduce", "reduce", "reduce_scatter", *SCANS):
            options["op"] = case.op
        if step.collective in ("reduce", "broadcast", "gather", "scatter"):
            options["root"] = case.root
        if case.shape.counts is not None:
            options["counts"] = case.shape.counts
        no_part = step.collective in ("reduce", "gather") and case.rank != case.root
        return call(arrays.given_x, out=None if no_part else arrays.given_out, **options)

    def _check(self, case: Case, arrays: Arrays, got, salt: int) -> None:
        self._note(arrays.edges_hold(), "memory beside an array was written to")
        expected = case.expected(salt)
        if expected is None:
            self._note(got is None, f"{got!r} was given where nothing is to be given")
        else:
            if case.scalar and case.call.collective not in JOINING:
                expected = expected.reshape(())
            self._check_kind(case, arrays, got)
            got = undisguised(got)
            right = alike(got, expected, case.op, case.size)
            self._note(right, f"got {got!r}, expected {expected!r}")
        written = got is not None and np.may_share_memory(arrays.x, got)
        if not case.only_receives and not written:
            same = arrays.x.tobytes() == case.data(salt).tobytes()
            self._note(same, "the input was changed")

    def _check_kind(self, case: Case, arrays: Arrays, got) -> None:
        """Note where what was given to be filled is not what is returned; tensors for tensors."""
        kept = arrays.given_out
        if kept is None and case.call.collective == "broadcast":
            kept = arrays.given_x
        if kept is not None:
            self._note(got is kept, f"got {got!r}, and not the object that was to be filled")
        elif torch is not None:
            wanted = isinstance(arrays.given_x, torch.Tensor)
            right = isinstance(got, torch.Tensor) == wanted
            self._note(right, f"got a {type(got).__name__} for a {type(arrays.given_x).__name__}")


def spin(microseconds: int) -> None:
    """Come later, and let others have the core meanwhile."""
    until = time.perf_counter() + microseconds / 1e6
    while time.perf_counter() < until:
        os.sched_yield()


SECONDS = float(os.environ.get("MPIDIST_STRESS_SECONDS", "20"))
os.environ["MPIDIST_STREAM_BYTES"] = "4K"  # what is drawn is shorter than the default
SHRINK_SECONDS = 60.0  # to look for a shorter sequence once one has failed
TIMEOUT = 15.0
EXAMPLES = 25  # between two seeds: a seed that is told is soon back at its failure


class Group:
    """The ranks that play together."""

    def __init__(self):
        self.control = MPI.COMM_WORLD.Dup()
        self.counts = Counter()
        self.failed_at = None
        self.failures = set()

    def lead(self, sequence):
        """Play on all ranks; raise what any of them says."""
        told = repr(sequence)
        late = self.failed_at is not None and time.monotonic() - self.failed_at > SHRINK_SECONDS
        if late and told not in self.failures:
            return  # no time left to find a shorter one
        self.control.bcast(sequence)
        verdicts = self.play(sequence)
        if any(verdicts):
            lines = [f"rank {rank}: {text}" for rank, text in enumerate(verdicts) if text]
            if self.failed_at is None:
                self.failed_at = time.monotonic()
                print("\nfailed at first:", told, *lines, sep="\n", flush=True)
            self.failures.add(told)
            raise AssertionError("\n".join(lines))

    def follow(self):
        while (sequence := self.control.bcast(None)) is not None:
            self.play(sequence)

    def play(self, sequence):
        """Play here; give what went wrong on each rank, or None."""
        wrong = None
        try:
            player = Player(TIMEOUT)
            player.play(sequence)
            self.counts += player.counts
            self.counts["sequences"] += 1
            wrong = "\n".join(player.wrong[:3]) or None
        except Exception:
            wrong = traceback.format_exc()
        return self.control.allgather(wrong)

    def search(self, seed, seconds):
        """Draw until the time is over."""
        until = time.monotonic() + seconds
        profile = settings(
            max_examples=EXAMPLES,
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            print_blob=False,
        )
        try:
            while time.monotonic() < until:
                self.seed, seed = seed, seed + 1

                @hypothesis.seed(self.seed)
                @profile
                @given(sequences())
                def attempt(sequence):
                    if time.monotonic() < until or self.failed_at is not None:
                        self.lead(sequence)

                attempt()
        finally:
            self.control.bcast(None)


@pytest.mark.timeout(0)
def test_random_sequences():
    group = Group()
    if MPI.COMM_WORLD.rank:
        group.follow()
        return
    seed = int(os.environ.get("MPIDIST_STRESS_SEED", time.time()))
    try:
        group.search(seed, SECONDS)
    except BaseException:
        print(f"\nagain with MPIDIST_STRESS_SEED={group.seed}", flush=True)
        raise
    print(f"\nseeds {seed} to {group.seed}:", *sorted(group.counts.items()), flush=True)
    assert group.counts["sequences"] and group.counts["native"]
    assert group.counts["symmetric"] or os.environ.get("MPIDIST_RANKS_PER_NODE")
