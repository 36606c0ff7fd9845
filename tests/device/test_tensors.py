"""Tensors of PyTorch as arrays of a device."""

import pytest

from mpidist.device.find import find_device
from mpidist.device.recognise import as_device_array, is_on_device
from mpidist.errors import InvalidArgument


@pytest.fixture
def device(emulated_device):
    return find_device()


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
