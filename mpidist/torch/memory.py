"""The memory of tensors, flat, as a communicator takes it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..calls.arrays import view_at
from ..communicator.communicator import Communicator
from ..communicator.layers import is_symmetric
from ..device import tensors as host
from ..errors import InvalidArgument
from . import framework
from .work import Act, Member

USE_OTHER_GROUP = (
    "; make a group of another backend beside it, such as dist.new_group(backend='nccl')"
)
DEVICES = "cpu", "cuda"
_MOST_ARRAYS = 1024
_SMALL = 16384  # bytes of a tensor that is copied to and from memory that the communicator knows
_MOST_SCRATCH = 256  # pieces of such memory
_move = ctypes.PyDLL(None).memmove  # unlike ctypes.memmove it keeps Python's lock, for few bytes
_move.argtypes, _move.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], None

Place = tuple[int, int, torch.dtype]  # of a tensor in memory: address, number of elements, dtype


# Numpy arrays on the memory of tensors.  PyTorch makes new tensors on the same memory all the time,
# but a communicator recognises a repeated call by the identity of its array.  The arrays do not
# keep the memory alive; they are only used while a tensor does.
_ARRAYS: dict[Place, np.ndarray] = {}


def forget_arrays() -> None:
    """Forget all arrays, as an address may have become symmetric memory, or ceased to be."""
    _ARRAYS.clear()


def _array(x: Tensor) -> np.ndarray:
    """Return the flat array on the memory of a contiguous tensor.

    Raises InvalidArgument if its memory is not its value; the message continues "x is …".
    """
    key = (x.data_ptr(), x.numel(), x.dtype)
    found = _ARRAYS.get(key)
    if found is None:
        dtype = host.dtype_of(x.dtype)
        if isinstance(dtype, str):  # not a dtype of numpy: it can be sent, but not reduced
            dtype = np.dtype((np.void, x.element_size()))
        if x.is_quantized:
            raise InvalidArgument(host.QUANTIZED)
        if key[1] and not key[0]:
            raise InvalidArgument(host.WITHOUT_MEMORY)
        if len(_ARRAYS) >= _MOST_ARRAYS:
            forget_arrays()
        found = _ARRAYS[key] = view_at(*key[:2], dtype)
    return found


def is_memory(x: Tensor) -> bool:
    """Return whether the elements of a dense tensor are its memory, in order."""
    return x.is_contiguous() and not x.is_conj() and not x.is_neg()


def readable(x: Tensor) -> Tensor:
    """Return a contiguous tensor with the elements of `x`: itself, or a copy."""
    return x if is_memory(x) else x.detach().resolve_conj().resolve_neg().contiguous()


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements of tensors, one after another, in a flat tensor."""
    return torch.cat([readable(host.plain(t).detach()).reshape(-1) for t in tensors])


def deal(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy a flat tensor into `tensors`, which get consecutive parts of it."""
    if _on_host(flat) and flat.nbytes <= _SMALL and all(map(_can_move, tensors)):
        source = flat.data_ptr()  # 0.3 µs for each tensor in place of 2
        for target in tensors:
            _move(target.data_ptr(), source, target.nbytes)
            source += target.nbytes
        return
    for target, part in zip(tensors, flat.split([t.numel() for t in tensors])):
        target.copy_(part.view(target.shape))


def apart(x: Tensor, out: Tensor) -> Tensor:
    """Return `x`, or a copy of it if it may share memory with the contiguous tensor `out`."""
    start, nbytes = out.data_ptr(), out.numel() * out.element_size()
    mine = x.data_ptr()  # 0 is no memory, which flat() refuses
    last = mine + (x.untyped_storage().nbytes() if not x.is_contiguous() else x.nbytes)
    return x.clone() if mine and mine < start + nbytes and start < last and nbytes else x


def _on_host(x: Tensor) -> bool:
    """Return whether a tensor is in memory of the host, also where a device is emulated there."""
    return x.is_cpu and not framework.is_on_gpu(x)


def _can_move(x: Tensor) -> bool:
    """Return whether a dense tensor can be filled by memmove."""
    return _on_host(x) and is_memory(x) and (x.data_ptr() != 0 or not x.numel())


class TensorMemory:
    """The memory of the tensors of a group's calls, and scratch that takes the place of some."""

    def __init__(self, comm: Communicator, member: Member):
        self._comm, self._member = comm, member
        # For small tensors, by use, length and dtype: PyTorch makes new ones all the time, and for
        # an array at another address a communicator takes 20 to 40 µs more.
        self._scratch: dict[tuple[str, int, torch.dtype], tuple[Tensor, np.ndarray]] = {}
        self._last: dict[str, Place] = {}  # the last tensor of each use

    def flat(self, x: Tensor) -> Any:
        """Return the memory of a contiguous dense tensor, flat, as the communicator takes it.

        It is a numpy array for a tensor of the CPU, and a tensor for one on a GPU.
        """
        if x.device.type not in DEVICES or x.layout is not torch.strided:
            kind = f"with layout {x.layout}" if x.device.type in DEVICES else f"on {x.device}"
            raise NotImplementedError(
                f"rank {self._member.rank}: a tensor {kind}: group {self._member.name!r} of the "
                f"backend mpidist takes dense tensors on {' and '.join(DEVICES)}, and sparse COO "
                f"tensors in all_reduce with SUM: pass x.cpu() or x.to_dense(){USE_OTHER_GROUP}"
            )
        if framework.is_on_gpu(x):
            return x.detach().view(-1)
        try:
            return _array(x)
        except (InvalidArgument, RuntimeError) as error:  # PyTorch's: a tensor of a transform
            what = error if isinstance(error, InvalidArgument) else host.WITHOUT_MEMORY
            raise self._member.wrong(f"a tensor is {what}") from None

    def through(self, x: Tensor, use: str) -> tuple[Any, Act | None, Act | None]:
        """Return memory for a contiguous tensor, and functions that load and store it.

        It is that of the tensor, as :meth:`flat` returns it, without functions; for a small tensor
        at an address that is not known yet other memory, which the communicator knows.  `use`
        distinguishes the tensors of a call.  What is symmetric is passed as it is: the ranks must
        pass the same.
        """
        if not _on_host(x) or x.layout is not torch.strided:
            return self.flat(x), None, None
        try:
            key = (x.data_ptr(), x.numel(), x.dtype)
        except RuntimeError:  # of a tensor of a transform, which flat() refuses
            return self.flat(x), None, None
        known = _ARRAYS.get(key)
        if known is not None:
            return known, None, None
        address, nbytes = key[0], x.nbytes
        again = self._last.get(use) == key  # a loop over one tensor
        self._last[use] = key
        if again or not address or not self._fits(nbytes) or is_symmetric(self._comm, address):
            return self.flat(x), None, None
        tensor, array = self._kept(x, use, key[1])
        there = tensor.data_ptr()
        load = functools.partial(_move, there, address, nbytes)
        return array, load, functools.partial(_move, address, there, nbytes)

    def scratch(self, x: Tensor, numel: int) -> tuple[Tensor, Any]:
        """Return a flat tensor for `numel` elements like those of `x`, and its memory.

        It is for use until the end of the operation that is performed.
        """
        if _on_host(x) and self._fits(numel * x.element_size()):
            return self._kept(x, "joined", numel)
        made = x.new_empty(numel)
        return made, self.flat(made)

    def _fits(self, nbytes: int) -> bool:
        return 0 < nbytes <= _SMALL and len(self._scratch) < _MOST_SCRATCH

    def _kept(self, x: Tensor, use: str, numel: int) -> tuple[Tensor, Any]:
        """Return memory for `numel` elements of the dtype of `x`, as tensor and array.

        It is kept as long as the group: queued operations have only the array.
        """
        found = self._scratch.get((use, numel, x.dtype))
        if found is None:
            tensor = x.detach().new_empty(numel)
            found = tensor, self.flat(tensor)
            self._scratch[use, numel, x.dtype] = found
        return found

    def writable(self, what: str, x: Tensor, late: bool = False) -> tuple[Tensor, Act | None]:
        """Return a contiguous tensor for a result, and a function that copies it into `x`.

        If `x` is contiguous, it is `x` itself, with None in place of the function.  `what` names
        `x`, which must pass :meth:`check_separate`: at once, or if `late`, when the function is
        called.  That is for tensors that not all members write: the others have sent by then.
        """
        if is_memory(x):
            return x, None
        if not late:
            self.check_separate(what, x)
        given, made = x.detach(), readable(x)

        def back() -> None:
            self.check_separate(what, x)
            given.copy_(made)

        return made, back

    def check_separate(self, what: str, *tensors: Tensor) -> None:
        """Raise InvalidArgument if elements of a tensor, which is to be written, share memory.

        `what` names the tensors in the message, with {} in place of the index.
        """
        for k, x in enumerate(tensors):
            if x.layout is not torch.strided or x.is_contiguous():
                continue
            axes = [(step, n) for step, n in zip(x.stride(), x.shape) if n > 1]
            span = 1 + sum(step * (n - 1) for step, n in axes)
            if x.numel() > span or any(step == 0 for step, _ in axes):
                raise self._member.wrong(
                    f"{what.format(k)} has shape {tuple(x.shape)} and strides {x.stride()}, with "
                    "which elements share memory, as after expand(): expected memory for each "
                    "element, as clone() and contiguous() give"
                )
