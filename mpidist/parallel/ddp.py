"""Data parallelism: every rank holds the whole model and a part of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import InvalidArgument
from .buckets import Bucket, assign_buckets

MIB = 1 << 20


class DDP:
    """A module whose gradients are averaged over the ranks of a communicator.

    Call :meth:`broadcast_parameters` once, at the start, and :meth:`sync_gradients` after every
    ``backward`` and before ``optimizer.step()``.  Everything else is the module's.

    Parameters
    ----------
    module : object
        Anything with ``parameters()`` whose items have ``data`` and ``grad``, numpy or cupy arrays.
    comm : Communicator
        The ranks.
    bucket_bytes, first_bucket_bytes : int
        Largest size in bytes of a bucket of gradients, and of the first one.
    algorithm : str
        Of the allreduce.

    Attributes
    ----------
    module, comm
        As given.
    buckets : tuple of Bucket
        In the order in which a backward pass completes them.
    in_flight_high_water : int
        Most allreduces that this object has had under way at a time.

    Raises
    ------
    InvalidArgument
        If a bucket size is not a whole number > 0.

    Notes
    -----
    Bucket sizes are those of PyTorch's reducer.  After a sync each ``grad`` is a part of its bucket
    and stays valid until the next one: copy it to keep it.
    """

    def __init__(
        self,
        module: Any,
        comm: Any,
        bucket_bytes: int = 25 * MIB,
        first_bucket_bytes: int = MIB,
        algorithm: str = "auto",
    ):
        sizes = {"bucket_bytes": bucket_bytes, "first_bucket_bytes": first_bucket_bytes}
        for argument, value in sizes.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidArgument(
                    f"rank {comm.rank}: {argument}={value!r}: allowed are whole numbers > 0"
                )
        self.module, self.comm, self.algorithm = module, comm, algorithm
        self.in_flight_high_water = 0
        named = self.named_parameters()
        order = assign_buckets(
            [p.data.nbytes for _, p in named],
            [(type(p.data).__module__, str(p.data.dtype)) for _, p in named],
            bucket_bytes,
            first_bucket_bytes,
        )
        self.buckets = tuple(
            Bucket([named[i][1] for i in bucket], [named[i][0] for i in bucket]) for bucket in order
        )

    # -- between the ranks ------------------------------------------------------------------------

    def sync_gradients(self) -> None:
        """Replace every gradient by its mean over the ranks, one bucket after another.

        Gradients that are None count as zero and are set afterwards.
        """
        for bucket in self.buckets:
            flat = bucket.pack(self.comm.rank)
            self.comm.allreduce(flat, op="mean", out=flat, algorithm=self.algorithm)
            self.in_flight_high_water = max(self.in_flight_high_water, 1)
            bucket.unpack()

    def overlapped_sync_gradients(self) -> None:
        """Do what :meth:`sync_gradients` does with all buckets in flight together."""
        under_way = []
        for bucket in self.buckets:
            flat = bucket.pack(self.comm.rank)
            work = self.comm.iallreduce(flat, op="mean", out=flat, algorithm=self.algorithm)
            under_way.append((bucket, work))
            self.in_flight_high_water = max(self.in_flight_high_water, len(under_way))
        for bucket, work in under_way:
            work.wait()
            bucket.unpack()

    def broadcast_parameters(self, root: int = 0) -> None:
        """Copy the parameters of `root` into those of every rank, in place.

        Parameters and their arrays stay the same objects, so optimizers go on with them.

        Raises
        ------
        InvalidArgument
            On every rank, if the ranks' parameters differ in name, shape or dtype.
        """
        self._check_layout(root)
        for _, p in self.named_parameters():
            self.comm.broadcast(p.data, root=root, out=p.data)

    def _check_layout(self, root: int) -> None:
        mine = [(n, tuple(p.data.shape), str(p.data.dtype)) for n, p in self.named_parameters()]
        layouts = self.comm.allgather_object(mine)
        for rank, layout in enumerate(layouts):
            if layout != layouts[0]:
                longest = max(len(layout), len(layouts[0]))
                pairs = zip(_padded(layout, longest), _padded(layouts[0], longest), strict=True)
                there, here = next((a, b) for a, b in pairs if a != b)
                raise InvalidArgument(
                    f"broadcast_parameters(root={root}): rank {rank} has {there} where rank 0 has "
                    f"{here}; the modules must have the same parameters on all ranks"
                )

    # -- the module's own -------------------------------------------------------------------------

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Call the module."""
        return self.module(*inputs, **options)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Call the module's forward."""
        return self.module.forward(*inputs, **options)

    def backward(self, grad: Any) -> Any:
        """Call the module's backward."""
        return self.module.backward(grad)

    def parameters(self) -> list[Any]:
        """List the module's parameters."""
        return list(self.module.parameters())

    def named_parameters(self) -> list[tuple[str, Any]]:
        """List the module's parameters with their names (or numbers, if it has none), each once."""
        names: Callable[[], Any] | None = getattr(self.module, "named_parameters", None)
        once: dict[int, tuple[str, Any]] = {}
        for name, p in enumerate(self.module.parameters()) if names is None else names():
            once.setdefault(id(p), (str(name), p))
        return list(once.values())

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for p in self.parameters():
            p.grad = None

    def train(self, mode: bool = True) -> DDP:
        """Switch the module to training, or (False) to evaluation."""
        if mode:
            self.module.train()
        else:
            self.module.eval()
        return self

    def eval(self) -> DDP:
        """Switch the module to evaluation."""
        return self.train(False)

    @property
    def training(self) -> bool:
        """Whether the module is in training."""
        return self.module.training

    def __repr__(self) -> str:
        return f"DDP({self.module!r}, {len(self.buckets)} buckets on {self.comm.size} ranks)"


def _padded(layout: list[Any], length: int) -> list[Any]:
    return [*layout, *["nothing"] * (length - len(layout))]
