"""What a random sequence is made of: plain data that hypothesis draws, shrinks and prints.

A sequence means the same on every rank.  Numbers are taken modulo what there is (roots, ways,
ranks), so that every sequence that can be drawn can be played on any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

COLLECTIVES = (
    "allreduce",
    "reduce",
    "broadcast",
    "allgather",
    "gather",
    "reduce_scatter",
    "scatter",
    "alltoall",
    "barrier",
)
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
