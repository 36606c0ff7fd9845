"""Executors: one class and its place in one list make a new way to serve calls."""

import subprocess
import sys

import numpy as np
import pytest

from mpidist import InvalidArgument, Unsupported, run_simulated
from mpidist.backends.executor import ONCE, Executor
from mpidist.backends.program import Program, Round, store
from mpidist.engine.executors import EXECUTORS
from mpidist.schedule import COLLECTIVES, registry
from mpidist.schedule.registry import algorithm, reserve, reserved


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

    def bind(self, call, choice, use=ONCE):
        self.bound.append((use.background, use.repeated))
        out, x = np.asarray(call.out), np.asarray(call.x)
        return Program([Round((), None, (store(out, x),))])


@pytest.fixture
def listed(monkeypatch):
    monkeypatch.setattr("mpidist.engine.service.EXECUTORS", [Alone, *EXECUTORS])
    monkeypatch.setattr(registry, "_reserved", dict(registry._reserved))  # the name is, for good
    monkeypatch.setattr(Alone, "bound", [], raising=False)


def test_new_executor_is_bound_once_for_each_use(listed):
    """For one allreduce, for its repetition, and for one in the background."""

    def run(comm):
        x, out = np.arange(5.0), np.zeros(5)
        for turn in range(4):
            x += 1
            assert comm.allreduce(x, out=out, algorithm="alone") is out
            assert (out == np.arange(5.0) + turn + 1).all()
        assert comm.iallreduce(x, algorithm="alone").wait().tolist() == x.tolist()
        return Alone.bound

    # (background, repeated): the third and the fourth call are found as the second was bound.
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


def test_executors_say_which_schedules_they_run():
    """Of their memory, the one for short calls too; the cost model takes the fastest of them."""

    def run(comm):
        made = {executor.name: executor for executor in comm._service.executors}
        for executor in made.values():
            for collective in COLLECTIVES:
                memories = {c.algorithm.memory.name for c in executor.schedules(collective)}
                assert memories <= {executor.memory}
        found = [(name, c) for name in made for c in ("reduce", "gather", "barrier")]
        return {each: [c.name for c in made[each[0]].schedules(each[1])] for each in found}

    (found,) = run_simulated(1, run)
    assert {key: names for key, names in found.items() if names} == {
        ("symmetric", "reduce"): ["in_place", "in_place_one_shot"],
        ("symmetric", "gather"): ["in_place"],
        ("symmetric", "barrier"): ["in_place"],
        ("staged", "reduce"): ["slots", "slots_one_shot"],
        ("staged", "gather"): ["slots"],
        ("single_copy", "reduce"): ["published"],
    }


def test_names_of_the_executors_are_reserved():
    """Before the executors are imported: a script registers its algorithms first."""
    code = "from mpidist.schedule.registry import reserved; print(*reserved())"
    names = [executor.name for executor in EXECUTORS if executor.name != "messages"]
    told = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert told.split() == ["auto", *names]


def test_name_of_a_new_executor_is_reserved_once_it_is_listed(listed):
    run_simulated(1, lambda comm: None)
    assert "alone" in reserved()
    with pytest.raises(InvalidArgument, match="'alone': not a name for an algorithm"):
        algorithm("allreduce", "alone")
    with pytest.raises(InvalidArgument, match="executor 'ring': reduce_scatter ring is an"):
        reserve(["ring"])
