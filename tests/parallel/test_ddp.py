"""DDP and Grid with every rank a thread, and buckets as pure data."""

import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist import run_simulated
from mpidist.errors import InvalidArgument
from mpidist.nn import Module, Parameter
from mpidist.parallel import DDP, assign_buckets
from tests.support import ddp_cases
from tests.support.training_kits import skip_if_too_few


class OneWeight(Module):
    """The module of the original's tests."""

    def __init__(self, values):
        self.weight = Parameter(np.array(values, np.float32))

    def forward(self, x):
        return x

    def backward(self, grad):
        return grad


def test_ddp_sync_gradients():
    def rank_main(comm):
        ddp = DDP(OneWeight([1, 2, 3]), comm)
        ddp.module.weight.grad = np.full(3, comm.rank, np.float32)
        ddp.sync_gradients()
        return ddp.module.weight.grad.tolist()

    assert run_simulated(4, rank_main) == [[1.5, 1.5, 1.5]] * 4


def test_ddp_broadcast_parameters():
    def rank_main(comm):
        ddp = DDP(OneWeight([10, 20, 30] if comm.rank == 0 else [0, 0, 0]), comm)
        ddp.broadcast_parameters(0)
        return ddp.module.weight.data.tolist()

    assert run_simulated(3, rank_main) == [[10, 20, 30]] * 3


def test_stats():
    """Times are means over the steps; without a step zeros."""

    def rank_main(comm):
        model = DDP(OneWeight([1, 2, 3]), comm)
        zero = model.stats()
        assert (zero.steps, zero.compute, zero.hidden) == (0, 0.0, 0.0)
        clock = model.reducer.clock
        clock.steps, clock.compute, clock.exposed = 4, 8.0, 4.0
        clock.communication, clock.hidden = 12.0, 2.0
        found = model.stats()
        assert (found.steps, found.compute, found.exposed) == (4, 2.0, 1.0)
        assert (found.communication, found.hidden, found.bytes) == (3.0, 0.5, 12)
        assert str(found).startswith(
            "4 steps: compute 2,000 ms, exposed 1,000 ms, communication 3,000 ms (17% hidden), "
            "12 bytes in"
        )
        scalars = found.scalars()
        assert scalars["compute"] == 2.0 and scalars["bytes"] == 12.0 and "overlap" not in scalars
        assert {type(value) for value in scalars.values()} == {float}

    run_simulated(2, rank_main)


def test_ddp_delegates_module_trait():
    def rank_main(comm):
        ddp = DDP(OneWeight([1, 2]), comm)
        assert ddp.training
        assert ddp.eval() is ddp and not ddp.training and not ddp.module.training
        ddp.train()
        assert ddp.training
        assert len(ddp.parameters()) == 1
        assert ddp.named_parameters()[0][0] == "weight"
        assert ddp.comm is comm and ddp.forward(3) == ddp(3) == ddp.backward(3) == 3
        assert "1 bucket on 1 rank)" in repr(ddp)

    run_simulated(1, rank_main)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("case", ddp_cases.CASES, ids=lambda case: case.__name__)
def test_ddp(case, size):
    skip_if_too_few(case, size)
    run_simulated(size, case)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_buckets_are_in_flight_together(size):
    begun = threading.Event()
    run_simulated(size, lambda comm: ddp_cases.buckets_are_in_flight_together(comm, begun))


@pytest.mark.parametrize("argument", ["bucket_bytes", "first_bucket_bytes"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, None])
def test_bad_bucket_sizes(argument, value):
    def rank_main(comm):
        with pytest.raises(InvalidArgument, match=f"rank 0: {argument}={value}: .*>= 1"):
            DDP(OneWeight([1]), comm, **{argument: value})

    run_simulated(1, rank_main)


def test_gradient_of_another_shape_is_refused():
    def rank_main(comm):
        ddp = DDP(OneWeight([1, 2]), comm)
        ddp.module.weight.grad = np.zeros(3, np.float32)
        with pytest.raises(InvalidArgument, match=r"rank 0: .* weight has shape \(3,\).*\(2,\)"):
            ddp.sync_gradients()

    run_simulated(1, rank_main)


def test_shared_parameters_are_synced_once():
    def rank_main(comm):
        module = ddp_cases.Weights(np.ones(2), np.ones(3))
        module.weights.append(module.weights[0])
        ddp = DDP(module, comm)
        assert [name for name, _ in ddp.named_parameters()] == ["0", "1"]
        module.weights[0].grad = np.ones(2)
        ddp.sync_gradients()
        np.testing.assert_array_equal(module.weights[0].grad, 1.0)

    run_simulated(2, rank_main)


def test_bucket_examples():
    assert assign_buckets([], [], 8, 4) == []
    assert assign_buckets([4] * 5, "aaaaa", 8, 4) == [(4,), (3, 2), (1, 0)]
    assert assign_buckets([4, 100, 4, 4], "aaaa", 8, 8) == [(3, 2), (1,), (0,)]
    assert assign_buckets([4] * 4, "abab", 8, 8) == [(3, 1), (2, 0)]
    assert assign_buckets([4] * 4, "abab", 4, 4) == [(3,), (2,), (1,), (0,)]
    assert assign_buckets([0, 0, 8, 0], "aaaa", 8, 8) == [(3, 2, 1, 0)]


@given(
    st.lists(st.tuples(st.integers(0, 50), st.sampled_from("ab")), max_size=30),
    st.integers(1, 60),
    st.integers(1, 60),
)
def test_bucket_properties(parameters, most, first):
    sizes, kinds = [s for s, _ in parameters], [k for _, k in parameters]
    buckets = assign_buckets(sizes, kinds, most, first)
    assert sorted(i for b in buckets for i in b) == list(range(len(parameters)))
    for bucket in buckets:
        assert len({kinds[i] for i in bucket}) == 1
        assert list(bucket) == sorted(bucket, reverse=True)
        assert len(bucket) == 1 or sum(sizes[i] for i in bucket) <= max(most, first)
    ready = [min(bucket) for bucket in buckets]
    assert ready == sorted(ready, reverse=True)


def test_sync_gradients_calls():
    """A gradient passes one frame in each of ddp, reducer, transport and the communicator.

    One small allreduce tells which parameters no rank has used.
    """

    def rank_main(comm):
        module = ddp_cases.Weights(np.ones(2))
        ddp = DDP(module, comm, overlap="none")
        ways = []

        def watch(frame, event, _):
            if event == "call" and frame.f_code.co_name == "allreduce":
                names = []
                while names[-1:] != ["sync_gradients"]:
                    names.append(frame.f_code.co_name)
                    frame = frame.f_back
                ways.append(names[::-1])

        for step in range(5):
            module.weights[0].grad = np.full(2, comm.rank + 1.0)
            sys.setprofile(watch if step == 4 else None)
            ddp.sync_gradients()
            sys.setprofile(None)
        flags = ["sync_gradients", "sync", "_take_back_unused", "allreduce"]
        assert ways == [["sync_gradients", "sync", "send", "allreduce"], flags]

    run_simulated(2, rank_main)
