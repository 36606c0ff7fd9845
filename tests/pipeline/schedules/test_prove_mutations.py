"""Broken pipelines by the thousand: prover and a run on queues must agree on each.

The run knows nothing of the prover's rules: every rank plays its actions, messages lie in queues,
one for each direction of two virtual stages, and a stage notes what it has computed.
"""

from collections import defaultdict, deque

from hypothesis import event, example, given
from hypothesis import strategies as st

from mpidist.errors import ScheduleError
from mpidist.pipeline.schedules import B, F, I, PipelineSchedule, W, find_schedule, prove, schedules

KINDS = {"F": F, "B": B, "I": I, "W": W}


def run(parts, placement, microbatches):
    """Play all ranks; tell whether every gradient was computed from what belonged to it."""
    queues = defaultdict(deque)  # (source stage, target stage) -> microbatches
    handed = set()  # (source stage, target stage, microbatch) within a rank
    state = {}  # (stage, microbatch) -> what was done
    at = [0] * len(parts)
    moved = True
    while moved:
        moved = False
        for rank, part in enumerate(parts):
            while at[rank] < len(part):
                went = play(part[at[rank]], rank, placement, queues, handed, state)
                if went is None:
                    break  # it waits
                if not went:
                    return False
                at[rank] += 1
                moved = True
    ended = all(at[rank] == len(part) for rank, part in enumerate(parts))
    wanted = {(s, m) for s in range(placement.stages) for m in range(microbatches)}
    return ended and set(state) == wanted and set(state.values()) <= {"FB", "FIW"}


def play(action, rank, placement, queues, handed, state):
    x, chunk, kind = action
    stage = placement.stage(rank, chunk)
    before = state.get((stage, x), "")
    if before + kind not in ("F", "FB", "FI", "FIW"):
        return False
    if kind != "W":
        source, target = (stage - 1, stage + 1) if kind == "F" else (stage + 1, stage - 1)
        if 0 <= source < placement.stages:
            if placement.owner(source)[0] == rank:
                if (source, stage, x) not in handed:
                    return None
            elif not queues[source, stage]:
                return None
            elif queues[source, stage].popleft() != x:
                return False
        if 0 <= target < placement.stages:
            handed.add((stage, target, x))
            queues[stage, target].append(x)
    state[stage, x] = before + kind
    return True


@st.composite
def mutants(draw):
    known = draw(st.sampled_from([s.name for s in schedules()]))
    size, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    schedule = find_schedule(known)
    parts = [schedule.actions(rank, size, microbatches) for rank in range(size)]
    for _ in range(draw(st.integers(1, 3))):
        part = parts[draw(st.integers(0, size - 1))]
        if not part:
            continue
        here, there = (draw(st.integers(0, len(part) - 1)) for _ in range(2))
        change = draw(
            st.sampled_from(("swap", "next", "move", "drop", "double", "replace", "halve"))
        )
        if change == "swap":
            part[here], part[there] = part[there], part[here]
        elif change == "next" and here:
            part[here - 1], part[here] = part[here], part[here - 1]
        elif change == "move":
            part.insert(there, part.pop(here))
        elif change == "drop":
            del part[here]
        elif change == "double":
            part.insert(there, part[here])
        elif change == "replace":
            kind = KINDS[draw(st.sampled_from("FBIW"))]
            part[here] = kind(
                draw(st.integers(0, microbatches - 1)), draw(st.integers(0, schedule.chunks - 1))
            )
        elif change == "halve" and part[here].kind == "B":
            x, chunk, _ = part[here]
            part[here : here + 1] = [I(x, chunk), W(x, chunk)]
    return schedule, size, microbatches, parts


def agree(schedule, size, microbatches, parts):
    given_parts = PipelineSchedule(
        "mutant", lambda rank, size, microbatches: parts[rank], schedule.chunks, schedule.placement
    )
    placement = schedule.place(size)
    good = run(parts, placement, microbatches)
    try:
        prove(given_parts, size, microbatches)
    except ScheduleError as error:
        assert not good, f"the run ends well, but the prover says: {error}"
        assert error.rank is not None and error.step is not None and error.stage is not None
        wrong = parts[error.rank]
        assert 0 <= error.step <= len(wrong)
        if error.step < len(wrong):
            assert str(wrong[error.step]) in str(error)
    else:
        assert good, "the prover finds nothing, but the run goes wrong"
    return good


@given(mutants())
def test_prover_and_run_agree_on_mutants(mutant):
    event("still good" if agree(*mutant) else "broken")


@example("gpipe")
@given(st.sampled_from([s.name for s in schedules()]))
def test_the_run_takes_what_is_shipped(name):
    schedule = find_schedule(name)
    for size, microbatches in ((1, 1), (3, 5), (4, 2), (5, 9)):
        parts = [schedule.actions(rank, size, microbatches) for rank in range(size)]
        assert run(parts, schedule.place(size), microbatches)


def test_every_small_change_of_one_schedule():
    """All swaps, drops and doublings in 1f1b and zb-v, so that none is left to luck."""
    counts = {True: 0, False: 0}
    for name, size, microbatches in (("1f1b", 3, 3), ("zb-v", 2, 2), ("zb-h1", 2, 3)):
        schedule = find_schedule(name)
        original = [schedule.actions(rank, size, microbatches) for rank in range(size)]
        for rank, part in enumerate(original):
            for here in range(len(part)):
                changed = [part[:here] + part[here + 1 :], part[:here] + [part[here]] + part[here:]]
                for there in range(here):
                    swapped = list(part)
                    swapped[here], swapped[there] = swapped[there], swapped[here]
                    changed.append(swapped)
                for mutant in changed:
                    parts = [*original[:rank], mutant, *original[rank + 1 :]]
                    counts[agree(schedule, size, microbatches, parts)] += 1
    assert counts[True] > 20 and counts[False] > 200
