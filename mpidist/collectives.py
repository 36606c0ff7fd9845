"""The blocking collectives: methods of the communicator, one function each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from . import arguments, prepare
from .operations import Op, find_op

if TYPE_CHECKING:
    from .communicator import Communicator

_NOTHING = np.empty(0, np.uint8)  # what a barrier moves


def allreduce(
    self: Communicator,
    x: Any,
    op: str | Op | Callable = "sum",
    out: np.ndarray | None = None,
    algorithm: str = "auto",
    *,
    commute: bool | None = None,
) -> Any:
    """Combine the arrays of all ranks; every rank gets the result.

    Parameters
    ----------
    x : array_like
        This rank's contribution; the same shape and dtype on every rank.
    op : str, Op or callable
        "sum", "mean", "prod", "max", "min", "and", "or", "xor", an :class:`Op`, or ``f(a, b)``.
    out : ndarray, optional
        Where the result goes; ``out=x`` is in place.
    algorithm : str
        "auto", "native", or a name of ``mpidist list``, for example "ring" or "tree:4".
    commute : bool, optional
        With a function as `op`: whether it is commutative.

    Returns
    -------
    ndarray
        `out`, or a new array of the shape and dtype of `x`.

    Notes
    -----
    "max" and "min" of floats with NaN: the algorithms here give the same on every rank, as numpy
    does; MPI leaves it open what its own ("native") gives, which may differ between ranks.
    """
    key = ("allreduce", id(x), id(out), op, algorithm, commute)
    quick = self._quick.find(key, x, out)
    if quick is not None:
        quick.run()
        return out
    return self._run(
        "allreduce",
        lambda: arguments.reducing(self, "allreduce", x, op, out, commute),
        algorithm,
        key,
        x,
        out,
    )


def reduce(
    self: Communicator,
    x: Any,
    op: str | Op | Callable = "sum",
    root: int = 0,
    out: np.ndarray | None = None,
    algorithm: str = "auto",
    *,
    commute: bool | None = None,
) -> Any:
    """Combine the arrays of all ranks on `root`; others get None.  See :meth:`allreduce`."""
    key = ("reduce", id(x), id(out), op, algorithm, root, commute)
    quick = self._quick.find(key, x, out)
    if quick is not None:
        quick.run()
        return out if self.rank == root else None
    return self._run(
        "reduce",
        lambda: arguments.reducing(self, "reduce", x, op, out, commute, root),
        algorithm,
        key,
        x,
        out,
    )


def broadcast(
    self: Communicator,
    x: Any,
    root: int = 0,
    out: np.ndarray | None = None,
    algorithm: str = "auto",
) -> Any:
    """Bring the root's array to every rank.

    Parameters
    ----------
    x : array_like
        On the root the data; elsewhere an array of the same shape and dtype, which is filled
        if `out` is not given.
    root : int
        Who has the data.
    out : ndarray, optional
        Where the data go, on any rank.
    algorithm : str
        See :meth:`allreduce`.

    Returns
    -------
    ndarray
        The filled array.
    """
    key = ("broadcast", id(x), id(out), algorithm, root)
    quick = self._quick.find(key, x, out)
    if quick is not None:
        quick.run()
        return x if out is None else out
    return self._run(
        "broadcast",
        lambda: prepare.broadcast(x, out, self._place, self._root(root)),
        algorithm,
        key,
        x,
        out,
    )


def allgather(
    self: Communicator,
    x: Any,
    out: np.ndarray | None = None,
    algorithm: str = "auto",
    *,
    counts: Sequence[int] | None = None,
) -> Any:
    """Join the arrays of all ranks along axis 0; every rank gets the result.

    Parameters
    ----------
    x : array_like
        This rank's rows, shape (n, …); a scalar counts as one row.
    out : ndarray, optional
        Of shape (p·n, …); `x` may be this rank's part of it.
    counts : sequence of int, optional
        Rows of each rank, where they differ; the same on every rank.
    algorithm : str
        See :meth:`allreduce`.
    """
    key = ("allgather", id(x), id(out), algorithm) if counts is None else None
    quick = self._quick.find(key, x, out)
    if quick is not None:
        quick.run()
        return out
    return self._run(
        "allgather",
        lambda: prepare.gathering("allgather", x, out, counts, self._place),
        algorithm,
        key,
        x,
        out,
    )


def gather(
    self: Communicator,
    x: Any,
    root: int = 0,
    out: np.ndarray | None = None,
    algorithm: str = "auto",
    *,
    counts: Sequence[int] | None = None,
) -> Any:
    """Join the arrays of all ranks along axis 0 on `root`; the others get None."""
    return self._run(
        "gather",
        lambda: prepare.gathering("gather", x, out, counts, self._place, self._root(root)),
        algorithm,
    )


def reduce_scatter(
    self: Communicator,
    x: Any,
    op: str | Op | Callable = "sum",
    out: np.ndarray | None = None,
    algorithm: str = "auto",
    *,
    counts: Sequence[int] | None = None,
    commute: bool | None = None,
) -> Any:
    """Combine the arrays of all ranks and deal the rows of the result out.

    Parameters
    ----------
    x : array_like
        Shape (p·n, …); rank r gets rows r·n … (r+1)·n of the combination.
    counts : sequence of int, optional
        Rows for each rank, where they differ; the same on every rank.
    op, out, algorithm, commute
        See :meth:`allreduce`.
    """
    key = None
    if counts is None:
        key = ("reduce_scatter", id(x), id(out), op, algorithm, commute)
    quick = self._quick.find(key, x, out)
    if quick is not None:
        quick.run()
        return out
    return self._run(
        "reduce_scatter",
        lambda: prepare.reduce_scatter(x, find_op(op, commute), out, counts, self._place),
        algorithm,
        key,
        x,
        out,
    )


def scatter(
    self: Communicator,
    x: Any,
    root: int = 0,
    out: np.ndarray | None = None,
    algorithm: str = "auto",
    *,
    counts: Sequence[int] | None = None,
) -> Any:
    """Deal the rows of the root's array out.

    Parameters
    ----------
    x : array_like
        On the root, shape (p·n, …); of no meaning elsewhere.
    out : ndarray, optional
        This rank's rows.  To be given on every rank or on none: without it the root first
        tells the shape, which costs a message.
    counts : sequence of int, optional
        Rows for each rank, where they differ; the same on every rank.
    root, algorithm
        See :meth:`broadcast`.
    """
    return self._run(
        "scatter", lambda: arguments.scattering(self, x, self._root(root), out, counts), algorithm
    )


def alltoall(
    self: Communicator,
    x: Any,
    out: np.ndarray | None = None,
    algorithm: str = "auto",
    *,
    counts: Sequence[int] | None = None,
) -> Any:
    """Send row block d to rank d and get the blocks of all ranks, joined in rank order.

    Parameters
    ----------
    x : array_like
        Shape (p·n, …).
    out : ndarray, optional
        Of the result's shape; may be `x`.
    counts : sequence of int, optional
        Rows that this rank sends to each rank, where they differ; or, to save a small
        exchange, the whole p x p table with ``counts[r][d]`` the rows from r to d.
    algorithm : str
        See :meth:`allreduce`.
    """
    key = ("alltoall", id(x), id(out), algorithm) if counts is None else None
    quick = self._quick.find(key, x, out)
    if quick is not None:
        quick.run()
        return out
    return self._run(
        "alltoall", lambda: arguments.exchanging(self, x, out, counts), algorithm, key, x, out
    )


def barrier(self: Communicator, algorithm: str = "auto") -> None:
    """Wait until every rank has come here."""
    key = ("barrier", algorithm)
    quick = self._quick.find(key, _NOTHING, None)
    if quick is not None:
        quick.run()
        return
    self._run("barrier", lambda: arguments.meeting(self), algorithm, key, _NOTHING, None)
