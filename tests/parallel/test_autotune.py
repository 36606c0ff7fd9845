"""The choice of a way to overlap, the times of a step, and chains of works."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist import run_simulated
from mpidist.errors import CommunicationError
from mpidist.nn import Linear, Sequential
from mpidist.parallel import DDP, assign_buckets
from mpidist.parallel.autotune import GAIN, ROUNDS, Trial
from mpidist.parallel.stats import Clock
from mpidist.parallel.transport import DONE, TRANSPORTS, Chain, Polls, Thread, chained

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


def test_times_of_a_step(monkeypatch):
    moments = iter([0.0, 5.0, 7.0, 10.0, 12.0])  # begin; sync begins, ends; without a begin
    monkeypatch.setattr("mpidist.parallel.stats.perf_counter", lambda: next(moments))
    clock = Clock()
    clock.begin()
    clock.within(0.5)
    clock.sync_begins()
    spans = [(3.0, 4.0), (1.0, 3.5), (6.0, 6.5)]  # four seconds are covered, less a gap
    clock.end(spans)
    assert (clock.compute, clock.exposed, clock.communication) == (4.5, 2.5, 3.5)
    assert clock.hidden == 1.0 and clock.last == 7.0 and spans == []
    clock.sync_begins()
    clock.end([])
    assert (clock.steps, clock.exposed, clock.last) == (2, 4.5, 0.0)


@given(st.permutations(range(6)), st.integers(1, 20), st.integers(1, 20))
def test_observed_order(order, most, first):
    buckets = assign_buckets([3, 5, 1, 4, 2, 6], "ababab", most, first, order)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(6))
    ready = [max(order.index(i) for i in bucket) for bucket in buckets]
    assert ready == sorted(ready)
    for bucket in buckets:
        assert [order.index(i) for i in bucket] == sorted(order.index(i) for i in bucket)


class Later:
    """A Work that ends at the n-th look."""

    def __init__(self, looks):
        self.looks = looks

    def test(self):
        self.looks -= 1
        return self.looks <= 0

    def wait(self, **options):
        self.looks = 0


def test_chain():
    seen = []

    @chained
    def steps(first):
        seen.append(first)
        yield Later(2)
        seen.append("between")
        yield Later(1)
        seen.append("end")

    work = steps("begin")
    assert seen == ["begin"] and not work.test() and seen == ["begin"]
    assert work.test() and seen == ["begin", "between", "end"] and work.test()
    steps("again").wait()
    assert seen[3:] == ["again", "between", "end"]
    Chain(iter(())).wait()
    assert DONE.test()


class OneBucket:
    index = 0
    comm = SimpleNamespace(traced=None)


def test_spans_of_works_are_taken():
    for transport in (Polls(lambda bucket: Later(1)), Thread(lambda bucket: Later(1))):
        work = transport.send(OneBucket())
        work.wait()
        transport.poll()
        assert work.test()
        ((began, ended),) = transport.spans
        assert ended >= began


def test_a_dead_thread_is_noticed(monkeypatch):
    monkeypatch.setattr("mpidist.parallel.transport.ALIVE_SECONDS", 0.01)

    def leaves(bucket):
        raise SystemExit  # kills a thread quietly

    transport = Thread(leaves)
    with pytest.raises(SystemExit):
        transport.send(OneBucket()).wait()
    transport._queue.put(None)
    transport._thread.join(10)
    with pytest.raises(CommunicationError, match="thread"):
        transport.send(OneBucket()).wait()


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
