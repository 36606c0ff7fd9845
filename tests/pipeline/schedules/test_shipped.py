"""The schedules that mpidist ships: all proved, with the bounds that they promise."""

from dataclasses import replace

import pytest

from mpidist.errors import ScheduleError
from mpidist.pipeline.schedules import as_schedule, derive, prove, schedules
from mpidist.pipeline.schedules.walk import walk

SHIPPED = ["1f1b", "gpipe", "interleaved", "zb-h1", "zb-h2", "zb-v"]


def test_what_is_shipped():
    assert sorted(s.name for s in schedules()) == SHIPPED
    assert {s.name for s in schedules() if s.splits} == {"zb-h1", "zb-h2", "zb-v"}


@pytest.mark.parametrize("schedule", schedules(), ids=lambda s: s.name)
def test_every_schedule_is_proved(schedule):
    for size in (1, 2, 3, 4, 5, 8, 16):
        for microbatches in (1, 2, 3, size, size + 1, 2 * size - 1, 2 * size + 3):
            for chunks in (1, 2, 3) if schedule.any_chunks else (schedule.chunks,):
                proof = prove(schedule, size, microbatches, chunks)
                stages = size * chunks
                assert proof.actions == stages * microbatches * (3 if schedule.splits else 2)
                assert proof.splits == schedule.splits
                turns = chunks - 1 if schedule.placement == "v" else 0  # no messages there
                edges = 0 if size == 1 else stages - 1 - turns
                assert proof.messages == 2 * microbatches * edges


def test_bounds_on_messages_and_activations():
    assert prove("gpipe", 4, 8).outstanding == (8, 8, 8, 8)
    proof = prove("1f1b", 4, 8)
    assert proof.peak == (4, 3, 2, 1)
    assert proof.outstanding == (4, 4, 3, 2) and proof.outstanding_edge == 4
    more = prove("1f1b", 4, 64)  # they add nothing to what is outstanding or alive
    assert more == replace(proof, microbatches=64, actions=512, messages=8 * proof.messages)
    assert prove("zb-v", 4, 64).peak == (8, 8, 8, 8)


@pytest.mark.parametrize("name", SHIPPED)
def test_bound_on_outstanding_messages(name):
    """All others run as far as they can while one rank stands still before each of its steps."""
    size, microbatches = 4, 7
    parts = derive(name, size, microbatches)
    proof = prove(name, size, microbatches)
    for rank in range(size):
        most = 0
        for still in range(len(parts[rank]) + 1):
            cut = [part[:still] if r == rank else part for r, part in enumerate(parts)]
            sent, used = set(), set()
            seen = walk(cut, as_schedule(name).place(size))
            try:
                for _, _, step in seen:
                    sent.update(m for m in step.sends if m.target == rank and not m.local)
                    used.add(step.receive)
            except ScheduleError:
                pass  # the others wait for the one that stands still
            most = max(most, len(sent - used))
        assert most == proof.outstanding[rank]
