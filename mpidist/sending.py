"""Messages between two ranks, and objects of any kind: methods of the communicator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from . import objects
from .device.recognise import is_on_device
from .work import UNSET, Work

if TYPE_CHECKING:
    from .communicator import Communicator


def send(self: Communicator, x: Any, peer: int, tag: int = 0) -> None:
    """Send an array to another rank.

    Parameters
    ----------
    x : array_like
        Of any shape, dtype and length, on the host or on a GPU.
    peer : int
        Who is to receive it, into an array of this dtype and shape.
    tag : int
        A number ≥ 0 that the receiver gives as well; messages of one tag keep their order.

    Raises
    ------
    InvalidArgument
        If `peer` is no other rank, or `tag` or `x` cannot be.
    CollectiveTimeout
        If it has not been taken within the deadline; the communicator is broken then.
    """
    if type(x) is not np.ndarray and is_on_device(x):
        self._gpu_messages.isend(x, peer, tag).wait()
    else:
        self._messages.send(x, peer, tag)


def recv(
    self: Communicator, out: np.ndarray, peer: int, tag: int = 0, timeout: float | None = UNSET
) -> np.ndarray:
    """Receive what :meth:`send` sent.

    Parameters
    ----------
    out : ndarray
        Filled; of the dtype and shape of the message.  Axes of length 1 do not count.
    peer, tag : int
        See :meth:`send`.
    timeout : float or None, optional
        Seconds; by default the communicator's deadline, None for none.

    Returns
    -------
    ndarray
        `out`.

    Raises
    ------
    InvalidArgument
        If `peer` is no other rank, or `tag` or `out` cannot be.
    MessageMismatch
        If the message has another dtype or shape.  Nothing of it is stored, and the communicator
        stays usable; the sender does not hear of it.
    CollectiveTimeout
        If nothing comes in time; the communicator is broken then.
    """
    if type(out) is not np.ndarray and is_on_device(out):
        return self._gpu_messages.irecv(out, peer, tag).wait(timeout)
    return self._messages.recv(out, peer, tag, timeout)


def isend(self: Communicator, x: Any, peer: int, tag: int = 0) -> Work:
    """Begin :meth:`send`; the array is not to be touched before ``wait()``."""
    if type(x) is not np.ndarray and is_on_device(x):
        return self._gpu_messages.isend(x, peer, tag)
    return self._messages.isend(x, peer, tag)


def irecv(self: Communicator, out: np.ndarray, peer: int, tag: int = 0) -> Work:
    """Begin :meth:`recv`; the array is not to be touched before ``wait()``."""
    if type(out) is not np.ndarray and is_on_device(out):
        return self._gpu_messages.irecv(out, peer, tag)
    return self._messages.irecv(out, peer, tag)


def send_object(self: Communicator, value: Any, peer: int, tag: int = 0) -> None:
    """Send any object that can be pickled; see :meth:`send`."""
    self._messages.send_object(value, peer, tag)


def recv_object(self: Communicator, peer: int, tag: int = 0, timeout: float | None = UNSET) -> Any:
    """Receive what :meth:`send_object` sent.  Unpickling runs code: trust the sender."""
    return self._messages.recv_object(peer, tag, timeout)


def broadcast_object(self: Communicator, value: Any, root: int = 0) -> Any:
    """Bring the root's object to every rank, pickled; gives it."""
    return objects.broadcast_object(self, value, self._root(root))


def allgather_object(self: Communicator, value: Any) -> list[Any]:
    """Give everyone the list of all ranks' objects, in rank order; they go pickled."""
    return objects.allgather_object(self, value)
