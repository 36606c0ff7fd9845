"""How many commits apart the state is copied."""

import numpy as np
import pytest

import mpidist as md
from mpidist.backends.base import Backend
from mpidist.recovery import pace
from mpidist.recovery.pace import PART, Pace


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still but for `pass_` seconds."""

    class Clock:
        now = 100.0

        def pass_(self, seconds):
            self.now += seconds

    found = Clock()
    monkeypatch.setattr(pace.time, "perf_counter", lambda: found.now)
    return found


def run(clock, commits, step, copy, others=()):
    """Return the commits that are copied, and the looks at times, of steps that take as long."""
    looks, copied = [], []

    def exchange(mine):
        looks.append(made.commits)
        return [mine, *others]

    made = Pace(exchange, copy)

    def copying():
        clock.pass_(copy)
        copied.append(made.commits)

    for _ in range(commits):
        clock.pass_(step)
        made.commit(copying)
    return copied, looks


def test_every_commit_is_copied_where_copies_are_cheap(clock):
    copied, looks = run(clock, 40, step=1.0, copy=0.9 * PART)
    assert copied == list(range(1, 41)) and looks == [1, 2, 4, 8, 16, 32]


def test_copies_take_two_percent_of_the_time(clock):
    copied, _ = run(clock, 1000, step=0.020, copy=0.005)
    assert copied == list(range(13, 1001, 13))
    assert 0.005 * len(copied) <= PART * 0.020 * 1000


def test_slowest_rank_counts(clock):
    copied, _ = run(clock, 200, step=0.020, copy=0.001, others=[(0.005, 0.018)])
    assert copied == list(range(13, 201, 13))


def test_window_without_a_copy_keeps_the_distance(clock):
    copied, looks = run(clock, 600, step=0.001, copy=0.004)  # every 200th
    assert copied == [200, 400, 600] and looks[:8] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert looks[8:] == list(range(192, 601, 64))


def test_slower_steps_are_copied_more_often(clock):
    made, copied = Pace(lambda mine: [mine], 0.005), []

    def copy():
        clock.pass_(0.005)
        copied.append(made.commits)

    for number in range(1, 501):
        clock.pass_(0.001 if number <= 260 else 1.0)
        made.commit(copy)
    assert copied[0] == 250 and copied[1:] == list(range(320, 501))


@pytest.mark.parametrize(
    "asked, why_not, every",
    [(None, "it is MPICH", False), (True, "it is MPICH", True), (None, None, True)],
)
def test_states_of_a_job_that_may_start_again(monkeypatch, tmp_path, asked, why_not, every):
    """Every commit is copied if that is asked for, or where ranks may go on after a loss."""
    tmp_path.chmod(0o700)
    monkeypatch.setattr(Backend, "why_no_survivors", lambda _: why_not)
    monkeypatch.setenv("MPIDIST_VAULTS", str(tmp_path))
    monkeypatch.setattr(pace, "PART", 1e-9)  # a copy is never worth it

    def program(comm):
        state = md.State(w=np.zeros(1000), copies=asked)
        state.begin(comm, {})
        for _ in range(40):
            comm.barrier()
            state.commit()
        found = sorted(state._vault.reader().steps())
        state.end()
        return found

    last = [38, 39, 40] if every else [0]
    assert md.run_simulated(2, program) == [last, last]
