"""The blocking collectives: methods of the communicator, one function each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from . import arguments
from .operations import Op

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
    """Combine the arrays of all ranks elementwise; every rank gets the result.

    Parameters
    ----------
    x : array_like
        This rank's contribution, of any shape; the same shape and dtype on every rank.
    op : str, Op or callable
        "sum", "mean", "prod", "max", "min", "and", "or", "xor", an :class:`Op`, or ``f(a, b)``.
    out : ndarray, optional
        Where the result goes, of the shape and dtype of `x`; ``out=x`` is in place.
    algorithm : str
        "auto", "native", "symmetric", "staged", "single_copy", or a name of ``mpidist list``,
        for example "ring" or "tree:4".  The same on every rank.
    commute : bool, optional
        With a function as `op`: whether it is commutative.  Functions of numpy that are
        associative and commutative, such as ``np.add`` and ``np.hypot``, do not need it.

    Returns
    -------
    ndarray
        `out`, or a new array of the shape and dtype of `x`; a numpy scalar if `x` is 0-d.

    Raises
    ------
    InvalidArgument
        If `op` or `algorithm` is unknown, or `out` does not fit, cannot be written, or overlaps `x`
        in part.
    UnsupportedDtype
        If `op` is not defined for the dtype.
    Unsupported
        If `algorithm` cannot serve the call; the message names what can.
    CollectiveTimeout
        If the deadline passes; it names the ranks that have not come.
    CollectiveMismatch
        If the ranks do not make the same call: where it shows, or always with ``MPIDIST_DEBUG=1``.

    Notes
    -----
    All ranks get the same bits; but for "native", of which MPI leaves that open.  Whatever the
    algorithm, integers wrap as in numpy, "max" and "min" of NaN are NaN, and a mean of half
    precision does not overflow.
    """
    key = ("allreduce", id(x), id(out), op, algorithm, commute)
    quick = self._quick.find(key, x, out)
    if quick is not None:
        quick.run()
        return out
    return self._run(
        "allreduce",
        partial(arguments.reducing, self, "allreduce", x, op, out, commute),
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
    """Combine the arrays of all ranks elementwise; `root` gets the result.

    Parameters
    ----------
    x, op, algorithm, commute
        See :meth:`allreduce`, as for what is raised.
    root : int
        Who gets the result.
    out : ndarray, optional
        On the root, where the result goes, of the shape and dtype of `x`; of no meaning elsewhere.

    Returns
    -------
    ndarray or None
        On the root `out`, or a new array; None elsewhere.
    """
    key = ("reduce", id(x), id(out), op, algorithm, root, commute)
    quick = self._quick.find(key, x, out)
    if quick is not None:
        quick.run()
        return out if self.rank == root else None
    return self._run(
        "reduce",
        partial(arguments.reducing, self, "reduce", x, op, out, commute, root),
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
        See :meth:`allreduce`, as for what is raised.

    Returns
    -------
    ndarray
        `out`, else `x` itself, filled.
    """
    key = ("broadcast", id(x), id(out), algorithm, root)
    quick = self._quick.find(key, x, out)
    if quick is not None:
        quick.run()
        return x if out is None else out
    return self._run(
        "broadcast",
        partial(arguments.broadcasting, self, x, out, root),
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
        See :meth:`allreduce`, as for what is raised.

    Returns
    -------
    ndarray
        `out`, or a new array of shape (p·n, …), or (sum(counts), …).
    """
    key = ("allgather", id(x), id(out), algorithm) if counts is None else None
    quick = self._quick.find(key, x, out)
    if quick is not None:
        quick.run()
        return out
    return self._run(
        "allgather",
        partial(arguments.gathering, self, "allgather", x, out, counts),
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
    """Join the arrays of all ranks along axis 0; `root` gets the result.

    Parameters
    ----------
    x : array_like
        This rank's rows, shape (n, …); a scalar counts as one row.
    root : int
        Who gets the result.
    out : ndarray, optional
        On the root, of shape (p·n, …); `x` may be the root's part of it.
    counts : sequence of int, optional
        Rows of each rank, where they differ; the same on every rank.
    algorithm : str
        See :meth:`allreduce`, as for what is raised.

    Returns
    -------
    ndarray or None
        On the root `out`, or a new array; None elsewhere.
    """
    key = ("gather", id(x), id(out), algorithm, root) if counts is None else None
    quick = self._quick.find(key, x, out)
    if quick is not None:
        quick.run()
        return out if self.rank == root else None
    return self._run(
        "gather",
        partial(arguments.gathering, self, "gather", x, out, counts, root),
        algorithm,
        key,
        x,
        out,
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
    out : ndarray, optional
        This rank's rows; may be rows r·n … (r+1)·n of `x`.
    op, algorithm, commute
        See :meth:`allreduce`, as for what is raised.

    Returns
    -------
    ndarray
        `out`, or a new array of shape (n, …), or (counts[r], …).
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
        partial(arguments.reduce_scattering, self, x, op, out, counts, commute),
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
    root : int
        Who has the data.
    algorithm : str
        See :meth:`allreduce`, as for what is raised.

    Returns
    -------
    ndarray
        `out`, or a new array of shape (n, …), or (counts[r], …).
    """
    mine = x if self.rank == root else out
    key = ("scatter", id(mine), id(out), algorithm, root) if counts is None else None
    quick = self._quick.find(key, mine, out)
    if quick is not None:
        quick.run()
        return out
    return self._run(
        "scatter",
        partial(arguments.scattering, self, x, out, counts, root),
        algorithm,
        key,
        mine,
        out,
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
        Shape (p·n, …): rows d·n … (d+1)·n go to rank d.
    out : ndarray, optional
        Of the result's shape; may be `x`.
    counts : sequence of int, optional
        Rows that this rank sends to each rank, where they differ; or, to save a small
        exchange, the whole p x p table with ``counts[r][d]`` the rows from r to d.
    algorithm : str
        See :meth:`allreduce`, as for what is raised.

    Returns
    -------
    ndarray
        `out`, or a new array of the shape of `x`; with `counts`, as many rows as all send here.
    """
    key = ("alltoall", id(x), id(out), algorithm) if counts is None else None
    quick = self._quick.find(key, x, out)
    if quick is not None:
        quick.run()
        return out
    return self._run(
        "alltoall", partial(arguments.exchanging, self, x, out, counts), algorithm, key, x, out
    )


def barrier(self: Communicator, algorithm: str = "auto") -> None:
    """Wait until every rank has come here.

    Parameters
    ----------
    algorithm : str
        See :meth:`allreduce`.

    Raises
    ------
    CollectiveTimeout
        If the deadline passes; it names the ranks that have not come.
    """
    key = ("barrier", algorithm)
    quick = self._quick.find(key, _NOTHING, None)
    if quick is not None:
        quick.run()
        return
    self._run("barrier", partial(arguments.meeting, self), algorithm, key, _NOTHING, None)
