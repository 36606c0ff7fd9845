"""What an array on a device is recognised by, and what is refused."""

from types import SimpleNamespace

import numpy as np
import pytest

import mpidist
from mpidist.calls.arrays import as_input
from mpidist.device.array import DeviceArray
from mpidist.device.find import find_device
from mpidist.device.recognise import as_device_array, is_on_device, make_like
from mpidist.errors import InvalidArgument, UnsupportedDtype


@pytest.fixture
def device(emulated_device):
    return find_device()


def test_an_array_is_described_and_not_copied(device):
    x = device.array(np.arange(12.0, dtype="f4").reshape(3, 4))
    found = as_device_array(x, 0)
    assert is_on_device(x) and not is_on_device(np.ones(3)) and not is_on_device([1, 2])
    assert (found.shape, found.dtype, found.nbytes, found.strides) == ((3, 4), "f4", 48, (16, 4))
    assert device.owns(found.pointer) and found.owner is x and found.device is device
    part = as_device_array(x[1], 0)
    assert part.pointer == found.pointer + 16 and found.overlaps(part) and part.overlaps(found)
    assert not part.overlaps(as_device_array(x[2], 0))
    assert isinstance(make_like(found, (2,), np.dtype("i8")), DeviceArray)


def foreign(device, **changes):
    """An object of another library, which has the interface and nothing else."""
    memory = device.array(np.arange(4.0))
    told = {**memory.__cuda_array_interface__, **changes}
    return SimpleNamespace(__cuda_array_interface__=told, memory=memory)


def test_any_object_with_the_interface_is_taken(device):
    def sum_on(comm):
        here = find_device()
        x, out = foreign(here), foreign(here)
        assert comm.allreduce(x, out=out) is out
        return out.memory.get().tolist()

    assert mpidist.run_simulated(2, sum_on) == [[0.0, 2.0, 4.0, 6.0]] * 2


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"strides": (16,), "shape": (2,)}, InvalidArgument, r"x of shape \(2,\).*strides \(16,\)"),
        ({"data": (0, False)}, InvalidArgument, r"rank 0: x of shape \(4,\) has a null pointer"),
        ({"mask": object()}, InvalidArgument, "x has a mask"),
        ({"typestr": "|O"}, UnsupportedDtype, "x has dtype object"),
        ({"typestr": "<q99"}, UnsupportedDtype, "which numpy does not know"),
        ({"typestr": "<V2", "shape": (4,)}, UnsupportedDtype, "op='sum' is not defined for dtype"),
    ],
)
def test_what_is_refused(device, changes, error, words):
    def call(comm):
        with pytest.raises(error, match=words):
            comm.allreduce(foreign(find_device(), **changes))

    mpidist.run_simulated(1, call)


def test_a_host_pointer_is_refused(device):
    host = np.arange(4.0)

    def call(comm):
        lying = foreign(find_device(), data=host.__array_interface__["data"])
        with pytest.raises(InvalidArgument, match="not an address of the device emulated"):
            comm.allreduce(lying)

    mpidist.run_simulated(1, call)


def test_host_and_device_do_not_mix(device):
    def calls(comm):
        x, host = find_device().array(np.ones(4)), np.ones(4)
        for call in (
            lambda: comm.allreduce(x, out=host),
            lambda: comm.allgather(x[:2], out=host),
            lambda: comm.broadcast(x, 1, host),
        ):
            with pytest.raises(InvalidArgument, match="out is in host memory.*x on a GPU"):
                call()
        for call in (lambda: comm.allreduce(host, out=x), lambda: comm.alltoall(host, x)):
            with pytest.raises(InvalidArgument, match="out is a GPU array and the input is not"):
                call()
        with pytest.raises(InvalidArgument, match="out is on a GPU and x in host memory"):
            comm.broadcast(host, 1 - comm.rank, x)
        with pytest.raises(InvalidArgument, match="dtype float64, the result has float32"):
            comm.allreduce(find_device().array(np.ones(4, "f4")), out=x)
        with pytest.raises(InvalidArgument, match=r"shape \(4,\), the result has \(8,\)"):
            comm.allgather(x, out=x)
        with pytest.raises(InvalidArgument, match="overlaps x"):
            comm.allreduce(x[:3], out=x[1:])
        with pytest.raises(InvalidArgument, match="this call takes host memory only"):
            as_input(x, 0)

    mpidist.run_simulated(2, calls)


def test_tensors_of_torch():
    """On the host: the interface is read from what tensors on any device have."""
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    from mpidist.device.tensors import interface_of, make_like

    for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        x = torch.zeros(3, 4, dtype=dtype, requires_grad=True)
        told = interface_of(x)
        assert told["typestr"].name == name and told["shape"] == (3, 4)
        assert told["data"] == (x.data_ptr(), False)
        assert told["strides"] == (4 * told["typestr"].itemsize, told["typestr"].itemsize)
        made = make_like(x)((5,), told["typestr"])
        assert made.dtype == dtype and made.shape == (5,)
    assert not is_on_device(torch.zeros(2))


def test_lazy_tensors(device, monkeypatch):
    """Lazy conjugates and negatives; and where PyTorch raises instead of having no address."""
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    x = torch.ones(3, dtype=torch.complex64)
    for lazy, words in ((x.conj(), "conj"), (x.conj().imag, "resolve_neg")):
        with pytest.raises(InvalidArgument, match=f"rank 1: out is a lazily .*{words}"):
            as_device_array(lazy, 1, "out")

    def raises(x):
        raise KeyError(x.dtype)  # as for bfloat16, before PyTorch 2.4

    monkeypatch.setattr(torch.Tensor, "__cuda_array_interface__", property(raises))
    assert not is_on_device(torch.zeros(2))
