"""The choice of a way to overlap."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist import run_simulated
from mpidist.nn import Linear, Sequential
from mpidist.parallel import DDP
from mpidist.parallel.autotune import GAIN, ROUNDS, Trial
from mpidist.parallel.stats import Clock
from mpidist.parallel.transport import TRANSPORTS
from tests.support.training_kits import KITS, SMALL, STEPS, assert_close, train, train_alone

NAMES = tuple(TRANSPORTS)


def tried(comm, seconds):
    """Make the steps of a trial, each taking what `seconds(rank, name)` says."""
    trial = Trial(NAMES)
    order = []
    while not trial.over:
        order.append(trial.current)
        trial.note(seconds(comm.rank, trial.current))
    assert order == [*NAMES] * ROUNDS  # in turns, so that a drift is the same for all
    return trial.decide(comm)


@pytest.mark.parametrize(
    "polls, thread, best",
    [(1.0, 1.0, "none"), (0.96, 1.2, "none"), (0.9, 0.95, "polls"), (0.9, 0.5, "thread")],
)
def test_an_overlap_must_gain(polls, thread, best):
    times = {"none": 1.0, "polls": polls, "thread": thread}
    found = run_simulated(2, lambda comm: tried(comm, lambda rank, name: times[name]))
    assert found == [(best, times)] * 2


def test_the_slowest_rank_decides():
    slow = {"none": 1.0, "polls": 1.5, "thread": 0.9}
    fast = {"none": 1.0, "polls": 0.1, "thread": 0.2}
    found = run_simulated(2, lambda comm: tried(comm, lambda rank, name: (slow, fast)[rank][name]))
    assert found == [("thread", {"none": 1.0, "polls": 1.5, "thread": 0.9})] * 2


def test_it_must_win_most_rounds():
    """A median is not enough where times scatter."""
    scattered = iter([1.0, 0.5, 1.0, 0.5, 1.0, 1.1, 1.0, 0.5, 1.0, 1.1])  # the first two warm up

    def main(comm):
        trial = Trial(["none", "thread"])
        while not trial.over:
            trial.note(next(scattered))
        return trial.decide(comm)

    ((best, times),) = run_simulated(1, main)
    assert best == "none" and times["thread"] < GAIN * times["none"]


def test_the_first_round_warms_up():
    """It counts neither in the medians nor in the number of rounds won."""
    rounds = iter([1.0, 9.0, 1.0, 0.2, 1.0, 0.4, 1.0, 0.6, 1.0, 1.2])

    def main(comm):
        trial = Trial(["none", "thread"])
        while not trial.over:
            trial.note(next(rounds))
        return trial.decide(comm)

    ((best, times),) = run_simulated(1, main)
    assert (best, times) == ("thread", {"none": 1.0, "thread": 0.5})


class Told(Clock):
    """A clock that has every step take what it is told."""

    def end(self, spans):
        super().end(spans)
        self.last = self.tell(self.steps)


@pytest.mark.parametrize("lasts, kept", ((True, "thread"), (False, "none")))
def test_the_best_must_win_twice(lasts, kept):
    """What was faster by luck is not faster once more."""
    first = 1 + ROUNDS * len(NAMES)  # one step is observed before

    def main(comm):
        model = DDP(Sequential(Linear(2, 2), Linear(2, 2)), comm, 8, 8)
        model.reducer.clock, ways = Told(), []

        def tell(step):
            ways.append(model.reducer.name)
            return 0.5 if ways[-1] == "thread" and (lasts or step <= first) else 1.0

        model.reducer.clock.tell = tell
        for _ in range(first + ROUNDS * 2 + 2):
            model(np.ones((1, 2), np.float32))
            model.backward(np.ones((1, 2), np.float32))
            model.sync_gradients()
            model.zero_grad()
        assert ways[first : first + 4] == ["none", "thread"] * 2
        assert ways[-2:] == [kept] * 2
        expected = {"none": 1.0, "polls": 1.0, "thread": 0.5 if lasts else 1.0}
        assert model.stats().trials == expected
        return model.stats().overlap

    assert run_simulated(2, main) == [kept] * 2


@given(st.lists(st.floats(0.1, 2), min_size=3, max_size=3))
def test_never_one_that_loses(seconds):
    times = dict(zip(NAMES, seconds, strict=True))
    (best, _), *_ = run_simulated(1, lambda comm: tried(comm, lambda rank, name: times[name]))
    assert best == "none" or times[best] < GAIN * times["none"]


def test_gradients_on_one_rank():
    """Nothing is moved into buckets where there is nobody to send to."""
    from mpidist.nn import Linear
    from mpidist.parallel import DDP

    def main(comm):
        net = Linear(2, 3)
        model = DDP(net, comm)
        model(np.ones((1, 2), np.float32))
        model.backward(np.ones((1, 3), np.float32))
        before = net.weight.grad
        model.sync_gradients()
        assert net.weight.grad is before
        assert model.stats().copies == 0 and model.stats().overlap == "none"

    run_simulated(1, main)


@pytest.mark.parametrize("kit", KITS)
def test_auto_overlap_ends_with_a_choice(comm, kit):
    net = kit.mlp(comm.rank)
    model = DDP(net, comm, overlap="auto", **SMALL)
    make, settings = kit.optimizers()["momentum"]
    train(comm, kit, model, make(net.parameters(), **settings))
    assert_close(kit, net, train_alone(kit, 0, "momentum"))
    stats = model.stats()
    assert stats.steps == STEPS
    assert stats.bytes == sum(p.nbytes for p in kit.values(model))
    if comm.size > 1:
        assert set(stats.trials) == {"none", "polls", "thread"}
        assert len(set(comm.allgather_object(stats.overlap))) == 1
        # Of two trials: the second has timed the winner of the first again, and not its losers.
        taken, without = stats.trials[stats.overlap], stats.trials["none"]
        assert stats.overlap == "none" or taken < GAIN * without
    assert stats.compute > 0 and stats.exposed > 0
    assert 0 <= stats.hidden <= stats.communication
