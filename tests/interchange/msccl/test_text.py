"""Algorithms as MSCCL files: what is written is read and proved again, within RCCL's limits."""

import re

import pytest

from mpidist.errors import InvalidArgument, ScheduleError, Unsupported
from mpidist.interchange import export_msccl, import_msccl
from mpidist.interchange.msccl.file import COLLECTIVES, parse
from mpidist.schedule import Copy, Recv, Reduce, Send, prove
from mpidist.schedule.registry import algorithms, unregister
from tests.support.msccl import GOLDEN, all_pairs

ELEMENT = re.compile(r'(?:<!--.*-->|</?\w+(?: \w+="[^"]*")*/?>)')


def steps_of(file):
    return [step for gpu in file.gpus for block in gpu.blocks for step in block.steps]


def test_export_of_a_small_schedule_is_the_golden_text():
    def hand_round(rank, size):
        other = 1 - rank
        yield Send(other, rank), Recv(other, other)

    assert export_msccl("allgather", hand_round, 2) == (
        "<!-- allgather hand_round on 2 ranks; proved and written by mpidist -->\n"
        '<algo name="allgather hand_round" proto="Simple" nchannels="1" nchunksperloop="2" '
        'ngpus="2" coll="allgather" inplace="1" outofplace="1" minBytes="0" maxBytes="0">\n'
        '  <gpu id="0" i_chunks="1" o_chunks="2" s_chunks="0">\n'
        '    <tb id="0" send="1" recv="1" chan="0">\n'
        '      <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="1" '
        'depid="-1" deps="-1" hasdep="0"/>\n'
        '      <step s="1" type="r" srcbuf="o" srcoff="1" dstbuf="o" dstoff="1" cnt="1" '
        'depid="-1" deps="-1" hasdep="0"/>\n'
        "    </tb>\n"
        '    <tb id="1" send="-1" recv="-1" chan="0">\n'
        '      <step s="0" type="cpy" srcbuf="i" srcoff="0" dstbuf="o" dstoff="0" cnt="1" '
        'depid="-1" deps="-1" hasdep="0"/>\n'
        "    </tb>\n"
        "  </gpu>\n"
        '  <gpu id="1" i_chunks="1" o_chunks="2" s_chunks="0">\n'
        '    <tb id="0" send="0" recv="0" chan="0">\n'
        '      <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="1" '
        'depid="-1" deps="-1" hasdep="0"/>\n'
        '      <step s="1" type="r" srcbuf="o" srcoff="0" dstbuf="o" dstoff="0" cnt="1" '
        'depid="-1" deps="-1" hasdep="0"/>\n'
        "    </tb>\n"
        '    <tb id="1" send="-1" recv="-1" chan="0">\n'
        '      <step s="0" type="cpy" srcbuf="i" srcoff="0" dstbuf="o" dstoff="1" cnt="1" '
        'depid="-1" deps="-1" hasdep="0"/>\n'
        "    </tb>\n"
        "  </gpu>\n"
        "</algo>\n"
    )


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_export_of_every_algorithm_is_read_as_rccl_does(size):
    for a in algorithms():
        if a.collective not in COLLECTIVES.values() or a.unsupported(size) is not None:
            continue
        text = export_msccl(a.collective, a.name, size)  # proves it, too
        # RCCL's own parser takes one blank between attributes, and none before the end.
        assert all(ELEMENT.fullmatch(line.strip()) for line in text.splitlines()), a.label
        for gpu in parse(text.encode(), a.label).gpus:
            assert len(gpu.blocks) <= 64
            for block in gpu.blocks:
                assert 0 < len(block.steps) <= 64 and block.channel < 128
                # Nops of further dependencies come before a step that waits itself.
                for step, following in zip(block.steps, block.steps[1:]):
                    assert step.type != "nop" or following.after is not None
                assert all(step.count < 72 for step in block.steps)


def test_export_of_a_ring_sends_on_what_it_has_received():
    file = parse(export_msccl("allreduce", "ring", 5).encode(), "ring")
    for gpu in file.gpus:
        (block,) = gpu.blocks
        assert [s.type for s in block.steps] == ["s", *["rrcs"] * 4, *["rcs"] * 3, "r"]


@pytest.mark.parametrize("text", [GOLDEN, all_pairs(3), all_pairs(4, inplace=True)])
def test_export_of_an_imported_file_proves_again(tmp_path, text):
    path = tmp_path / "small.xml"
    path.write_text(text, encoding="utf-8")
    found = import_msccl(path)
    path.write_text(export_msccl("allreduce", "small.xml", found.proof.size), encoding="utf-8")
    again = import_msccl(path)
    unregister("allreduce", "small.xml")
    assert again.proof.rounds == found.proof.rounds
    assert again.proof.blocks_moved == found.proof.blocks_moved
    assert again.proof.reductions == found.proof.reductions


def test_export_of_segments_has_channels_of_their_own(tmp_path):
    file = parse(export_msccl("allreduce", "ring", 4, segments=2).encode(), "ring")
    assert {block.channel for gpu in file.gpus for block in gpu.blocks} == {0, 1}
    assert file.chunks == 8


def test_export_of_a_round_sends_what_was_there_before():
    def swap(rank, size):
        other = 1 - rank
        yield Reduce(other, 0), Send(other, 0)

    (steps, _) = (
        g.blocks[0].steps for g in parse(export_msccl("allreduce", swap, 2).encode(), "s").gpus
    )
    assert [step.type for step in steps] == ["s", "rrc"]


def test_export_of_several_dependencies_has_nops(tmp_path):
    def gather_then_copy(rank, size):
        yield tuple(Send(p, rank) for p in range(size) if p != rank)
        yield tuple(Recv(p, p, "tmp") for p in range(size) if p != rank)
        others = tuple(p for p in range(size) if p != rank)
        yield Copy(others, others, "tmp", "out")

    def together(rank, size):
        others = tuple(p for p in range(size) if p != rank)
        yield (*(Send(p, rank) for p in others), *(Recv(p, p, "tmp") for p in others))
        yield Copy(others, others, "tmp", "out")

    with pytest.raises(ScheduleError, match="deadlock"):
        prove("allgather", gather_then_copy, 4)
    steps = steps_of(parse(export_msccl("allgather", together, 4).encode(), "together"))
    assert any(step.type == "nop" and step.after is not None for step in steps)


@pytest.mark.parametrize(
    "collective, name, size, told",
    [
        (
            "allreduce",
            "ring",
            33,
            "allreduce ring on 33 ranks: 65 steps in a thread block: RCCL has",
        ),
        ("alltoall", "pairwise", 65, "65 thread blocks on a GPU: RCCL has at most 64"),
        ("broadcast", "ring", 4, "unknown broadcast algorithm"),
        (
            "broadcast",
            "binomial",
            4,
            "broadcast binomial: MSCCL's files are of allreduce, allgather",
        ),
        ("allreduce", "in_place", 4, "allreduce in_place needs shared memory"),
    ],
)
def test_export_refuses_what_the_format_cannot_say(collective, name, size, told):
    with pytest.raises((Unsupported, InvalidArgument)) as raised:
        export_msccl(collective, name, size)
    assert told in str(raised.value)


def test_export_refuses_an_unknown_protocol():
    with pytest.raises(InvalidArgument, match="protocol='LL64': expected Simple, LL, LL128"):
        export_msccl("allreduce", "ring", 2, protocol="LL64")


def test_export_of_a_wrong_schedule_is_its_counterexample():
    def silent(rank, size):
        yield ()

    with pytest.raises(ScheduleError, match="lacks rank"):
        export_msccl("allreduce", silent, 2)
