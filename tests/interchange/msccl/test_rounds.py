"""Thread blocks become rounds: messages, copies, what combines, and what no order allows."""

import pytest

from mpidist.errors import ScheduleError, Unsupported
from mpidist.interchange.msccl.file import read
from mpidist.interchange.msccl.rounds import rounds_of
from mpidist.schedule import Copy, Recv, Reduce, Send
from tests.support.msccl import GOLDEN, all_pairs, one_block, xml


@pytest.fixture
def rounds(tmp_path):
    def rounds(text, apart=False, exact=True):
        path = tmp_path / "small.xml"
        path.write_text(text, encoding="utf-8")
        return rounds_of(read(path), apart, exact)

    return rounds


def test_rounds_of_the_golden_file(rounds):
    first, second = rounds(GOLDEN)
    assert first == [(Send(1, 1), Reduce(1, 0)), (Send(1, 0), Recv(1, 1))]
    assert second == [(Reduce(0, 1), Send(0, 0)), (Recv(0, 0), Send(0, 1))]


def test_rounds_combine_where_messages_waited_in_scratch(rounds):
    for rank, part in enumerate(rounds(all_pairs(3, inplace=True))):
        peers = [peer for peer in range(3) if peer != rank]
        assert set(part[0]) == {s for p in peers for s in (Send(p, p), Reduce(p, rank))}
        assert set(part[1]) == {s for p in peers for s in (Send(p, rank), Recv(p, p))}
        assert len(part) == 2


def test_rounds_out_of_place_begin_with_an_empty_output(rounds):
    part = rounds(all_pairs(2), apart=True)[0]
    # Behind one chunk of scratch, the output; the input stays in "out" until the end.
    assert part[0] == (Copy(0, 1, "out", "tmp"), Send(1, 1), Reduce(1, 1, "tmp"))
    assert part[-1] == (Copy((1, 2), (0, 1), "tmp", "out"),)


def test_rounds_of_rrs_keep_the_operand_if_exact(rounds):
    def steps(rank):
        return ["s i0 o0", "rrs i0 o0"]

    gpus = one_block(3, steps)
    gpus[0][0] = (1, 2, 0, ["s i0 o0", "r o0 o0"])
    gpus[1][0] = (2, 0, 0, ["rrs i0 o0"])
    gpus[2][0] = (0, 1, 0, ["rrs i0 o0"])
    text = xml("allreduce", 1, gpus)
    assert rounds(text, exact=False)[1] == [(Reduce(0, 0),), (Send(2, 0),)]
    assert rounds(text)[1] == [
        (Copy(0, 1, "out", "tmp"), Reduce(0, 1, "tmp")),
        (Send(2, 1, "tmp"),),
    ]


def test_rounds_of_alltoall_read_the_input(rounds):
    gpus = [
        [(-1, -1, 0, [f"cpy i{r} o{r}"]), (1 - r, 1 - r, 0, [f"s i{1 - r}", f"r o{1 - r}"])]
        for r in range(2)
    ]
    part = rounds(xml("alltoall", 2, gpus), apart=True)[0]
    assert part == [(Copy(0, 0), Send(1, 1, "in"), Recv(1, 1))]


def test_rounds_of_allgather_and_reduce_scatter_shift_the_own_part(rounds):
    gather = xml("allgather", 2, one_block(2, lambda r: ["s i0", f"r o{1 - r}"]), sizes=(1, 2))
    assert rounds(gather)[1] == [(Recv(0, 0), Send(0, 1))]
    scatter = one_block(2, lambda r: [f"s i{1 - r}", f"rrc i{r} o0"])
    text = xml("reducescatter", 2, scatter, sizes=(2, 1))
    assert rounds(text)[1] == [(Reduce(0, 1), Send(0, 0))]


def test_rounds_do_not_receive_where_a_send_still_reads(rounds):
    gpus = [
        [(1, -1, 0, ["s i0 told"]), (-1, 1, 0, ["r i0 after0.0"])],
        [(0, 0, 0, ["s i0", "rcs o0"])],
    ]
    gpus[1] = [(0, -1, 0, ["s i0"]), (-1, 0, 0, ["r s0"])]
    first = rounds(xml("allreduce", 1, gpus, scratch=1))[0]
    assert first == [(Send(1, 0),), (Recv(1, 0),)]


@pytest.mark.parametrize(
    "gpus, told",
    [
        # Each waits for the other's message before it sends.
        (one_block(2, lambda r: ["r s0", "s i0"]), "deadlock: these steps wait for each other"),
        (
            [[(-1, -1, 0, ["cpy i0 o0 after1.0 told"]), (-1, -1, 0, ["nop after0.0 told"])], []],
            "deadlock",
        ),
        ([[(1, -1, 0, ["s i0"])], []], "line 4: GPU 1 does not receive it on channel 0"),
        (
            [[(1, -1, 0, ["s i0"])], [(-1, 0, 2, ["r o0"])]],
            "GPU 1 does not receive it on channel 0",
        ),
        ([[], [(-1, 0, 2, ["r o0"])]], "GPU 0 does not send it on channel 2"),
        (
            [[(1, -1, 0, ["s i0"])], [(-1, 0, 0, ["r o0 n2"])]],
            "lines 4, 9: sends 1 chunks to a step for 2",
        ),
        (
            [[(1, -1, 0, ["s i0"]), (1, -1, 0, ["s i0"])], [(-1, 0, 0, ["r o0", "r o1"])]],
            "two thread blocks share channel 0 from GPU 0 to 1",
        ),
        ([[(-1, -1, 0, ["nop after3.1"])], []], "step 1 of thread block 3, which the GPU does not"),
        (
            [[(-1, -1, 0, ["nop"]), (-1, -1, 0, ["cpy i0 o0 after0.0"])], []],
            "which tells nobody: hasdep is 0",
        ),
        # One writes a chunk that the other reads, or writes, and no step waits.
        ([[(-1, -1, 0, ["cpy i0 o0"]), (-1, -1, 0, ["cpy o0 o1"])], []], "in either order"),
        ([[(-1, -1, 0, ["cpy o0 o1"]), (-1, -1, 0, ["cpy i0 o0"])], []], "lines 4, 7: these steps"),
        ([[(-1, -1, 0, ["cpy i0 s0"]), (-1, -1, 0, ["cpy i1 s0"])], []], "lines 4, 7: these steps"),
    ],
)
def test_rounds_of_a_wrong_order_name_the_lines(rounds, gpus, told):
    with pytest.raises(ScheduleError) as raised:
        rounds(xml("allreduce", 2, gpus, scratch=2), apart=True)
    assert told in str(raised.value) and "small.xml, line" in str(raised.value)


def test_rounds_of_a_dependency_are_no_race(rounds):
    blocks = [(-1, -1, 0, ["cpy i0 o0 told"]), (-1, -1, 0, ["cpy o0 o1 after0.0"])]
    copies = [Copy(0, 2, "out", "tmp"), Copy(2, 3, "tmp", "tmp")]
    assert rounds(xml("allreduce", 2, [blocks, []], scratch=2), apart=True)[0][0] == tuple(copies)


@pytest.mark.parametrize(
    "steps",
    [
        ["re i1 o0"],  # of the input
        ["cpy i0 s0", "re s0 o0"],  # of a copy
    ],
)
def test_rounds_of_a_re_without_a_message_are_refused(rounds, steps):
    with pytest.raises(Unsupported, match=r"small\.xml, line \d: re combines what no message"):
        rounds(xml("allreduce", 2, [[(-1, -1, 0, steps)]], scratch=1))


def test_rounds_of_a_re_that_shares_its_source_are_refused(rounds):
    gpus = [[(1, -1, 0, ["s i0"])], [(-1, 0, 0, ["r s0", "re s0 i0", "cpy s0 o1"])]]
    with pytest.raises(Unsupported, match="line 10: re combines"):
        rounds(xml("allreduce", 2, gpus, scratch=1))


def test_rounds_let_sends_wait_in_another_order_than_they_come(rounds):
    # Both send twice before they receive; and on two channels the receiver may choose.
    gpus = one_block(2, lambda r: ["s i0", "s i1", "r o0", "r o1"])
    assert rounds(xml("allreduce", 2, gpus), apart=True)[0][:2] == [
        (Send(1, 0), Recv(1, 0, "tmp")),
        (Send(1, 1), Recv(1, 1, "tmp")),
    ]
    gpus = [
        [(1, -1, 0, ["s i0 told"]), (1, -1, 1, ["s i1 after0.0"])],
        [(-1, 0, 1, ["r o1 told"]), (-1, 0, 0, ["r o0 after0.0"])],
    ]
    assert rounds(xml("allreduce", 2, gpus))[0] == [(Send(1, 1),), (Send(1, 0),)]


def test_rounds_of_a_send_that_must_leave_its_chunk_early_are_refused(rounds):
    # GPU 0 overwrites what it sent first, which GPU 1 only takes after what is sent then.
    gpus = [
        [(1, -1, 0, ["s i0 told"]), (1, -1, 1, ["cpy i1 i0 after0.0", "s i0"])],
        [(-1, 0, 1, ["r o1 told"]), (-1, 0, 0, ["r o0 after0.0"])],
    ]
    with pytest.raises(Unsupported, match="lines 4, 7, 8: no rounds have this order"):
        rounds(xml("allreduce", 2, gpus))
