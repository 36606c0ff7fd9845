"""Where the tensors of a stage are that come from other stages: on the host or on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

from ...device.recognise import is_on_device
from ...gpu.messages import Parcels

MARK = "@gpu"
"""Ends the dtype of a form whose sender has the tensor on a GPU."""


class OnDevice:
    """The place of a stage's tensors: where its parameters are, or without any the sender's are.

    Attributes
    ----------
    there : bool or None
        Whether the parameters are on a GPU; None without any.
    direct : callable
        ``direct()`` tells whether the MPI library takes addresses on a GPU.
    """

    def __init__(self, parameters: Iterable[Any] = ()):
        places = [is_on_device(p.data) for p in parameters]
        self.there: bool | None = any(places) if places else None
        self.direct: Callable[[], bool] = bool

    @cached_property
    def parcels(self) -> Parcels:
        """What moves tensors."""
        return Parcels(self.direct())

    def place(self, dtype: str) -> tuple[str, bool]:
        """Give the dtype of a form without its mark, and whether this stage has it on a GPU."""
        marked = dtype.endswith(MARK)
        name = dtype[: -len(MARK)] if marked else dtype
        return name, marked if self.there is None else self.there
