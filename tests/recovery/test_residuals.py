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
@pytest.mark.parametrize(
    "kills, left, told",
    [
        ("2:before:9", 3, ""),  # of two replicas of two stages one of three is left
        ("1:before:9 3:before:9", 2, "of a stage has left out on 2 replicas is dropped: this job"),
    ],
)
def test_stages_on_fewer_ranks_begin_anew(kills, left, told):
    output, done = train("pipeline-topk", kills, spares=0, ranks=4)
    assert f"goes on with {left} ranks" in output and len(set(done)) == 1 and len(done) == left
    assert told in output


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
        for odd in (
            [["weight", "bias", 16]],
            [["bias", "weight", 15]],
            [["bias", 3], ["weight", 12]],
        ):
            other.load({"are": odd, "buckets": [{}]})
        assert other.state() == {"are": state["are"], "buckets": [{}]}
        other.load(state)
        assert (other.state()["buckets"][0]["residual"] == bucket["residual"]).all()

    mpidist.run_simulated(2, on_rank)
    assert caplog.text.count("has left out so far is lost, as it has other buckets now") == 3


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
        assert residuals.state() is None
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
        ddp = FakeDDP(3, comm)
        state._keep_residuals(ddp)
        with pytest.raises(InvalidArgument, match="optimizer has parameters that no object of"):
            state.commit()

    mpidist.run_simulated(1, on_rank)


def test_each_ddp_gets_its_own_back():
    """Also when a second loss comes before DDPs are made again, by the order of those in use."""
    found = []

    def program(comm):
        state = State(net=nn.Linear(4, 3, seed=1))
        state.begin(comm, {})
        made = [FakeDDP(10 * comm.rank + number, comm) for number in range(3)]
        for ddp in made:
            state._keep_residuals(ddp)
        del made[0], ddp  # as where each epoch has another one
        gc.collect()
        state.commit()
        for _ in range(2):
            state.leave()
            state.begin(comm, {1: "was lost"})
        made = [FakeDDP(0, comm) for number in range(comm.rank % 2 + 1)]
        for ddp in made:
            state._keep_residuals(ddp)
        found.append((comm.rank, [ddp.reducer.hook.value for ddp in made]))
        state.commit()
        late = FakeDDP(0, comm)  # the first ones have all that there was
        state._keep_residuals(late)
        assert late.reducer.hook.value == 0

    mpidist.run_simulated(3, program)
    assert sorted(found) == [(0, [1]), (1, [11, 12]), (2, [21])]


def test_ddp_of_some_of_the_ranks_is_told(caplog):
    """The others do not know that copies are needed."""

    def program(comm):
        state = State(net=nn.Linear(4, 3, seed=1))
        state.begin(comm, {})
        half = comm.split(comm.rank % 2)
        ddp = FakeDDP(3, half)
        state._keep_residuals(ddp)
        assert not state.copies

    mpidist.run_simulated(4, program)
    assert (
        caplog.text.count("what the hook of a DDP of some of the ranks has left out is lost") == 2
    )


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

    def __init__(self, value, comm):
        self.comm, self.reducer = comm, SimpleNamespace(hook=FakeHook(value))
        self.buckets = [SimpleNamespace(names=["w"], flat=np.zeros(1))]
