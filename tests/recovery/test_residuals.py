"""What a communication hook has left out goes on with its rank, and to who takes its place."""

import gc
from types import SimpleNamespace

import numpy as np
import pytest

import mpidist
from mpidist import nn
from mpidist.errors import InvalidArgument
from mpidist.parallel import DDP
from mpidist.parallel.hooks import Compress, PowerSGD, TopK
from mpidist.recovery.residuals import Residuals, leaves_out
from mpidist.recovery.state import State
from tests.support import elastic_chaos
from tests.support.jobs import tolerant

STEPS = 40
needs_ulfm = pytest.mark.skipif(not tolerant(), reason="needs Open MPI")
OTHERS = [pytest.param(name, marks=pytest.mark.long) for name in ("powersgd", "compress")]


def train(wrapper, kills, spares, restarts=0, ranks=3):
    how = {"restarts": restarts, "survive": not restarts}
    finished, _, done = elastic_chaos.train(wrapper, STEPS, ranks, spares, KILL=kills, **how)
    assert finished.status == 0, finished.output
    return finished.output, done


@needs_ulfm
@pytest.mark.parametrize("wrapper", ["topk", *OTHERS])
def test_bits_are_those_of_a_run_without_a_loss(undisturbed, wrapper):
    """Lost in the first step, in which nothing was left out before, and later."""
    output, done = train(wrapper, "2:stepped:1 1:before:9 0:committed:20", spares=3)
    assert output.count("goes on with 3 ranks") == 3
    assert done == [undisturbed(wrapper, STEPS)] * 3, output


@pytest.mark.long
@needs_ulfm
@pytest.mark.parametrize("wrapper", ["topk", "powersgd"])
def test_fewer_ranks_go_on_with_what_each_has_left_out(wrapper):
    """Which the training asserts where it begins again."""
    output, done = train(wrapper, "1:before:9 0:after:20", spares=0)
    assert "goes on with 2 ranks" in output and len(done) == 1


@pytest.mark.long
@pytest.mark.parametrize("wrapper", ["topk", "powersgd"])
def test_next_start_of_a_job_goes_on_with_it(undisturbed, wrapper):
    output, done = train(wrapper, "1:after:20:0", spares=0, restarts=2)
    assert "start 2 of 3, from step 19 in memory" in output
    assert done == [undisturbed(wrapper, STEPS)] * 3, output


@pytest.mark.long
@needs_ulfm
def test_stages_cut_anew_begin_anew_and_say_so():
    """The part of a rank that is left is another one then, with other buckets."""
    output, done = train("pipeline-topk", "2:before:9", spares=0, ranks=4)
    assert "goes on with 3 ranks" in output and len(set(done)) == 1 and len(done) == 3
    assert "the hook of a DDP has left out so far is lost, as it has other buckets" in output


@pytest.mark.long
@needs_ulfm
def test_stages_with_replicas(undisturbed):
    output, done = train("pipeline-topk", "2:before:9 0:stepped:15", spares=2, ranks=4)
    assert done == [undisturbed("pipeline-topk", STEPS, 4)] * 4, output


def trained(comm, hook):
    model = DDP(nn.Linear(4, 3, seed=1), comm, hook=hook)
    model.backward(model(np.arange(8.0).reshape(2, 4) + comm.rank))
    model.sync_gradients()
    return model


def test_restored_in_another_hook(caplog):
    def on_rank(comm):
        model = trained(comm, TopK(0.2))
        state = Residuals(model).state()
        (bucket,) = state["buckets"]
        assert bucket["residual"].any()
        another = DDP(nn.Linear(4, 3, seed=1), comm, hook=TopK(0.2))
        another.adopt(model.sending())  # the order of the first step's gradients
        other = Residuals(another)
        other.load({"names": [["bias"], ["weight"]], "buckets": [{}, {}]})
        assert "has left out so far is lost, as it has other buckets" in caplog.text
        assert other.state() == {"names": state["names"], "buckets": [{}]}
        other.load(state)
        assert (other.state()["buckets"][0]["residual"] == bucket["residual"]).all()

    mpidist.run_simulated(2, on_rank)


def test_hooks_that_leave_something_out():
    hook = SimpleNamespace(save=list, restore=list)
    assert all(map(leaves_out, (TopK(), PowerSGD(), Compress(), hook)))
    rest = (None, Compress(feedback=False), len, SimpleNamespace(save=list))
    assert not any(map(leaves_out, rest))


def test_it_does_not_keep_the_ddp_alive():
    def on_rank(comm):
        model = trained(comm, TopK(0.2))
        residuals, state = Residuals(model), Residuals(model).state()
        del model
        gc.collect()
        assert residuals.state() == {"names": [], "buckets": []}
        residuals.load(state)

    mpidist.run_simulated(1, on_rank)


def test_state_without_copies_is_refused():
    """As each rank has left out something else: said when the DDP is made, and not at a loss."""

    def on_rank(comm):
        net = nn.Linear(4, 3)
        state = State(net=net, copies=False)
        state.begin(comm, {})
        DDP(net, comm, hook=Compress(feedback=False))
        with pytest.raises(InvalidArgument, match="copies=False: hook=TopK leaves out something"):
            DDP(net, comm, hook=TopK())

    mpidist.run_simulated(1, on_rank)


def test_optimizer_without_its_model_is_still_named():
    """What a hook has left out has arrays, which are no weights."""

    def on_rank(comm):
        net = nn.Linear(4, 3)
        state = State(optimizer=nn.SGD(net.parameters(), 0.1))
        state.begin(comm, {})
        state._keep_residuals(0, FakeDDP(FakeHook(3), comm))
        with pytest.raises(InvalidArgument, match="optimizer has parameters that no object of"):
            state.commit()

    mpidist.run_simulated(1, on_rank)


def test_ranks_with_unlike_numbers_of_hooks():
    """Each gets its own back, also when a second loss comes before its DDPs are made again."""
    found = []

    def program(comm):
        net, hooks = nn.Linear(4, 3, seed=1), {}
        state = State(net=net)
        state.begin(comm, {})
        for number in range(1 + comm.rank):
            hooks[number] = FakeHook(10 * comm.rank + number)
            state._keep_residuals(number, FakeDDP(hooks[number], comm))
        state.commit()
        assert sorted(state._residuals) == sorted(hooks)
        for _ in range(2):
            state.leave()
            state.begin(comm, {1: "was lost"})
        assert sorted(state._left_out) == sorted(hooks)
        for number in hooks:
            hooks[number].value = 0
            state._keep_residuals(number, FakeDDP(hooks[number], comm))
            found.append((comm.rank, number, hooks[number].value))
        assert not state._left_out

    mpidist.run_simulated(3, program)
    assert sorted(found) == [(r, n, 10 * r + n) for r in range(3) for n in range(1 + r)]


class FakeHook:
    """A hook whose state is a number."""

    def __init__(self, value):
        self.value = value

    def save(self, buckets):
        return [{"residual": np.array([self.value])}]

    def restore(self, buckets, states):
        self.value = int(states[0]["residual"][0])


class FakeDDP:
    """As much of a DDP as is asked: ranks that are threads would see those of all."""

    kept = []  # a Residuals keeps none alive

    def __init__(self, hook, comm):
        self.comm, self.buckets = comm, ["bucket"]
        self.reducer = SimpleNamespace(hook=hook, grouping=SimpleNamespace(names=lambda: [["w"]]))
        self.kept.append(self)
