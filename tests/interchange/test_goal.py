"""GOAL texts: each follows the grammar of LogGOPSim's txt2bin, and takes the time of the model."""

import re
from collections import defaultdict, deque

import pytest

from mpidist.errors import InvalidArgument, ScheduleError, Unsupported
from mpidist.interchange.goal import export_goal
from mpidist.schedule import Recv, Send
from mpidist.schedule.cost import cost
from mpidist.schedule.registry import algorithms

MODEL = {"alpha": 1e-6, "beta": 1e-10, "gamma": 5e-11}
UNIT = 1e-10
WORDS = {"rank", "num_ranks", "send", "recv", "calc", "requires", "irequires", "to", "from", "tag"}
OPERATION = re.compile(
    r"(?P<label>[a-zA-Z][a-zA-Z0-9_]*): (?:(?P<kind>send|recv) (?P<size>[0-9]+)b (?P<way>to|from) "
    r"(?P<peer>[0-9]+) tag (?P<tag>[0-9]+)|calc (?P<time>[0-9]+))"
)
EDGE = re.compile(r"([a-zA-Z][a-zA-Z0-9_]*) requires ([a-zA-Z][a-zA-Z0-9_]*)")


def read(text):
    """Return the operations of each rank, as txt2bin's grammar has them: label, match, required."""
    lines = iter(text.splitlines())
    head = next(line for line in lines if not line.startswith("//"))
    size = int(re.fullmatch(r"num_ranks ([0-9]+)", head)[1])
    ranks = []
    for rank in range(size):  # txt2bin ends after the last rank, and wants all, ascending
        assert next(lines) == f"rank {rank} {{"
        operations = {}
        for line in lines:
            if line == "}":
                break
            if edge := EDGE.fullmatch(line):
                assert edge[2] in operations  # a label is defined before it is used
                operations[edge[1]][1].append(edge[2])
                continue
            one = OPERATION.fullmatch(line)
            assert one and one["label"] not in operations and one["label"] not in WORDS, line
            if one["kind"]:
                assert (one["kind"], one["way"]) in {("send", "to"), ("recv", "from")}
                assert int(one["size"]) >= 1 and int(one["peer"]) < size
            operations[one["label"]] = (one, [])
        assert operations
        ranks.append(operations)
    assert list(lines) == []
    return ranks


def seconds(ranks, alpha, beta):
    """Return when the last operation ends: a message ends at both ends, after alpha + n * beta.

    No port is ever busy, so it is for schedules with one message in each direction in a round.
    """
    ends, ready = {}, {}
    queues = defaultdict(deque)  # the other ends of messages, by sender, receiver and tag
    todo = deque((rank, label) for rank, part in enumerate(ranks) for label in part)
    waited = 0
    while todo and waited <= len(todo):
        rank, label = todo.popleft()
        one, required = ranks[rank][label]
        if any((rank, other) not in ends for other in required):
            todo.append((rank, label))
            waited += 1
            continue
        waited = 0
        begin = max((ends[rank, other] for other in required), default=0.0)
        if one["kind"] is None:
            ends[rank, label] = begin + int(one["time"]) * UNIT
            continue
        peer, tag = int(one["peer"]), one["tag"]
        pair = (rank, peer, tag) if one["kind"] == "send" else (peer, rank, tag)
        waiting = queues[pair]
        if waiting and waiting[0][2]["kind"] != one["kind"]:
            at, theirs, other = waiting.popleft()
            assert other["size"] == one["size"]
            end = max(begin, ready[at, theirs]) + alpha + int(one["size"]) * beta
            ends[rank, label] = ends[at, theirs] = end
        else:
            ready[rank, label] = begin
            waiting.append((rank, label, one))
    assert not todo and not any(queues.values())
    return max(ends.values())


ONE_MESSAGE = [
    *(("allreduce", "ring", p) for p in (2, 5, 8)),
    *(("allreduce", "rabenseifner", p) for p in (4, 8)),
    ("allreduce", "recursive_doubling", 8),
    ("allgather", "bruck", 5),
    ("alltoall", "pairwise", 5),
    ("broadcast", "chain", 5),
    ("broadcast", "binomial", 8),
    ("barrier", "dissemination", 6),
]


@pytest.mark.parametrize("collective, name, size", ONE_MESSAGE)
def test_goal_of_one_message_a_round_takes_the_time_of_the_model(collective, name, size):
    text = export_goal(collective, name, size, 10_007, **MODEL)
    expected = cost(collective, name, size, 10_007, **MODEL).seconds
    assert seconds(read(text), 1e-6, 1e-10) == pytest.approx(expected, rel=1e-3)
    assert f"parameters: {round(expected / UNIT)}\n" in text


@pytest.mark.parametrize("size", [1, 2, 5])
def test_goal_of_every_algorithm_is_read_and_ends(size):
    for a in algorithms():
        if a.unsupported(size) is None:
            ranks = read(export_goal(a.collective, a.name, size, 1000, segments=2, **MODEL))
            assert seconds(ranks, 1e-6, 1e-10) >= 0, a.label


def test_goal_of_segments_with_a_window_starts_a_strand_after_another_ends():
    given = {"segments": 3, "window": 1, **MODEL}
    ranks = read(export_goal("broadcast", "chain", 2, 3000, **given))
    assert [required for _, required in ranks[0].values()] == [
        [],
        ["l1"],
        ["l2"],
        ["l1", "l2", "l3"],
    ]
    assert [one["tag"] for one, _ in ranks[0].values()] == ["0", "1", "2", None]


def test_goal_of_a_small_schedule_is_the_golden_text():
    def hand_over(rank, size):
        yield Send(1) if rank == 0 else Recv(0)

    text = export_goal("broadcast", hand_over, 2, 64, alpha=2e-6, beta=1e-9)
    assert text == (
        "// broadcast hand_over on 2 ranks, 64 bytes; proved and written by mpidist; times in ns\n"
        "// txt2bin -i FILE.goal -o FILE.bin\n"
        "// LogGOPSim -f FILE.bin -L 2000 -o 0 -g 0 -G 1 -O 0 -S 2147483647 -b\n"
        "// mpidist's own model of these parameters: 2064\n"
        "num_ranks 2\nrank 0 {\nl1: send 64b to 1 tag 0\n}\n"
        "rank 1 {\nl1: recv 64b from 0 tag 0\n}\n"
    )


def test_goal_of_no_bytes_sends_one():
    ranks = read(export_goal("broadcast", "binomial", 2, 0, **MODEL))
    assert [one["size"] for one, _ in ranks[0].values()] == ["1"]


def test_goal_of_shared_memory_is_refused():
    with pytest.raises(Unsupported, match="allreduce in_place.*GOAL"):
        export_goal("allreduce", "in_place", 4, 64, **MODEL)


def test_goal_of_a_wrong_schedule_is_its_counterexample():
    def silent(rank, size):
        yield ()

    with pytest.raises(ScheduleError, match="rank 1"):
        export_goal("broadcast", silent, 2, 64, **MODEL)


@pytest.mark.parametrize("alpha, beta", [(1e-6, 0.0), (1.0, 1.23456e-10), (1e-6, 3.0)])
def test_goal_of_times_beyond_32_bits_is_refused(alpha, beta):
    with pytest.raises(InvalidArgument, match="beta="):
        export_goal("broadcast", "binomial", 2, 64, alpha=alpha, beta=beta)
