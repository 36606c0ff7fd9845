"""What a communication hook has left out goes on with its rank, and to who takes its place."""

import gc

import numpy as np
import pytest

import mpidist
from mpidist import nn
from mpidist.errors import InvalidArgument
from mpidist.parallel import DDP
from mpidist.parallel.hooks import TopK
from mpidist.recovery.residuals import PREFIX, Residuals, has_some
from mpidist.recovery.state import State
from tests.support import elastic_chaos
from tests.support.jobs import tolerant

STEPS = 40
needs_ulfm = pytest.mark.skipif(not tolerant(), reason="needs Open MPI")
OTHERS = [pytest.param(name, marks=pytest.mark.long) for name in ("powersgd", "compress")]


def train(wrapper, kills, spares, restarts=0):
    how = {"restarts": restarts, "survive": not restarts}
    finished, _, done = elastic_chaos.train(wrapper, STEPS, 3, spares, KILL=kills, **how)
    assert finished.status == 0, finished.output
    assert "left out" not in finished.output
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


def trained(comm, hook):
    model = DDP(nn.Linear(4, 3, seed=1), comm, hook=hook)
    model.backward(model(np.arange(8.0).reshape(2, 4) + comm.rank))
    model.sync_gradients()
    return model


def test_restored_in_another_hook():
    def on_rank(comm):
        model = trained(comm, TopK(0.2))
        state = Residuals(model).state_dict()
        (bucket,) = state["buckets"]
        assert bucket["residual"].any() and has_some(model)
        other = DDP(nn.Linear(4, 3, seed=1), comm, hook=TopK(0.2))
        Residuals(other).load_state_dict(state)
        assert (Residuals(other).state_dict()["buckets"][0]["residual"] == bucket["residual"]).all()
        assert not has_some(DDP(nn.Linear(4, 3), comm))

    mpidist.run_simulated(2, on_rank)


def test_it_does_not_keep_the_ddp_alive():
    def on_rank(comm):
        model = trained(comm, TopK(0.2))
        residuals = Residuals(model)
        del model
        gc.collect()
        assert residuals.state_dict() == {"buckets": []}
        residuals.load_state_dict({"buckets": [{}]})

    mpidist.run_simulated(1, on_rank)


def test_state_without_copies_is_refused(monkeypatch):
    """As each rank has left out something else: said when the DDP is made, and not at a loss."""
    net = nn.Linear(4, 3)

    @mpidist.elastic
    def train(comm, state):
        with pytest.raises(InvalidArgument, match=f"copies=False: {PREFIX}0 is another one on"):
            DDP(net, comm, hook=TopK())
        return "refused"

    assert train(State(net=net, copies=False)) == "refused"
