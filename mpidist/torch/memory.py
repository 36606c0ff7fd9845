"""The memory that autograd keeps for the way back of one microbatch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch


class Noted:
    """Notes what autograd saves, each time that it is entered."""

    def __init__(self) -> None:
        self._saved: list[Any] = []

    def __enter__(self) -> None:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()

    def __exit__(self, *about: Any) -> None:
        self._hooks.__exit__(*about)

    def _pack(self, x: Any) -> tuple[Any, int]:
        packed = x.detach()  # an output that held itself would never be gone
        self._saved.append(weakref.ref(packed))
        return packed, packed._version

    def forget(self) -> None:
        """Forget all."""
        self._saved = []

    def nbytes(self, beside: Iterable[Any], apart: Iterable[Any]) -> int:
        """Count the bytes of what is still there, and of `beside`, but not of `apart`."""
        still = [x for x in (saved() for saved in self._saved) if x is not None]
        return nbytes_of([*still, *beside], apart)


class Look:
    """Looks at what autograd saves, where PyTorch allows it.

    ``torch.func.grad`` and its kin allow no hooks: they raise before they begin.  What was computed
    until then is done once more without, and of that module nothing is noted any more.

    Parameters
    ----------
    module : torch.nn.Module
        Whose buffers what is computed may change.
    """

    def __init__(self, module: Any):
        self._module, self._allowed = module, True

    def at(self, run: Callable[[], Any], noted: Noted | None, given: Iterable[Any] = ()) -> Any:
        """Give ``run()``, which may change the tensors of `given` in place."""
        if noted is None or not self._allowed:
            return run()
        state = [(x, x.detach().clone()) for x in (*given, *self._module.buffers())]
        random = torch.get_rng_state()
        try:
            with noted:
                return run()
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
        self._allowed = False
        noted.forget()
        for x, before in state:
            x.data.copy_(before)
        torch.set_rng_state(random)
        return run()


def _unpack(packed: tuple[Any, int]) -> Any:
    x, version = packed
    if x._version != version:  # autograd does not look itself where there are hooks
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: {list(x.shape)}, version {x._version} in place of {version}"
        )
    return x


def nbytes_of(tensors: Iterable[Any], apart: Iterable[Any] = ()) -> int:
    """Count the bytes of the memory that tensors are in, each once."""
    found = dict(memory for x in tensors for memory in _memories(x))
    for x in apart:
        for place, _ in _memories(x):
            found.pop(place, None)
    return sum(found.values())


def _memories(x: Any) -> list[tuple[int, int]]:
    """Give where a tensor lies, and how many bytes are there."""
    if x.layout != torch.strided:
        parts = (x._indices(), x._values()) if x.is_sparse else ()
        return [memory for part in parts for memory in _memories(part)]
    try:
        storage = x.untyped_storage()
        return [(storage.data_ptr(), storage.nbytes())]
    except (NotImplementedError, RuntimeError):  # a tensor that only stands for others
        return [(id(x), x.numel() * x.element_size())]
