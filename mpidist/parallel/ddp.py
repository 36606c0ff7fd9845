"""Data parallelism: every rank holds the whole model and a part of the batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from ..errors import InvalidArgument, ReplicasDiffer, Unsupported
from .bucket import Bucket
from .claims import Claim
from .clip import clip_by_norm
from .framework import framework_of
from .frozen import Frozen
from .grouping import Grouping
from .join import Join
from .pieces import Divided, Led
from .progress import Average
from .reducer import Reducer
from .replicas import BufferSync, broadcast, check_alike, find_unlike, told
from .resume import give_to_hook, kept_by_hook, send_so, sending_of
from .stats import Stats
from .tree import read_all
from .unused import Unused
from .weakly import Weakly
from .wrapper import Wrapper, check_arguments, check_ready

MIB = 1 << 20


class DDP(Wrapper):
    """A module whose gradients are averaged over the ranks of a communicator.

    Call :meth:`sync_gradients` after ``backward`` and before ``optimizer.step()``.  Everything else
    is the module's.

    Parameters
    ----------
    module : torch.nn.Module, mpidist.nn.Module or object
        Or anything with ``parameters()`` whose items have ``data`` and ``grad``, numpy or cupy
        arrays.
    comm : Communicator
        The ranks.
    bucket_bytes, first_bucket_bytes : int
        Largest size in bytes of a bucket of gradients, and of the first one.
    algorithm : str
        Of the allreduces.  With "auto" one is chosen for each bucket, once, that gives the same
        bits on every rank.
    overlap : {"auto", "none", "polls", "thread"}
        How buckets that are complete are sent while backward goes on: "auto" tries in the first
        steps and keeps what was fastest, "none" sends them within :meth:`sync_gradients`, "polls"
        looks after them whenever a gradient is ready, "thread" does so in a thread of its own.
    hook : callable, optional
        ``hook(bucket)`` begins to send a :class:`Bucket` and gives a :class:`~mpidist.Work`; after
        that ``bucket.flat`` holds the mean, on all ranks alike.  See :mod:`mpidist.parallel.hooks`.
    buffers : {"broadcast", "average", "keep"}
        What :meth:`sync_gradients` does with the module's buffers, such as running means: those of
        rank 0 for all, their mean, or nothing.
    unused : {"zero", "error"}
        What a parameter without a gradient means: zeros, or InvalidArgument on every rank with its
        name and the ranks.
    init_sync : bool
        Whether all ranks begin with the parameters and buffers of rank 0.
    check_replicas : int
        Compare the parameters of all ranks in every so manyth :meth:`sync_gradients`, by a digest;
        0, the default, never.

    Attributes
    ----------
    module, comm
        As given.

    Raises
    ------
    InvalidArgument
        If an argument is not allowed, or another DDP has a parameter of the module; on every rank,
        if their arguments differ, or their parameters in name, shape or dtype.

    Notes
    -----
    Bucket sizes are those of PyTorch's reducer.  Gradients are parts of their buckets, which other
    ranks read: copy one to keep it.
    """

    takes_parts = True  # a rank reads from a checkpoint what its own hook kept, not all ranks'

    def __init__(
        self,
        module: Any,
        comm: Any,
        bucket_bytes: int = 25 * MIB,
        first_bucket_bytes: int = MIB,
        algorithm: str = "auto",
        *,
        overlap: str = "auto",
        hook: Any = None,
        buffers: str = "broadcast",
        unused: str = "zero",
        init_sync: bool = True,
        check_replicas: int = 0,
    ):
        check_arguments(module, comm, hook, bucket_bytes, first_bucket_bytes)
        self.module, self.framework = module, framework_of(module)
        self.comm = self._comm = comm
        if not isinstance(init_sync, bool):
            raise InvalidArgument(
                f"rank {comm.rank}: init_sync={init_sync!r}: allowed are True and False"
            )
        known = isinstance(check_replicas, int) and not isinstance(check_replicas, bool)
        if not known or check_replicas < 0:
            raise InvalidArgument(
                f"rank {comm.rank}: check_replicas={check_replicas!r}: allowed are whole numbers "
                ">= 0; 0 never compares"
            )
        check_ready(self.framework.unready(module), comm.rank)
        named, arrays = self.framework.parameters(module), self.framework.buffers(module)
        self._unused, self._frozen = (
            Unused(comm, named, unused),
            Frozen(self.framework, module, named),
        )
        self._claim = Claim(named)
        given: dict[str, Any] = {
            "bucket_bytes": bucket_bytes,
            "first_bucket_bytes": first_bucket_bytes,
        }
        given |= {"algorithm": algorithm, "overlap": overlap, "buffers": buffers, "unused": unused}
        given |= {"hook": "none" if hook is None else "one", "init_sync": init_sync}
        given |= {"check_replicas": check_replicas}
        reason = self.framework.refusal(module)
        refused = (
            f"rank {comm.rank}: module: {reason}" if reason else self._claim.refusal(comm.rank)
        )
        every = [*named, *self._frozen.others]
        check_alike(comm, "DDP", self.framework, every, arrays, given, refused)
        self.buffer_sync = BufferSync(comm, partial(self.framework.buffers, module), buffers)
        limits = (bucket_bytes, first_bucket_bytes)
        grouping = Grouping(self.framework, named, limits, algorithm, comm)
        if grouping.on_device and getattr(hook, "on_host", False):
            raise Unsupported(
                f"rank {comm.rank}: hook={type(hook).__name__} computes on the host, and there are "
                "parameters on a GPU: allowed are functions of your own, and None"
            )
        self.reducer = Reducer(grouping, comm, overlap, hook or Average(), unused == "error")
        self._remove = self.framework.on_forward(module, Weakly(self.reducer.prepare))
        self._join: Join | None = None
        self._check_replicas, self._syncs = check_replicas, 0
        if init_sync:
            self.broadcast_parameters()
        self._claim.begin()

    # -- between the ranks ------------------------------------------------------------------------

    def sync_gradients(self) -> None:
        """Replace every gradient by its mean over the ranks; buffers are made equal as well.

        Gradients that are None count as zero and are set afterwards.  Buckets that were sent while
        backward went on are only waited for.
        """
        self._sync(False)

    def overlapped_sync_gradients(self) -> None:
        """Do what :meth:`sync_gradients` does with all buckets in flight together."""
        self._sync(True)

    def _sync(self, together: bool) -> None:
        self.reducer.sync(together)
        self.buffer_sync.run(0 if self._join is None else self._join.root)
        self._unused.check(self.reducer.touched)
        self._frozen.check(self.comm.rank)
        self._syncs += 1
        if self._check_replicas and self._syncs % self._check_replicas == 0:
            self._compare_replicas()

    def unlike_parameters(self) -> dict[str, list[int]]:
        """Return the names of parameters that are not the same on all ranks; collective.

        Returns
        -------
        dict of str to list of int
            The ranks whose values differ from those of rank 0; the same on every rank.
        """
        return find_unlike(self.comm, self._values())

    def _values(self) -> list[tuple[str, Any]]:
        """List the values of all parameters, of those that are not learnt as well."""
        named = [*self.reducer.grouping.named, *self._frozen.others]
        return [(name, self.framework.values(p)) for name, p in named]

    def _compare_replicas(self) -> None:
        """Raise on every rank if the replicas differ where they ought to be equal."""
        if self._join is not None and not self._join.equal:
            return
        unlike = self.unlike_parameters()
        if unlike:
            raise ReplicasDiffer(
                f"rank {self.comm.rank}: sync_gradients() number {self._syncs}: parameters differ "
                f"from those of rank 0: {told(unlike)}; an optimizer step was skipped or made "
                "otherwise there, or parameters were changed; broadcast_parameters() makes them "
                "equal"
            )

    def broadcast_parameters(self, root: int = 0) -> None:
        """Copy parameters and buffers of `root` into those of every rank, in place.

        Parameters and their arrays stay the same objects, so optimizers go on with them.
        """
        broadcast(self.comm, [values for _, values in self._values()], root)
        broadcast(self.comm, [array for _, array in self.framework.buffers(self.module)], root)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it backward adds to this rank's gradients and sends nothing.

        All backward passes but the last before a :meth:`sync_gradients` belong in it.
        """
        before, self.reducer.enabled = self.reducer.enabled, False
        try:
            yield
        finally:
            self.reducer.enabled = before

    @contextmanager
    def join(self, optimizer: Any = None, early: str = "shadow") -> Iterator[Join]:
        """Let ranks have unequal numbers of steps: see :class:`~mpidist.parallel.join.Join`."""
        self._join = Join(self, optimizer, early)
        self.reducer.opens = self._join.meet
        try:
            yield self._join
            self._join.finish()
        finally:
            self._join, self.reducer.opens = None, int

    def clip_gradients(self, max_norm: float) -> float:
        """Scale all gradients so that their norm, taken together, is at most `max_norm`.

        To be called after :meth:`sync_gradients`, when gradients are the same on all ranks.  With a
        :class:`ZeroOptimizer`, which divides them, it is that one's method that does it.

        Returns
        -------
        float
            The norm before, from sums in float64.
        """
        if self.reducer.divided:
            raise InvalidArgument(
                f"rank {self.comm.rank}: gradients are divided among the ranks: call "
                "clip_gradients() of the ZeroOptimizer"
            )
        gradients = [p.grad for _, p in self.reducer.grouping.named if p.grad is not None]
        return clip_by_norm(gradients, max_norm, self.comm.rank)

    def stats(self) -> Stats:
        """Give where the time of steps went: compute, exposed and hidden communication."""
        return self.reducer.stats()

    def close(self) -> None:
        """Take everything off the module: it is trained on this rank alone from now on; collective.

        Without it hooks end with this object, and a communicator of its own with the job.
        """
        self.reducer.close()
        self._claim.end()
        if self._remove is not None:
            self._remove()
            self._remove = None

    # -- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Give the module's state, and how gradients are sent: a resumed run has the same bits.

        What a communication hook keeps is that of this rank; a :class:`Checkpoint` has all ranks'.
        """
        module = self.module.state_dict()
        return {"module": module, "sending": sending_of(self), "hook": kept_by_hook(self)}

    def checkpoint_state(self) -> dict[str, Any]:
        """Return :meth:`state_dict` as a :class:`Checkpoint` takes it: whose buffers count."""
        state, how = self.state_dict(), self.buffer_sync.how
        if how == "average":  # then they are the same on all ranks, and that is checked
            return state
        module, names = state["module"], {name for name, _ in self.framework.buffers(self.module)}
        names = names & set(module) if isinstance(module, Mapping) else set()
        if not names:
            return state
        state["module"] = {k: Led(v) if k in names else v for k, v in module.items()}
        if how == "keep":
            state["buffers"] = Divided({self.comm.rank: {k: module[k] for k in names}})
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave, in place; collective.

        On another number of ranks algorithms are chosen anew, and what ranks kept for a hook is
        given to those that there are.
        """
        if not is_state(state):
            raise InvalidArgument(
                f"rank {self.comm.rank}: state is not one that state_dict() of a DDP gave; that of "
                "a module goes to model.module.load_state_dict()"
            )
        own = {}
        if state["sending"]["ranks"] == self.comm.size:
            own = state.get("buffers", {}).get(self.comm.rank, {})
        module = {**state["module"], **own} if own else state["module"]
        self.module.load_state_dict(read_all(module))
        send_so(self, state["sending"])
        give_to_hook(self, state.get("hook", {}), state["sending"]["ranks"])

    # -- buckets ----------------------------------------------------------------------------------

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets, in the order in which a backward pass completes them."""
        return self.reducer.grouping.buckets

    @property
    def in_flight_high_water(self) -> int:
        """Most buckets that were under way at a time."""
        return self.reducer.high_water

    def named_parameters(self) -> list[tuple[str, Any]]:
        """List the parameters that are averaged, with names (or numbers), each once."""
        return list(self.reducer.grouping.named)

    def __repr__(self) -> str:
        return f"DDP({self.module!r}, {len(self.buckets)} buckets on {self.comm.size} ranks)"


def is_state(state: Any) -> bool:
    """Tell whether this is what :meth:`DDP.state_dict` gives."""
    if not isinstance(state, Mapping) or not isinstance(state.get("sending"), Mapping):
        return False
    return "module" in state and {"ranks", "buckets", "algorithms"} <= set(state["sending"])
