"""NCCL as the executor that collectives take by themselves, or by name."""

from types import SimpleNamespace

import numpy as np
import pytest

from mpidist.calls.call import Call
from mpidist.device.find import find_device
from mpidist.device.recognise import as_device_array
from mpidist.errors import CollectiveTimeout, UnknownName, Unsupported
from mpidist.gpu.heap import DeviceHeap
from mpidist.gpu.nccl.executor import Nccl
from mpidist.operations import OPS as PREDEFINED
from tests.support import collectives as cases
from tests.support.gpu_kits import OnDevice, compare_replicas, train, train_alone
from tests.support.nccl import Library


@pytest.mark.parametrize("collective", list(cases.CHECKS))
def test_collectives_by_themselves(by_nccl, collective):
    """Every collective, blocking and in the background, in place and not; only scans are staged."""
    staged = collective in ("scan", "exscan")

    def check(comm, library):
        for number, n in enumerate([*cases.lengths(comm.size), 8]):
            for in_place in (False, True):
                for background in (False, True):
                    there = OnDevice(comm, background)
                    root = (number + in_place) % comm.size
                    cases.CHECKS[collective](there, "auto", n, "int64", root, in_place)
        assert comm.gpu.uses_nccl and len(library.made) == (not staged)
        return library.groups

    groups = by_nccl(3, check)
    assert all(groups) == (collective in ("gather", "scatter", "alltoall"))


def test_what_nccl_does_not_serve_is_staged(by_nccl):
    def check(comm, library):
        device = find_device()
        x = device.array(np.full(4, comm.rank + 1, "i2"))
        assert (comm.allreduce(x).get() == 3).all() and not library.made
        with pytest.raises(Unsupported, match="allreduce 'native': .*NCCL has no 'sum' of int16"):
            comm.allreduce(x, algorithm="native")
        nan = device.array(np.array([1.0, np.nan if comm.rank else 1.0]))
        with pytest.raises(Unsupported, match="'native': NCCL does not say what the max of NaN is"):
            comm.allreduce(nan, "max", algorithm="native")
        for op in ("max", "min"):
            assert np.isnan(comm.allreduce(nan, op).get()).tolist() == [False, True]
        assert not library.made
        got = comm.reduce_scatter(device.array(np.ones(3)), counts=[1, 2])
        assert got.get().tolist() == [2.0] * (comm.rank + 1) and not library.made
        rows = device.array(np.full(comm.rank + 1, comm.rank))
        assert comm.allgather(rows, counts=[1, 2]).get().tolist() == [0, 1, 1] and library.groups

    by_nccl(2, check)


def test_executors_by_name(by_nccl):
    """A call takes the executor that it names, or says why it cannot."""

    def check(comm, library):
        x = find_device().array(np.ones(4))
        assert (comm.allreduce(x, algorithm="staged").get() == 2).all() and not library.made
        for name, words in (
            ("mpi", "NCCL is in use|messages do not go by MPI here"),
            ("ipc", "the ranks are threads"),
            ("symmetric", "the simulated backend has no shared memory"),
            ("single_copy", "the simulated backend has no shared memory"),
            ("in_place", "the ranks are threads"),
            ("slots", "the ranks are threads"),
            ("published", "its arrays are on a GPU"),
        ):
            with pytest.raises(Unsupported, match=f"allreduce '{name}': {words}.*; able .*nccl"):
                comm.allreduce(x, algorithm=name)
        assert not library.made
        assert (comm.iallreduce(x, algorithm="nccl").wait().get() == 2).all() and library.made
        with pytest.raises(UnknownName, match="'magic'"):
            comm.allreduce(x, algorithm="magic")
        with pytest.raises(UnknownName, match="'nccl'"):  # on the host there is none
            comm.allreduce(np.ones(4), algorithm="nccl")

    by_nccl(2, check)
    by_nccl(2, check, "nccl")


def test_explain(by_nccl):
    def check(comm, library):
        chosen, every = comm.explain("allreduce", 64, device="cuda")
        found = {candidate.name: candidate for candidate in every}
        assert chosen.name == "nccl" and not library.made
        assert found["ring"].executor == "nccl" and found["ring"].can
        assert not found["native"].can and found["native"].why.endswith("native is nccl")
        assert comm.explain("scan", 64, device="cuda")[0].name == "staged"
        with pytest.raises(Unsupported, match="threads|no shared memory"):
            comm.explain("allreduce", 64, memory="symmetric", device="cuda")

    by_nccl(2, check)


def test_forced(by_nccl, monkeypatch):
    """It is refused with the reason where it cannot be, on every rank; and says what it takes."""

    def candidates(comm, library):
        comm.allreduce(find_device().array(np.ones(3)))
        return {(c.operations, c.name): (c.taken, c.why) for c in comm.gpu.candidates}

    found = by_nccl(2, candidates, "nccl")[0]
    assert found["reductions", "nccl"] == (True, "MPIDIST_GPU=nccl forces it")
    assert by_nccl(2, candidates)[1]["movement", "nccl"] == (
        True,
        "every rank has a GPU of its own",
    )
    monkeypatch.setattr("tests.support.emulated.EmulatedDevice.identity", lambda self: "GPU-7")

    def refused(comm, library):
        words = "MPIDIST_GPU=nccl: ranks 0, 1 are all on GPU GPU-7 of "
        with pytest.raises(Unsupported, match=words):
            comm.allreduce(find_device().array(np.ones(3)))

    by_nccl(2, refused, "nccl")
    assert by_nccl(2, candidates)[0]["reductions", "staged"][0]
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    monkeypatch.setattr(Library, "get_version", lambda self: 23203)
    assert by_nccl(2, candidates, "nccl")[1]["reductions", "nccl"][0]
    taken, why = by_nccl(2, candidates)[0]["reductions", "nccl"]
    assert not taken and why.endswith("NCCL_MULTI_RANK_GPU_ENABLE=1 serves MPIDIST_GPU=nccl only")


def test_gradients_by_nccl(by_nccl):
    """DDP sends its buckets while backward goes on, on a stream beside it."""

    def check(comm, library):
        got, ddp = train(comm, "ddp")
        compare_replicas(comm, got)
        for mine, alone in zip(got, train_alone(comm.size, "ddp"), strict=True):
            np.testing.assert_allclose(mine, alone, rtol=1e-9, atol=1e-12)
        assert ddp.stats().overlap == "polls" and library.made
        ddp.reducer.comm.free()

    by_nccl(2, check)


def test_streams_end_with_the_communicator(by_nccl):
    def check(comm, library):
        device = find_device()
        before = device.streams
        comm.iallreduce(device.array(np.ones(3))).wait()
        assert len(device.streams) == len(before) + 3  # two of the staged executor
        comm.free()
        assert device.streams == before

    by_nccl(2, check)


def test_symmetric_arrays_in_the_background(emulated_device):
    """By "auto" they go through the host, by "native" to NCCL; private ones to NCCL."""
    device, alone = find_device(), lambda value: [value]
    heap, service = DeviceHeap(device, 0, 1, alone), SimpleNamespace(groups=((0,),))
    nccl = Nccl(None, service, alone, heap)
    for symmetric in (True, False):
        x = heap.empty((4,), np.dtype("f4")) if symmetric else device.array(np.ones(4, "f4"))
        data = as_device_array(x, 0)
        call = Call("allreduce", 0, 1, 0, data.dtype, data, data, PREDEFINED["sum"])
        assert nccl.why_not(call, "auto", False) is nccl.why_not(call, "native", True) is None
        reason = nccl.why_not(call, "auto", True)
        assert "through the host" in reason if symmetric else reason is None
    heap.close()


def test_free_where_another_rank_has_aborted(by_nccl):
    """It names who does not come, and aborts NCCL here too: destroying it would wait for them."""

    def check(comm, library):
        sub = comm.split(0)
        sub.allreduce(find_device().array(np.ones(3)), algorithm="nccl")
        sub.timeout = 0.2
        if comm.rank == 0:
            with pytest.raises(CollectiveTimeout, match="rank 0: free not finished within 0.2 s"):
                sub.free()
            assert library.made[0].ended == "aborted" and sub.broken
        else:
            sub.gpu.let_go()
        comm.barrier()

    by_nccl(2, check)
