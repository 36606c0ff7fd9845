"""Executors: one class and its place in one list make a new way to serve calls."""

import numpy as np
import pytest

from mpidist import Unsupported, run_simulated
from mpidist.backends.executor import Executor
from mpidist.backends.program import Program, Round, store
from mpidist.engine.executors import EXECUTORS
from mpidist.schedule.registry import RESERVED


class Alone(Executor):
    """Serves sums of one rank by copying."""

    name, summary = "alone", "copies the input"
    bound: list[tuple[bool, bool]]  # since a test began

    def __init__(self, host):
        pass

    def why_not(self, call, algorithm, background):
        if call.size > 1:
            return "more than one rank"
        return None if call.collective == "allreduce" else f"no {call.collective}"

    def bind(self, call, choice, *, background=False, repeated=False, turn=0):
        self.bound.append((background, repeated))
        out, x = np.asarray(call.out), np.asarray(call.x)
        return Program([Round((), None, (store(out, x),))])


@pytest.fixture
def listed(monkeypatch):
    monkeypatch.setattr("mpidist.engine.service.EXECUTORS", [Alone, *EXECUTORS])
    monkeypatch.setattr(Alone, "bound", [], raising=False)


def test_new_executor_serves_all_calls(listed):
    def run(comm):
        x, out = np.arange(5.0), np.zeros(5)
        for turn in range(4):
            x += 1
            assert comm.allreduce(x, out=out, algorithm="alone") is out
            assert (out == np.arange(5.0) + turn + 1).all()
        assert comm.iallreduce(x, algorithm="alone").wait().tolist() == x.tolist()
        return Alone.bound

    # Bound for one call, for repetition at the second, and for the background: the rest are found.
    assert run_simulated(1, run) == [[(False, False), (False, True), (True, False)]]


def test_new_executor_is_listed_and_named(listed):
    def run(comm):
        candidate = {candidate.name: candidate for candidate in comm.explain("allreduce", 8)[1]}[
            "alone"
        ]
        with pytest.raises(Unsupported, match=r"'alone'.*no broadcast") as error:
            comm.broadcast(np.ones(2), algorithm="alone")
        return candidate.can, candidate.why, str(error.value).startswith(f"rank {comm.rank}:")

    assert run_simulated(1, run) == [(True, "copies the input", True)]


def test_new_executor_refuses_with_a_reason(listed):
    def run(comm):
        with pytest.raises(Unsupported, match="'alone': more than one rank; able.*ring"):
            comm.allreduce(np.ones(2), algorithm="alone")
        return {candidate.name: candidate.why for candidate in comm.explain("allreduce", 8)[1]}[
            "alone"
        ]

    assert run_simulated(2, run) == ["more than one rank"] * 2


def test_every_executor_answers_for_every_collective():
    """In this order, and each with a summary."""
    assert all(executor.summary for executor in EXECUTORS)
    names = [executor.name for executor in EXECUTORS]
    assert names == ["native", "symmetric", "staged", "single_copy", "messages"]


def test_names_of_the_executors_are_reserved():
    """The registry lists them itself: it is imported before the executors are."""
    names = {executor.name for executor in EXECUTORS} - {"messages"}
    assert set(RESERVED) == names | {"auto"}
