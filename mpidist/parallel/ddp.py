"""DDP: wraps a module, and averages its gradients over the ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

from ..checkpoint.format import Divided, Led, read_all
from ..communicator.communicator import check_communicator
from ..errors import InvalidArgument, ReplicasDiffer, Unsupported
from ..frameworks.base import Weakly, framework_of
from .bucket import Bucket
from .bucketing import Grouping
from .buffers import BufferSync, broadcast, find_unlike, told
from .clip import clip_by_norm
from .consistency import Claim, Frozen, Uncopied, Unused, check_alike
from .join import Join
from .reducer import Reducer
from .stats import Stats
from .transport import Average

log = logging.getLogger("mpidist")


def sending_of(model: Any) -> dict[str, Any]:
    """Give the buckets of a :class:`~mpidist.parallel.DDP`, and how all that it sends is added."""
    grouping = model.reducer.grouping
    return {
        "ranks": model.comm.size,
        "observed": model.reducer.observed,
        "buckets": grouping.names(),
        "algorithms": [bucket.algorithm for bucket in grouping.buckets],
        "buffers": model.buffer_sync.algorithms,
    }


def send_so(model: Any, sending: Mapping[str, Any]) -> None:
    """Send like the run that gave :func:`sending_of`; collective.

    On another number of ranks algorithms are chosen anew.
    """
    reducer = model.reducer
    layout = reducer.grouping.layout_of(sending["buckets"])
    if layout is None:
        return
    same = sending["ranks"] == model.comm.size
    algorithms = sending["algorithms"] if same else None
    reducer.regroup(layout, algorithms, sending.get("observed", True))
    if same:
        model.buffer_sync.algorithms = sending.get("buffers", {})


def kept_by_hook(model: Any) -> dict[int, Any]:
    """Give what the hook keeps on this rank, by the rank; nothing if it keeps nothing."""
    save = getattr(model.reducer.hook, "save", None)
    return {} if save is None else Divided({model.comm.rank: save(model.buckets)})


def give_to_hook(model: Any, kept: Mapping[int, Any], ranks: int) -> None:
    """Give the hook what ranks kept; of one that was alone with its state, its own.

    Raises
    ------
    InvalidArgument
        If it is not for these buckets.
    """
    restore, comm = getattr(model.reducer.hook, "restore", None), model.comm
    if restore is None or not kept:
        if kept and comm.rank == 0:
            log.warning("what a communication hook kept is not used: there is no such hook now")
        return
    wrong = [rank for rank, states in kept.items() if len(states) != len(model.buckets)]
    if wrong:
        raise InvalidArgument(
            f"rank {comm.rank}: the state of rank {wrong[0]}'s hook is for {len(kept[wrong[0]])} "
            f"buckets, there are {len(model.buckets)}"
        )
    if len(kept) == ranks:
        restore(model.buckets, [kept[rank] for rank in range(ranks)], comm.rank, comm.size)
    elif ranks == comm.size and comm.rank in kept:
        restore(model.buckets, [kept[comm.rank]], 0, 1)
    else:
        log.warning("rank %d: the state has nothing of what this rank's hook kept", comm.rank)


class Wrapper(Uncopied):
    """What a wrapper has of its module.

    Attributes
    ----------
    module : object
        What is wrapped.
    framework : Framework
        Of its parameters.
    reducer : Reducer
        Who is told before each forward.
    """

    module: Any
    framework: Any
    reducer: Any
    _remove: Any = None  # of the module's own hook before forward, if it has hooks

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Call the module."""
        if self._remove is None:
            self.reducer.prepare()
        return self.module(*inputs, **options)

    def __getattr__(self, name: str) -> NoReturn:
        """Say where an attribute is that only the module has."""
        said = f"{type(self).__name__!r} object has no attribute {name!r}"
        if not name.startswith("_") and hasattr(self.__dict__.get("module"), name):
            said += f", its module has: write model.module.{name}"
        raise AttributeError(said, name=name, obj=self)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Call the module's forward."""
        self.reducer.prepare()
        return self.module.forward(*inputs, **options)

    def backward(self, grad: Any) -> Any:
        """Call the module's backward."""
        return self.module.backward(grad)

    def parameters(self) -> list[Any]:
        """List the module's parameters."""
        return list(self.module.parameters())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, or (False) fill them with zeros where they are."""
        for p in self.parameters():
            if set_to_none:
                p.grad = None
            elif p.grad is not None:
                self.framework.clear(p)

    def train(self, mode: bool = True) -> Any:
        """Switch the module to training, or (False) to evaluation."""
        if mode:
            self.module.train()
        else:
            self.module.eval()
        return self

    def eval(self) -> Any:
        """Switch the module to evaluation."""
        return self.train(False)

    @property
    def training(self) -> bool:
        """Whether the module is in training."""
        return self.module.training


def check_arguments(
    module: Any, comm: Any, hook: Any, bucket_bytes: Any, first_bucket_bytes: Any
) -> None:
    """Raise InvalidArgument if a module cannot be wrapped so."""
    check_communicator(comm)
    sizes = {"bucket_bytes": bucket_bytes, "first_bucket_bytes": first_bucket_bytes}
    for argument, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidArgument(
                f"rank {comm.rank}: {argument}={value!r}: allowed are whole numbers > 0"
            )
    if hook is not None and not callable(hook):
        raise InvalidArgument(
            f"rank {comm.rank}: hook={hook!r}: allowed are functions of a bucket, such as "
            "hooks.Compress('float16')"
        )
    if isinstance(hook, type):
        raise InvalidArgument(
            f"rank {comm.rank}: hook={hook.__name__} is a class: allowed are functions of a "
            f"bucket, such as {hook.__name__}()"
        )
    if isinstance(module, Wrapper) or not callable(getattr(module, "parameters", None)):
        raise InvalidArgument(
            f"rank {comm.rank}: module is of {type(module).__name__}: allowed are modules of "
            "PyTorch and mpidist.nn, and other objects with parameters(), not wrapped yet"
        )


def check_ready(unready: list[str], rank: int) -> None:
    """Raise InvalidArgument if there are parameters or buffers without a shape."""
    if unready:
        raise InvalidArgument(
            f"rank {rank}: {', '.join(unready)}: no shape yet, as in a lazy module; call the "
            "module once, on an input like those to come, then wrap it"
        )


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
