"""Reading MSCCL files: what is no such file is refused with line, element and value."""

import pytest

from mpidist.errors import InvalidArgument
from mpidist.interchange.msccl.file import Step, read
from tests.support.msccl import GOLDEN, xml


@pytest.fixture
def write(tmp_path):
    def write(text, name="small.xml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_read_of_the_golden_file_has_its_steps(write):
    file = read(write(GOLDEN))
    assert (file.name, file.collective, file.chunks, file.protocol) == (
        "pair",
        "allreduce",
        2,
        "LL",
    )
    assert (file.inplace, file.apart, len(file.gpus)) == (True, False, 2)
    (block,) = file.gpus[1].blocks
    assert (block.send, block.recv, block.channel) == (0, 0, 0)
    assert block.steps[1] == Step(13, "rrcs", ("i", 1), ("i", 1), 1, None, False)


@pytest.mark.parametrize(
    "old, new, told",
    [
        ("<algo ", "<!DOCTYPE algo><algo ", "line 2: <!DOCTYPE algo>"),
        ("<algo ", "<algo", "line 2: not XML"),
        ("</algo>", "", "not XML: no element found"),
        ("</algo>", "</algo><algo/>", "not XML: junk"),
        ("</gpu>", "sum</gpu>", "'sum': expected elements only"),
        ('<gpu id="0"', '<gpus id="0"', "line 3: <gpus> in <algo>: expected <gpu>"),
        ('<tb id="0" send="1"', '<step id="0" send="1"', "line 4: <step> in <gpu>: expected <tb>"),
        (' proto="LL"', ' proto="LL" redop="sum"', "line 2: <algo redop=…>: expected name, ngpus"),
        (' coll="allreduce"', "", "line 2: <algo> without coll"),
        ('coll="allreduce"', 'coll="broadcast"', 'line 2: <algo coll="broadcast">: expected all'),
        ('proto="LL"', 'proto="LL64"', '<algo proto="LL64">: expected Simple, LL, LL128'),
        ('ngpus="2"', 'ngpus="3"', "2 <gpu>: expected as many as ngpus=3"),
        ('ngpus="2"', 'ngpus="0"', '<algo ngpus="0">: expected a number >= 1'),
        ('nchunksperloop="2"', 'nchunksperloop="32768"', "expected 1 … 32767"),
        ('nchunksperloop="2"', 'nchunksperloop="2.5"', "expected a whole number"),
        ('nchunksperloop="2"', f'nchunksperloop="{"9" * 30}"', "expected a whole number"),
        ('inplace="1"', 'inplace="2"', '<algo inplace="2">: expected 0 or 1'),
        ('inplace="1"', 'inplace="0"', '<algo outofplace="0">: expected 1, or inplace 1'),
        ('i_chunks="2"', 'i_chunks="99999"', '<gpu i_chunks="99999">: expected 0 … 32767'),
        ('<gpu id="1"', '<gpu id="2"', 'line 10: <gpu id="2">: expected 1'),
        ('<tb id="0" send="1"', '<tb id="1" send="1"', 'line 4: <tb id="1">: expected 0'),
        (
            'send="1" recv="1"',
            'send="0" recv="1"',
            'line 4: <tb send="0">: expected -1, or another',
        ),
        (
            'send="1" recv="1"',
            'send="2" recv="1"',
            'line 4: <tb send="2">: expected -1, or another',
        ),
        (
            'send="1" recv="1"',
            'send="-1" recv="1"',
            'line 5: <step type="s">: expected a thread bl',
        ),
        ('<step s="1"', '<step s="2"', 'line 6: <step s="2">: expected 1'),
        ('type="rrcs"', 'type="rcrs"', 'line 6: <step type="rcrs">: expected s, r, rcs'),
        ('srcbuf="i"', 'srcbuf="x"', 'line 5: <step srcbuf="x">: expected i, o, s'),
        ('srcoff="1"', 'srcoff="2"', 'line 5: <step srcoff="2">: expected 1 of the 2 chunks of i'),
        ('cnt="1"', 'cnt="0"', 'line 5: <step cnt="0">: expected 1 …'),
        ('cnt="1"', 'cnt="2"', 'line 5: <step srcoff="1">: expected 2 of the 2 chunks of i'),
        ('hasdep="0"', 'hasdep="x"', 'line 5: <step hasdep="x">: expected 0 or 1'),
    ],
)
def test_read_of_a_wrong_file_names_line_and_value(write, old, new, told):
    with pytest.raises(InvalidArgument) as raised:
        read(write(GOLDEN.replace(old, new, 1)))
    assert f"small.xml, line {told}" in str(raised.value) or told in str(raised.value)


def test_read_refuses_chunks_that_ranks_do_not_divide(write):
    text = xml("allgather", 3, [[], []])
    with pytest.raises(InvalidArgument, match='nchunksperloop="3".*a multiple of ngpus=2'):
        read(write(text))


def test_read_refuses_files_that_would_fill_the_memory(write):
    block = (-1, -1, 0, ["cpy i0 o0 n32767"] * 129)
    with pytest.raises(InvalidArgument, match=r"line 132: more than 4194304 chunks"):
        read(write(xml("allreduce", 32767, [[block]])))
    with pytest.raises(InvalidArgument, match=r"more than 8192 <tb>"):
        read(write(xml("allreduce", 1, [[(-1, -1, 0, [])] * 8193])))


@pytest.mark.parametrize("name", ["missing.xml", "."])
def test_read_of_no_file_names_the_path(tmp_path, name):
    with pytest.raises(InvalidArgument, match=r"missing\.xml|directory"):
        read(tmp_path / name)


def test_read_keeps_control_characters_from_the_terminal(write):
    with pytest.raises(InvalidArgument) as raised:
        read(write(GOLDEN.replace('proto="LL"', 'proto="&#x9b;2J"', 1)))
    assert "\x9b" not in str(raised.value)
    named = read(write(GOLDEN.replace('name="pair"', f'name="a&#x9b;2J&#10;b{"c" * 99}"', 1))).name
    assert named.isprintable() and len(named) < 90


def test_read_without_outofplace_takes_the_other_of_inplace(write):
    file = read(write(GOLDEN.replace(' inplace="1" outofplace="0"', ' inplace="0"', 1)))
    assert (file.inplace, file.apart) == (False, True)
