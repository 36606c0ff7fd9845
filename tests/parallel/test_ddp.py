"""DDP and Grid on simulated ranks and under mpiexec, and buckets as pure data."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist import run_simulated
from mpidist.errors import ConfigError, InvalidArgument, InvalidRank
from mpidist.nn import SGD, CrossEntropy, Linear, Module, Parameter, ReLU, Sequential
from mpidist.parallel import DDP, assign_buckets
from mpidist.selection.config import CollectiveConfig
from mpidist.topology import Grid
from tests.support.training_kits import Weights


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


def mlp(seed=0, dtype=np.float64):
    random = np.random.default_rng(seed)
    layers = Linear(6, 8, seed=random, dtype=dtype), Linear(8, 3, seed=random, dtype=dtype)
    return Sequential(layers[0], ReLU(), layers[1])


@pytest.mark.ranks(1, 2, 3, 4, 5)
def test_sync_gradients_gives_the_mean(comm):
    for method in ("sync_gradients", "overlapped_sync_gradients"):
        shapes = [(3,), (), (2, 5), (0,), (1, 7, 1)]
        dtypes = [np.float32, np.float64, np.float32, np.float32, np.float64]
        module = Weights(*map(np.zeros, shapes, dtypes))
        ddp = DDP(module, comm, bucket_bytes=40, first_bucket_bytes=8)
        for number, p in enumerate(module.weights, 1):
            p.grad = np.full_like(p.data, number * (comm.rank + 1))
        getattr(ddp, method)()
        for number, p in enumerate(module.weights, 1):
            assert p.grad.shape == p.data.shape and p.grad.dtype == p.data.dtype
            np.testing.assert_allclose(p.grad, number * (comm.size + 1) / 2, rtol=1e-6)


@pytest.mark.ranks(1, 2, 3, 4, 5)
def test_sync_gradients_missing_count_as_zero(comm):
    module = Weights(np.ones(4), np.ones(3))
    ddp = DDP(module, comm)
    if comm.rank == comm.size - 1:
        module.weights[0].grad = np.full(4, float(comm.size))
    ddp.sync_gradients()
    np.testing.assert_allclose(module.weights[0].grad, 1.0)
    assert module.weights[1].grad is None  # on all ranks
    ddp = DDP(Weights(np.ones(3)), comm, unused="zero")
    ddp.sync_gradients()
    np.testing.assert_array_equal(ddp.parameters()[0].grad, np.zeros(3))


@pytest.mark.ranks(1, 2, 3, 4, 5)
def test_sync_gradients_without_callbacks_are_kept(comm):
    """Of a library that does not report additions: nobody knows whether zeros were added."""
    weights = [SimpleNamespace(data=np.ones(2), grad=None) for _ in range(2)]
    ddp = DDP(SimpleNamespace(parameters=lambda: weights), comm)
    for _ in range(3):
        ddp.reducer.prepare()
        if weights[0].grad is None:
            weights[0].grad = np.zeros(2)
        weights[0].grad += comm.rank
        ddp.sync_gradients()
        np.testing.assert_allclose(weights[0].grad, (comm.size - 1) / 2)
        assert weights[1].grad is None if comm.size == 1 else not weights[1].grad.any()
        ddp.zero_grad()
    weights[0].grad = np.full(2, 1.0)
    ddp.sync_gradients()
    np.testing.assert_allclose(weights[0].grad, 1.0)
    assert weights[1].grad is None


@pytest.mark.ranks(1, 2, 3, 4, 5)
def test_sync_gradients_added_by_hand_are_kept(comm):
    """A layer may add to the zeroed view of a bucket without telling the parameter."""
    module = Weights(np.ones(2), np.ones(2))
    ddp = DDP(module, comm)
    for _ in range(3):
        ddp.reducer.prepare()
        p = module.weights[0]
        if p.grad is None:
            p.grad = np.zeros(2)
        if comm.rank == 0:
            p.grad += comm.size
        ddp.sync_gradients()
        np.testing.assert_allclose(p.grad, 1.0)
        assert module.weights[1].grad is None
        ddp.zero_grad()


@pytest.mark.ranks(1, 2, 3, 4, 5)
def test_buckets_are_kept_across_steps(comm):
    module = Weights(np.ones(4), np.ones((2, 3)))
    ddp = DDP(module, comm, bucket_bytes=50, first_bucket_bytes=50)
    seen = []
    for step in range(3):
        for p in module.weights:
            p.grad = np.full_like(p.data, step + comm.rank)
        ddp.overlapped_sync_gradients()
        for p in module.weights:
            np.testing.assert_allclose(p.grad, step + (comm.size - 1) / 2)
        seen.append([id(bucket.flat) for bucket in ddp.buckets])
    assert seen[0] == seen[1] == seen[2] and len(seen[0]) == 2
    # A backward that adds to what is there works in the buffer itself.
    for p in module.weights:
        p.grad += 1.0
    ddp.sync_gradients()
    np.testing.assert_allclose(module.weights[1].grad, 3 + (comm.size - 1) / 2)
    ddp.zero_grad(set_to_none=False)
    ddp.sync_gradients()
    np.testing.assert_array_equal(module.weights[1].grad, 0.0)
    ddp.zero_grad()
    ddp.sync_gradients()
    assert module.weights[1].grad is None


@pytest.mark.ranks(1, 2, 3, 4, 5)
def test_broadcast_parameters_is_in_place(comm):
    for root in range(comm.size):
        net = mlp(seed=comm.rank)
        before = [(p, p.data) for p in net.parameters()]
        optimizer = SGD(net.parameters())
        ddp = DDP(net, comm, init_sync=False)
        ddp.broadcast_parameters(root)
        for (p, data), q, expected in zip(
            before, net.parameters(), mlp(seed=root).parameters(), strict=True
        ):
            assert p is q and p.data is data
            np.testing.assert_array_equal(data, expected.data)
        assert optimizer.parameters == net.parameters()


@pytest.mark.ranks(1, 2, 3, 4, 5)
def test_broadcast_parameters_leaves_gradients(comm):
    module = Weights(np.ones(3))
    ddp = DDP(module, comm)
    module.weights[0].grad = np.full(3, 2.0)
    ddp.sync_gradients()
    ddp.broadcast_parameters()
    np.testing.assert_array_equal(module.weights[0].grad, 2.0)


@pytest.mark.ranks(1, 2, 3, 4, 5)
@pytest.mark.mpi(min_size=2)
def test_ddp_unlike_modules_are_refused_everywhere(comm):
    odd = comm.rank == comm.size - 1
    for unlike, said in (
        (np.zeros(4), rf"rank {comm.size - 1} has.*\(4,\).*rank 0 has.*\(3,\)"),
        (np.zeros(3, np.float32), "float32.*rank 0 has.*float64"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            DDP(Weights(unlike if odd else np.zeros(3)), comm)
    with pytest.raises(InvalidArgument, match=rf"rank {comm.size - 1} has .*rank 0 has nothing"):
        DDP(Weights(*[np.zeros(3)] * (2 if odd else 1)), comm)
    assert float(comm.allreduce(1.0)) == comm.size  # the communicator is still good


@pytest.mark.ranks(1, 2, 3, 4, 5)
def test_broadcast_parameters_wrong_root_is_refused(comm):
    with pytest.raises(InvalidRank, match=f"rank {comm.rank}: root={comm.size}"):
        DDP(Weights(np.zeros(3)), comm).broadcast_parameters(comm.size)


@pytest.mark.ranks(1, 2, 3, 4, 5)
def test_ddp_without_parameters_does_nothing(comm):
    ddp = DDP(Weights(), comm)
    ddp.broadcast_parameters()
    ddp.sync_gradients()
    ddp.overlapped_sync_gradients()
    assert ddp.parameters() == [] and ddp.buckets == ()


@pytest.mark.ranks(1, 2, 3, 4, 5)
def test_ddp_training_is_that_of_one_process(comm):
    """The mean is over the whole batch, though parts differ in size and some are empty."""
    random = np.random.default_rng(3)
    x, labels = random.normal(size=(11, 6)), random.integers(0, 3, 11)
    ddp, alone = DDP(mlp(), comm, 200, 100), mlp()
    steps = [(0, 11), (11 - comm.size, 11), (4, 5)]
    optimizers = SGD(ddp.parameters(), 0.1, 0.9), SGD(alone.parameters(), 0.1, 0.9)
    loss = CrossEntropy("sum")
    for first, last in steps:
        mine = slice(first + comm.rank, last, comm.size)
        loss(ddp(x[mine]), labels[mine])
        ddp.zero_grad()
        ddp.backward(loss.backward(comm.size / (last - first)))
        ddp.overlapped_sync_gradients()
        loss(alone(x[first:last]), labels[first:last])
        alone.zero_grad()
        alone.backward(loss.backward(1 / (last - first)))
        for p, q in zip(ddp.parameters(), alone.parameters(), strict=True):
            np.testing.assert_allclose(p.grad, q.grad, atol=1e-14)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.ranks(1, 2, 3, 4, 5)
def test_ddp_algorithm_is_passed_on(comm):
    module = Weights(np.zeros(5))
    for name in ("ring", "tree:3", "linear"):
        module.weights[0].grad = np.full(5, float(comm.rank))
        DDP(module, comm, algorithm=name).sync_gradients()
        np.testing.assert_allclose(module.weights[0].grad, (comm.size - 1) / 2)
    with pytest.raises(InvalidArgument, match="'rung'"):
        DDP(module, comm, algorithm="rung").sync_gradients()


@pytest.mark.ranks(1, 2, 3, 4, 5)
def test_grid_has_rows_and_columns(comm):
    for data in (d for d in range(1, comm.size + 1) if comm.size % d == 0):
        grid = Grid(comm, data=data)
        assert grid.shape == (data, comm.size // data)
        assert (grid.data.size, grid.pipe.size) == grid.shape
        assert (grid.data.rank, grid.pipe.rank) == (grid.data_index, grid.pipe_index)
        assert comm.rank == grid.pipe_index * data + grid.data_index
        same_stage = np.arange(data) + grid.pipe_index * data
        np.testing.assert_array_equal(grid.data.allgather(np.array([comm.rank])), same_stage)
        same_replica = np.arange(comm.size // data) * data + grid.data_index
        np.testing.assert_array_equal(grid.pipe.allgather(np.array([comm.rank])), same_replica)
    assert Grid(comm, data=-1, pipe=comm.size).shape == (1, comm.size)


@pytest.mark.ranks(1, 2, 3, 4, 5)
def test_grid_bad_shapes_are_refused(comm):
    size = comm.size
    for sides in ({"data": size + 1}, {"data": 2, "pipe": size}, {"pipe": 0}, {}, {"data": True}):
        with pytest.raises(ConfigError, match=f"rank {comm.rank}.* on {size} ranks"):
            Grid(comm, **sides)


@pytest.mark.ranks(2, 3, 5)
@pytest.mark.mpi(min_size=2)
def test_overlapped_sync_gradients_has_all_buckets_in_flight(comm):
    """No bucket can be done before the other ranks have begun, yet rank 0 starts them all."""
    module = Weights(*np.ones((3, 4)))
    watched = Watched(comm)
    ddp = DDP(module, watched, bucket_bytes=32, first_bucket_bytes=32, overlap="none")
    for p in module.weights:
        p.grad = np.full(4, float(comm.rank))
    if comm.rank == 0:
        watched.after_start = lambda: comm.send(np.ones(1), 1, tag=9)
        watched.wanted = len(ddp.buckets)
    elif comm.rank == 1:
        comm.recv(np.empty(1), 0, tag=9)
    ddp.overlapped_sync_gradients()
    assert ddp.in_flight_high_water == 3
    if comm.rank == 0:
        assert watched.open_together == 3
    for p in module.weights:
        np.testing.assert_allclose(p.grad, (comm.size - 1) / 2)


class Watched:
    """A communicator that counts the allreduces that are begun and not done."""

    def __init__(self, comm):
        self.comm = comm
        self.works, self.open_together = [], 0
        self.wanted, self.after_start = None, None

    def __getattr__(self, name):
        return getattr(self.comm, name)

    def iallreduce(self, *args, **options):
        work = self.comm.iallreduce(*args, **options)
        self.works.append(work)
        self.open_together = max(self.open_together, sum(not w.test() for w in self.works))
        if len(self.works) == self.wanted:
            self.after_start()
        return work


class Noted(Weights):
    """With a buffer, which differs from rank to rank and from step to step."""

    def __init__(self, comm):
        super().__init__(np.zeros(3))
        self.comm, self.noted = comm, np.zeros(2)

    def named_buffers(self):
        return [("noted", self.noted)]

    def zero_grad(self, set_to_none=True):
        self.weights[0].grad = None

    def step(self):
        self.zero_grad()


@pytest.mark.ranks(1, 2, 3, 4, 5)
@pytest.mark.mpi(min_size=2)
def test_join_buffers_come_from_the_lowest_unfinished_rank(comm):
    """They are those of the lowest rank that has not finished: a finished one has no new values."""
    module = Noted(comm)
    model = DDP(module, comm)
    with model.join(module) as joined:
        for step in range(1 + comm.rank):
            module.weights[0].grad = np.ones(3)
            module.noted[...] = 10 * comm.rank + step
            model.sync_gradients()
            assert (module.noted == 10 * step + step).all() and joined.root == step
            module.step()
    last = comm.size - 1
    assert (module.noted == 10 * last + last).all() and joined.first == (0, 1)


@pytest.mark.ranks(1, 2, 3, 4, 5)
def test_ddp_deadline_is_thirty_minutes(comm):
    """Unless the user has set a deadline: ranks validate and compile while others wait."""
    for seconds, kept in ((comm.timeout, 1800.0), (7.0, 7.0), (None, None)):
        own = comm.split(0)
        if own.timeout != CollectiveConfig().timeout or "timeout" in own.config.given:
            kept = seconds  # these tests have a deadline of their own
        own.timeout = seconds
        model = DDP(Weights(np.ones(3), np.ones(3)), own, 24, 24, overlap="polls")
        assert own.timeout == kept and model.reducer.comm.timeout == kept
        model.close()
        own.free()


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
        module = Weights(np.ones(2), np.ones(3))
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
        module = Weights(np.ones(2))
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
