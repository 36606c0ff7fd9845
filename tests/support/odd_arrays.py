"""Arrays and tensors that are not the memory they show: what every door must unwrap or refuse."""

import numpy as np

from tests.support.training_kits import torch


class Quantity(np.ndarray):
    """Numbers with a unit, which its own ufuncs know."""

    unit = "m"

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        return NotImplemented


class Masked:
    """Memory with a mask, by numpy's interface."""

    def __init__(self, count):
        self._data = np.ones(count)
        self.__array_interface__ = {**self._data.__array_interface__, "mask": np.ones(count, bool)}


class Freed:
    """An address of 0 with elements, by numpy's interface."""

    def __init__(self, count):
        self.__array_interface__ = {
            "shape": (count,), "typestr": "<f8", "data": (0, False), "version": 3
        }  # fmt: skip


def odd_ndarrays(count):
    """Return (value, word of the error) for subclasses of numpy's ndarray."""
    return [
        (np.ma.masked_array(np.ones(count), [1] + [0] * (count - 1)), "a masked array"),
        (np.ma.zeros(count), "a masked array"),
        (np.ones(count).view(Quantity), "Quantity, which redefines numpy's functions"),
    ]


def odd_exposed(count):
    """Return (value, word of the error) for objects that expose memory by numpy's interface."""
    return [(Masked(count), "with a mask"), (Freed(count), "null pointer")]


if torch is not None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.testing._internal.two_tensor import TwoTensor

    class Named(torch.Tensor):
        """A subclass that redefines no operator: its memory is its value."""

    def waiting(x):
        """Return `x` as a functional collective returns it: an AsyncCollectiveTensor."""
        return AsyncCollectiveTensor(x)

    def freed(count):
        x = torch.ones(count)
        x.untyped_storage().resize_(0)
        return x

    def transformed(act, count):
        """Return a tensor of a transform: ``vmap``, ``grad`` or ``jvp`` of torch.func."""
        kept = []
        act(lambda x: (kept.append(x), x.sum())[1])(torch.ones(2, count))
        return kept[0]

    def odd_tensors(count):
        """Return (value, words of the error) for tensors that have no memory as they show."""
        import warnings

        from torch.masked import masked_tensor

        one = torch.ones(count)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            masked = masked_tensor(one, one > 0)
            compressed = one.view(1, -1).to_sparse_csr()
            ragged = torch.nested.nested_tensor([one, one[1:]], layout=torch.jagged)
            quantized = torch.quantize_per_tensor(one, 0.1, 0, torch.qint8)
        return [
            (TwoTensor(one, one), "TwoTensor", "made of"),
            (torch.nn.Parameter(TwoTensor(one, one)), "TwoTensor", "made of"),
            (masked, "MaskedTensor", "get_mask"),
            (ragged, "NestedTensor", "values"),
            (FakeTensorMode().from_tensor(one), "FakeTensor", "no values"),
            (torch.nn.LazyLinear(count).weight, "a lazy parameter", "call its module"),
            (quantized, "a quantized tensor", "dequantize"),
            (compressed, "sparse_csr", "dense"),
            (one.to_mkldnn(), "mkldnn", "dense"),
            (one.to("meta"), "meta", ""),
            (torch._efficientzerotensor(count), "without memory", "freed"),
            (torch._to_functional_tensor(one), "without memory", "tracer"),
            (freed(count), "without memory", "freed"),
            (transformed(torch.vmap, count), "without memory", "torch.func"),
            (transformed(torch.func.grad, count), "without memory", "torch.func"),
        ]
