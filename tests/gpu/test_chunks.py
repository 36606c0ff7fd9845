"""Chunks of a call that is staged."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpidist
from mpidist.calls import prepare
from mpidist.calls.call import Call
from mpidist.device.find import find_device
from mpidist.gpu.chunks import chunks, elements


@pytest.fixture
def device(emulated_device):
    return find_device()


@given(
    st.sampled_from(["allgather", "reduce_scatter", "alltoall", "allreduce"]),
    st.lists(st.integers(0, 9), min_size=1, max_size=4),
    st.integers(1, 200),
    st.data(),
)
def test_chunks_cover_everything_once(collective, counts, nbytes, data):
    size, rank = len(counts), data.draw(st.integers(0, len(counts) - 1))
    brings = counts[rank] if collective == "allgather" else sum(counts)
    gets = counts[rank] if collective == "reduce_scatter" else sum(counts)
    x, out = np.empty(brings), np.empty(gets)
    each = () if collective == "allreduce" else tuple(counts)
    even = len(set(each)) <= 1
    call = Call(
        collective,
        rank=rank,
        size=size,
        root=0,
        dtype=x.dtype,
        x=x,
        out=out,
        counts=each,
        out_counts=each,
        even=even,
    )
    seen_in, seen_out = np.zeros(brings, int), np.zeros(gets, int)
    for chunk in chunks(call, nbytes):
        for extents, seen in ((chunk.input_extents, seen_in), (chunk.output_extents, seen_out)):
            for start, stop in extents:
                seen[start:stop] += 1
        # However small the limit, a chunk has an element (8 bytes), or one of each rank's part.  An
        # alltoall of unequal counts is not cut.
        if collective == "allreduce":
            assert elements(chunk.input_extents) * 8 <= max(nbytes, 8)
        elif not call.uneven_alltoall:
            assert sum(chunk.counts) * 8 <= max(nbytes, 8 * size)
    assert (seen_in == 1).all() and (seen_out == 1).all()


def test_chunks_are_not_checked_again(device, monkeypatch):
    """The arguments are checked once, with the call; its chunks are made of that."""
    monkeypatch.setenv("MPIDIST_GPU_CHUNK_BYTES", "16")
    seen, check = [], prepare.as_input
    monkeypatch.setattr(prepare, "as_input", lambda *a, **k: (seen.append(a), check(*a, **k))[1])

    def on_rank(comm):
        x = find_device().array(np.arange(40.0))
        assert (comm.allreduce(x).get() == 2 * np.arange(40)).all()
        got = comm.iallgather(x[:7]).wait()
        assert got.get().tolist() == [*range(7)] * 2

    mpidist.run_simulated(2, on_rank)
    given = [x for x, *_ in seen if getattr(x, "dtype", None) == np.float64]
    assert len(given) == 2 * 2  # by each rank, for each call
