"""Arguments become calls as the contract of the collective says, on the host as on a GPU."""

import sys
from dataclasses import replace

import numpy as np
import pytest

from mpidist.calls.call import Caller
from mpidist.calls.prepare import prepare
from mpidist.device.find import find_device
from mpidist.errors import InvalidArgument, Unsupported, UnsupportedDtype
from mpidist.operations import Op
from mpidist.schedule.contract import COLLECTIVES

SIZE = 3
MOVING = [name for name in COLLECTIVES if name != "barrier"]


@pytest.fixture(params=["host", "device"])
def array(request):
    """Return what makes an array of some rows in one kind of memory."""
    if request.param == "host":
        return np.ones
    request.getfixturevalue("emulated_device")
    return lambda shape, dtype="f8": find_device().array(np.ones(shape, dtype))


def blocks(collective, rank, root):
    """Return the blocks that a rank brings and gets, of one for each rank."""
    contract = COLLECTIVES[collective]
    of = (rank, SIZE, root, SIZE)
    return contract.input_blocks(*of), contract.output_blocks(*of)


def arguments(collective, root):
    """Return the keyword arguments without which a collective cannot be."""
    contract = COLLECTIVES[collective]
    return {"root": root} | ({"op": "sum"} if contract.reduces else {})


@pytest.mark.parametrize("root", range(SIZE))
@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize("collective", MOVING)
def test_prepare_follows_the_contract(collective, rank, root, array):
    brings, gets = blocks(collective, rank, root)
    x, out = array((2 * len(brings), 5)) if brings else None, array((2 * len(gets), 5))
    prepared = prepare(collective, Caller(rank, SIZE), x, out, **arguments(collective, root))
    call = prepared.call
    for flat, part in ((call.x, brings), (call.out, gets)):
        assert (0 if flat is None else flat.size) == 10 * len(part)
    assert call.count == 10 * SIZE and call.nbytes == 80 * SIZE and not call.in_place
    assert call.on_device == (array is not np.ones)
    assert prepared.shown is (out if gets else None)  # elsewhere `out` is of no meaning


@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize("collective", MOVING)
def test_in_place(collective, rank, array):
    brings, gets = blocks(collective, rank, rank)
    whole = array((2 * SIZE, 5))
    place, more = Caller(rank, SIZE), arguments(collective, rank)
    x, out = (whole[2 * b.start : 2 * b.stop] for b in (brings, gets))
    prepared = prepare(collective, place, x, out, **more)
    if not gets:  # rank 0 of an exclusive scan
        assert prepared.call.out is None and not prepared.call.in_place
        return
    staged = collective in ("reduce_scatter", "alltoall", "exscan") and array is np.ones
    assert prepared.call.in_place is not staged
    assert (prepared.staging is not None) is staged
    other = array((2 * SIZE + 1, 5))
    x, out = (
        other[2 * brings.start : 2 * brings.stop],
        other[2 * gets.start + 1 : 2 * gets.stop + 1],
    )
    with pytest.raises(InvalidArgument, match=f"rank {rank}: out overlaps x"):
        prepare(collective, place, x, out, **more)


def test_a_receiver_needs_one_shape_and_dtype(array):
    for out, words in ((array(4, "f4"), "dtype float32.*float64"), (array(5), r"\(5,\).*\(4,\)")):
        with pytest.raises(InvalidArgument, match=f"rank 1: out has .*{words}"):
            prepare("broadcast", Caller(1, SIZE), array(4), out)


def test_amounts_are_computed_anew_with_a_part():
    call = prepare("allreduce", Caller(0, SIZE), np.ones(12), op="sum").call
    part = replace(call, x=call.x[:3], out=call.out[:3])
    assert (call.count, call.nbytes) == (12, 96) and (part.count, part.nbytes) == (3, 24)


def test_python_calls():
    """Preparing a plain array takes few calls of ours, for it is done for each new array."""
    x, place, seen = np.ones(512), Caller(0, SIZE), []

    def count(frame, event, _):
        if event == "call":
            seen.append(frame.f_code.co_name)

    for _ in range(2):  # the first one fills the caches
        seen.clear()
        sys.setprofile(count)
        try:
            prepare("allreduce", place, x, x, "sum")
        finally:
            sys.setprofile(None)
    assert len(seen) <= 12, seen


@pytest.mark.parametrize("op", ["exact_sum", "exact_mean"])
def test_exact_sums_are_refused_where_there_are_none(op, emulated_device):
    place = Caller(1, SIZE)
    for dtype in ("longdouble", "clongdouble", ">f4", "bool", "S3"):
        with pytest.raises(UnsupportedDtype, match=rf"rank 1: op='{op}' .*bfloat16.*complex128"):
            prepare("allreduce", place, np.zeros(6, dtype), op=op)
    for collective in ("scan", "exscan"):
        told = f"rank 1: op='{op}': {collective}.*reduce_scatter$"
        with pytest.raises(InvalidArgument, match=told):
            prepare(collective, place, np.zeros(6), op=op)
    with pytest.raises(Unsupported, match=f"rank 1: op='{op}' .*GPU.*host memory"):
        prepare("allreduce", place, find_device().array(np.zeros(6)), op=op)


def test_exact_sums_of_integers_are_plain_ones():
    place, x = Caller(1, SIZE), np.zeros(6, "int8")
    assert prepare("allreduce", place, x, op="exact_sum").call.op.name == "sum"
    with pytest.raises(UnsupportedDtype, match="exact_mean.*int8"):
        prepare("allreduce", place, x, op="exact_mean")


def test_a_users_operation_cannot_ask_for_all_terms_at_once():
    with pytest.raises(InvalidArgument, match="grouping='at_once' of op 'user'.*'any'"):
        Op(np.add, grouping="at_once")
