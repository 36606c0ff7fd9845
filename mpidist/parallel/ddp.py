"""The class DDP: wraps a module, and averages its gradients over the ranks."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arguments import one_of, whole
from ..checkpoint.state import Divided, MayDiffer, read_all
from ..communicator.communicator import Communicator, check_communicator
from ..errors import InvalidArgument, ReplicasDiffer, Unsupported
from ..frameworks.base import Remove, WeakHook, adapter, framework_of, library
from ..measure import counted
from .autotune import candidates
from .bucket import Bucket
from .bucketing import Grouping, has_mean, on_device
from .buffers import BufferSync, broadcast
from .clip import clip_by_norm
from .consistency import NotCopyable, Ownership, ParameterGuard, check_alike, check_used
from .deadline import allow_for_training
from .join import Join
from .recheck import Compute, recheck
from .reducer import Phase, Reducer
from .replicas import ReplicaCheck, compare, describe_unlike, unlike
from .reproducible import Microbatches
from .stats import Stats
from .transport import Hook

log = logging.getLogger("mpidist")

MIB, GIB = 1 << 20, 1 << 30
SYNC = ("auto", "manual")
UNUSED = ("skip", "zero", "error")
on_made: list[Callable[[DDP], object]] = []
"""Each is called with every new DDP, before its first step."""


class DDP(NotCopyable):
    """A module whose gradients are averaged over the ranks of a communicator.

    It is used in place of the module, with the same methods: ``model(x)``, ``model.parameters()``,
    ``model.train()``, ``model.state_dict()``.  The DDP of a PyTorch module is itself a
    :class:`torch.nn.Module`.  The training loop does not change; gradients are averaged when a
    backward pass ends.

    Parameters
    ----------
    module : torch.nn.Module, mpidist.nn.Module or object
        The module; an object has ``parameters()`` whose items have ``data`` and ``grad``, numpy or
        cupy arrays.
    comm : Communicator
        The ranks.
    bucket_bytes, first_bucket_bytes : int, optional
        Largest size in bytes of a bucket of gradients, and of the first one: by default 25 MiB and
        1 MiB, and on a GPU where nothing overlaps 1 GiB and that of the others.
    algorithm : str
        Algorithm of the allreduces.  With "auto" one is chosen for each bucket, once, that gives
        the same bits on every rank.
    sync : {"auto", "manual"}
        When gradients are averaged: at the end of each backward pass outside of :meth:`no_sync`, or
        when :meth:`sync_gradients` is called.  A backward pass is one of PyTorch's autograd, or a
        call of ``model.backward()``.
    overlap : {"auto", "none", "polls", "thread"}
        How complete buckets are sent during backward: "none" sends them at its end or within
        :meth:`sync_gradients`, "polls" starts each at once and polls it each time another gradient
        is ready, "thread" sends them in a thread, and "auto" times these in the first steps and
        keeps the fastest; on a GPU it is "polls" with NCCL and else "none", untimed, and "thread"
        is refused.
    hook : callable, optional
        ``hook(bucket)`` starts to send a :class:`Bucket` and returns a :class:`~mpidist.Work`; when
        this Work is complete, ``bucket.flat`` holds the mean, the same on all ranks.  See
        :mod:`mpidist.parallel.hooks`.
    buffers : {"broadcast", "average", "keep"}
        What is done with the module's buffers, such as running means, when gradients are averaged:
        copy those of rank 0 to all ranks, average them, or leave them alone.
    unused : {"skip", "zero", "error"}
        What happens to a parameter that no rank has used in a step: its gradient stays None, so
        that optimizers skip it, as in one process; or it is set to zeros.  Where some ranks have
        used it, the others count as zero.  "error" raises an error, on every rank, that names the
        parameters that some rank has not used, and the ranks.
    init_sync : bool
        Whether parameters and buffers of rank 0 are copied to all ranks at the start.
    check_replicas : int
        Number of averagings between two comparisons of the parameters of all ranks, by a digest; 0,
        the default, for no comparison.
    differing : {"raise", "majority"}
        What happens if parameters differ: :class:`ReplicasDiffer` is raised on every rank, or the
        values that more than half of the ranks share are copied to the others, and it is raised
        only where no values have that majority, or if a rank differs for the third time among 1,000
        comparisons.
    static_graph : bool
        Whether every step uses the parameters that the first one uses, on each rank: the ranks then
        exchange only once which these are.
    reproducible : int
        Number of microbatches of a step, on all ranks together, for the same weights on any number
        of ranks that divides it; 0, the default, for none.  Each rank has as many backward passes
        in a step, of which the last averages the gradients: see :ref:`same-weights`.
    **others
        For a module of PyTorch, options of its ``DistributedDataParallel``: see :doc:`/torch`.

    Attributes
    ----------
    module, comm, sync
        As given; `sync` may be changed between steps, on all ranks alike.

    Raises
    ------
    InvalidArgument
        If an argument is wrong, or another DDP has a parameter of the module; on every rank, if
        the ranks differ in their arguments, or in names, shapes or dtypes of their parameters.

    Notes
    -----
    The deadline of `comm` becomes 30 minutes, unless one was set: ranks that validate, write a
    checkpoint or compile let the others wait.

    Bucket sizes are those of PyTorch's reducer.  Gradients are views of their buckets, which other
    ranks read: copy a gradient to keep it.

    The gradient of a ``torch.nn.Embedding`` or ``EmbeddingBag`` that was made with ``sparse=True``
    stays sparse: the rows of all ranks are gathered and averaged after the buckets, without `hook`.
    """

    instead = "copy its .module, which is not wrapped: copy.deepcopy(model.module)"
    takes_parts = True  # a rank reads only its own hook state from a checkpoint

    if TYPE_CHECKING:  # of the module of its library that it is

        def __call__(self, *inputs: Any, **options: Any) -> Any: ...
        def __getattr__(self, name: str) -> Any: ...

    def __new__(cls, module: Any = None, *_: Any, **options: Any) -> DDP:
        """Return an instance of the subclass that has the module methods of `module`'s library.

        For a module of PyTorch it is a :class:`torch.nn.Module`, too.
        """
        return super().__new__(_with_wrapper(cls, library(module)))  # type: ignore[arg-type]

    def __init__(
        self,
        module: Any,
        comm: Communicator,
        bucket_bytes: int | None = None,
        first_bucket_bytes: int | None = None,
        algorithm: str = "auto",
        *,
        sync: str = "auto",
        overlap: str = "auto",
        hook: Hook | None = None,
        buffers: str = "broadcast",
        unused: str = "skip",
        init_sync: bool = True,
        check_replicas: int = 0,
        differing: str = "raise",
        static_graph: bool = False,
        reproducible: int = 0,
        **others: Any,
    ):
        super().__init__()
        options: dict[str, Any] = {
            "bucket_bytes": bucket_bytes,
            "first_bucket_bytes": first_bucket_bytes,
            "algorithm": algorithm,
            "sync": sync,
            "overlap": overlap,
            "buffers": buffers,
            "unused": unused,
            "hook": "none" if hook is None else "one",
            "init_sync": init_sync,
            "check_replicas": check_replicas,
            "differing": differing,
            "static_graph": static_graph,
            "reproducible": reproducible,
        }
        check_communicator(comm)
        self.accept_options(others, options, comm.rank)
        _check_arguments(module, comm.rank, hook, options)
        allow_for_training(comm)
        self.module, self.framework = module, framework_of(module)
        self.comm, self.sync = comm, options["sync"]
        without = self.framework.without_shape(module)
        if without:
            raise InvalidArgument(
                f"rank {comm.rank}: {', '.join(without)}: no shape yet, as in a lazy module; call "
                "the module once, on an input like those to come, then wrap it"
            )
        named, sparse = self.framework.parameters(module), self.framework.sparse(module)
        self._guard = ParameterGuard(self.framework, module, named)
        self._ownership = Ownership(named)
        # Not raised here but exchanged: a rank that raises alone leaves the others waiting.
        reason = self.framework.why_not(module)
        reason = f"rank {comm.rank}: module: {reason}" if reason else ""
        check_alike(
            comm,
            "DDP",
            self.framework,
            [*named, *self._guard.frozen],
            [] if reason else self.framework.buffers(module),
            {**options, "sparse gradients": sparse, **self._threads(reproducible)},
            reason or self._ownership.why_not(comm.rank),
        )
        read_buffers = partial(self.framework.buffers, module)
        self.buffer_sync = BufferSync(comm, read_buffers, options["buffers"])
        # Where buckets are sent at the end of backward, there is nothing to begin early for.
        late = on_device(self.framework, named) and candidates(comm, overlap, 1, True) == ["none"]
        bucket = options["bucket_bytes"] or (GIB if late else 25 * MIB)
        limits = bucket, options["first_bucket_bytes"] or (bucket if late else MIB)
        grouping = Grouping(self.framework, named, limits, algorithm, comm, sparse)
        if grouping.on_device and getattr(hook, "on_host", False):
            raise Unsupported(
                f"rank {comm.rank}: hook={type(hook).__name__} computes on the host, and there are "
                "parameters on a GPU: expected a function of your own, or None"
            )
        microbatches = Microbatches(reproducible, comm) if options["reproducible"] else None
        if microbatches is not None:
            self._check_reproducible(grouping, hook)
        self.reducer = Reducer(
            grouping,
            comm,
            overlap,
            hook or microbatches,
            options["unused"],
            static_graph,
            microbatches,
        )
        if microbatches is not None and not all(g.reports for g in self.reducer.gradients):
            raise Unsupported(
                f"rank {comm.rank}: reproducible=: parameters of {type(module).__name__} do not "
                "report additions to their gradients: expected a module of PyTorch or mpidist.nn"
            )
        # Each removes a callback.
        self._removes = [
            self.framework.on_forward(module, WeakHook(self.reducer.prepare)),
            self.framework.on_step(WeakHook(self.check_averaged)),
            self.watch(),
        ]
        # The module may outlive this object, which the weak hooks do not keep alive.
        weakref.finalize(self, _remove, self._removes)
        self._join: Join | None = None
        self._replica_check = ReplicaCheck(comm, self.framework, check_replicas, differing)
        self._syncs = 0
        if init_sync:
            self.broadcast_parameters()
        self._ownership.begin()
        for act in tuple(on_made):
            act(self)

    def __repr__(self) -> str:
        size = f"{counted(len(self.buckets), 'bucket')} on {counted(self.comm.size, 'rank')}"
        return f"DDP({self.module!r}, {size})"

    # -- gradients --------------------------------------------------------------------------------

    def sync_gradients(self) -> None:
        """Replace every gradient by its mean over the ranks, and make buffers equal; collective.

        With ``sync="auto"`` this has been done at the end of backward, and nothing is left to do
        unless gradients were assigned since, or added within :meth:`no_sync`.

        Gradients that are None on some ranks count as zero there; those that are None on all ranks
        stay None (see `unused`).  Buckets that were sent during backward are only waited for.
        """
        if not self.reducer.is_averaged():
            self._after_sync(self.reducer.sync())

    def overlapped_sync_gradients(self) -> None:
        """Do the same as :meth:`sync_gradients`, with all buckets in flight together."""
        if not self.reducer.is_averaged():
            self._after_sync(self.reducer.sync(together=True))

    def _end_backward(self) -> None:
        """Average the gradients at the end of a backward pass."""
        self._after_sync(self.reducer.sync())
        self.reducer.phase = Phase.AVERAGED

    def take_part(self) -> None:
        """Take part in a training step of the other ranks, with zero gradients; collective.

        It is for a rank without a batch (see :meth:`join`).
        """
        self.zero_grad()
        self._after_sync(np.ones_like(self.reducer.sync()))  # it is not to blame for unused ones

    def check_averaged(self, parameters: Iterable[Any] | None = None) -> None:
        """Raise InvalidArgument if a gradient of these parameters has not been averaged.

        Optimizers call it before a step.  None means all parameters.  Within :meth:`no_sync`
        nothing is checked.
        """
        given = None if parameters is None else {id(p) for p in parameters}
        if self.reducer.microbatches is not None:
            passes, every = self.reducer.passes, self.reducer.gradients
            ours = given is None or any(id(gradient.parameter) in given for gradient in every)
            if passes and ours:  # else they are averaged
                self.reducer.microbatches.check_step(passes, "step() of an optimizer")
        if not self.in_backward():
            self.reducer.before_step(given)
        if not self.reducer.enabled and self.reducer.microbatches is None:
            return
        within = self.in_backward()
        # A hook on a gradient may come before the one that records the addition.
        mine = self.reducer.gradients if within else self.reducer.not_averaged()
        names = [
            gradient.name
            for gradient in mine
            if (given is None or id(gradient.parameter) in given)
            and gradient.parameter.grad is not None
        ]
        if not names:
            return
        which = names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        if within:
            raise InvalidArgument(
                f"rank {self.comm.rank}: step() of an optimizer within backward, as in a hook, and "
                f"the gradients of {which} are averaged over the ranks when backward ends, or by "
                "sync_gradients(): expected step() after it, and no hook that calls it"
            )
        raise InvalidArgument(
            f"rank {self.comm.rank}: step() of an optimizer, and the gradients of {which} were not "
            "averaged over the ranks: call sync_gradients() after backward, or leave the last "
            "backward pass of a step outside of no_sync(); within no_sync() an optimizer trains "
            "this rank alone"
        )

    def _after_sync(self, used: np.ndarray) -> None:
        """Apply the options for buffers, unused parameters and the check of replicas.

        `used` has a 1 for each parameter that this rank has used.
        """
        self._syncs += 1
        if self.buffer_sync.communicates:
            self.buffer_sync.run(0 if self._join is None else self._join.root)
        if self.reducer.unused == "error":
            check_used(self.comm, [name for name, _ in self.reducer.grouping.named], used)
        self._guard.check(self.comm.rank)  # without communication
        joined = self._join is not None and not self._join.equal
        if self._replica_check.is_due(self._syncs) and not joined:
            self._replica_check.run(self._syncs, self._compared)

    def _threads(self, reproducible: int) -> dict[str, int]:
        """Return what else must be equal for the same bits, by name."""
        return {"threads of a rank": self.framework.threads()} if reproducible else {}

    def _check_reproducible(self, grouping: Grouping, hook: Hook | None) -> None:
        """Raise an error for what would depend on the number of ranks."""
        where = f"rank {self.comm.rank}: reproducible="
        if hook is not None:
            raise InvalidArgument(f"{where} with hook=: expected one of them")
        what = "parameters on a GPU" if grouping.on_device else ""
        what = what or ("sparse gradients" if grouping.sparse else "")
        if what:
            raise Unsupported(f"{where}: the module has {what}: expected a plain one")
        names = [n for n, b in self.framework.buffers(self.module) if has_mean(b.dtype)]
        if names and self.comm.rank == 0:
            log.warning(
                "reproducible=: %s, as running averages, depends on the number of ranks: it has "
                "seen one rank's microbatches only; weights do not, unless training reads it",
                names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else ""),
            )

    def _refuse_microbatches(self, what: str) -> None:
        """Raise InvalidArgument with ``reproducible=``, which `what` contradicts."""
        if self.reducer.microbatches is not None:
            raise InvalidArgument(
                f"rank {self.comm.rank}: {what} with reproducible=, which counts the backward "
                "passes of each step: expected one of them"
            )

    @property
    def microbatch(self) -> int:
        """Number of the microbatch of the next forward among those of a step on all ranks.

        It is 0 without ``reproducible=``.
        """
        microbatches = self.reducer.microbatches
        if microbatches is None:
            return 0
        return microbatches.first + self.reducer.passes % microbatches.each

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this block backward adds to this rank's gradients and sends nothing.

        All backward passes of a step but the last belong in it.
        """
        self._refuse_microbatches("no_sync()")
        before, self.reducer.enabled = self.reducer.enabled, False
        try:
            yield
        finally:
            self.reducer.enabled = before

    @contextmanager
    def join(
        self,
        optimizer: Any = None,
        early: str = "shadow",
        *,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[Join]:
        """Allow uneven inputs in this block: see :class:`~mpidist.parallel.join.Join`.

        The last three parameters are those of PyTorch's ``DistributedDataParallel.join``:
        `throw_on_early_termination` is ``early="error"``, `enable` False leaves this block without
        effect, and `divide_by_initial_world_size` must be True, as means are over all ranks.
        """
        self._refuse_microbatches("join()")
        if not divide_by_initial_world_size:
            raise InvalidArgument(
                f"rank {self.comm.rank}: join(divide_by_initial_world_size=False): expected True: "
                "means are over all ranks"
            )
        if not enable:
            yield Join(self, optimizer, early)
            return
        self._join = Join(self, optimizer, "error" if throw_on_early_termination else early)
        self.reducer.before_first_send = self._join.announce_step
        try:
            yield self._join
            self._join.finish()
        finally:
            self._join = self.reducer.before_first_send = None

    def clip_gradients(self, max_norm: float) -> float:
        """Scale all gradients so that their norm, taken together, is at most `max_norm`.

        Call it after :meth:`sync_gradients`, when gradients are the same on all ranks.  With a
        :class:`ZeroOptimizer`, which divides the gradients, call its method of this name instead.

        Returns
        -------
        float
            The norm before scaling, from sums in float64.
        """
        if self.reducer.sharded:
            raise InvalidArgument(
                f"rank {self.comm.rank}: gradients are divided among the ranks: call "
                "clip_gradients() of the ZeroOptimizer"
            )
        gradients = [p.grad for _, p in self.reducer.grouping.named if p.grad is not None]
        return clip_by_norm(gradients, max_norm, self.comm.rank)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets, in the order in which a backward pass completes their gradients."""
        return self.reducer.grouping.buckets

    @property
    def in_flight_high_water(self) -> int:
        """Largest number of buckets that were in flight at a time."""
        return self.reducer.high_water

    def stats(self) -> Stats:
        """Return the times of the steps so far: compute, exposed and hidden communication."""
        return self.reducer.stats()

    # -- replicas ---------------------------------------------------------------------------------

    def broadcast_parameters(self, root: int = 0) -> None:
        """Copy parameters and buffers of `root` into those of every rank, in place; collective.

        Parameters and their arrays stay the same objects, so optimizers need not be made again.
        """
        broadcast(self.comm, [self.framework.values(p) for _, p in self._compared], root)
        broadcast(self.comm, [array for _, array in self.framework.buffers(self.module)], root)

    def unlike_parameters(self) -> dict[str, list[int]]:
        """Return the parameters that differ between ranks, by name; collective.

        Returns
        -------
        dict of str to list of int
            The ranks whose values differ from those of rank 0; the same on every rank.
        """
        return unlike(compare(self.comm, self.framework, self._compared), {})

    @property
    def _compared(self) -> list[tuple[str, Any]]:
        """Names and parameters, including frozen ones."""
        return [*self.reducer.grouping.named, *self._guard.frozen]

    @property
    def repaired(self) -> int:
        """Number of averagings that have repaired parameters of some rank; see `differing`.

        The gradients of such an averaging were computed with the wrong parameters there: a loop in
        which this number has grown may drop them, and compute those of the same batch again.
        """
        return self._replica_check.repaired

    def recheck(self, compute: Compute, batch: Any) -> None:
        """Check that two ranks compute the same gradients of each rank's batch; collective.

        This finds a processor that computes wrongly, which a comparison of replicas does not: all
        of them get the same wrong mean.  Each rank computes the gradients of its own batch and, for
        the rank after it, those of that rank's batch, on copies of the module; the training goes on
        as without it.  It costs two steps of compute, so call it every thousand steps, say.

        Parameters
        ----------
        compute : callable
            ``compute(module, batch)`` runs forward and backward of `module`, a copy of the wrapped
            one on which gradients are None.  It must give the same bits each time and on each
            rank, so it seeds what is random, and all ranks have processors of one kind.
        batch : object
            A batch of this rank; picklable.

        Raises
        ------
        ReplicasDiffer
            On every rank, with parameters, ranks and hosts, if digests of gradients differ; on 3
            ranks and more with the rank that computes wrongly, if it is one.  It is raised too if
            parameters differ between ranks.
        InvalidArgument
            On every rank, if `compute` fails on one, or leaves no gradients.
        """
        differ = self.unlike_parameters()
        if differ:
            raise ReplicasDiffer(
                f"rank {self.comm.rank}: recheck(): parameters differ from those of rank 0: "
                f"{describe_unlike(differ)}; broadcast_parameters() makes them equal"
            )
        recheck(self.comm, self.framework, self.module, compute, batch)

    def close(self) -> None:
        """Remove all callbacks from the module; collective.

        The module is then trained on this rank only.  Without ``close()`` callbacks end with this
        object, and the communicator of the buckets with the job.
        """
        self.reducer.close()
        self._ownership.end()
        _remove(self._removes)

    def abandon(self) -> None:
        """Remove all callbacks and gradients after the loss of a rank, without communication.

        Gradients may be sums of some ranks only, and are views of memory of the lost communicator.
        """
        self.reducer.abandon()
        self._ownership.end()
        _remove(self._removes)

    # -- state ------------------------------------------------------------------------------------

    def sending(self) -> dict[str, Any]:
        """Return how gradients are sent: buckets, algorithms, and for how many ranks."""
        grouping = self.reducer.grouping
        return {
            "ranks": self.comm.size,
            "observed": self.reducer.observed,
            "buckets": grouping.names(),
            "algorithms": [bucket.algorithm for bucket in grouping.buckets],
            "buffers": self.buffer_sync.algorithms,
        }

    def adopt(self, sending: Mapping[str, Any]) -> None:
        """Send gradients as :meth:`sending` says: on as many ranks, the same bits; collective."""
        layout = self.reducer.grouping.layout_of(sending["buckets"])
        if layout is None:
            return
        same_size = sending["ranks"] == self.comm.size
        algorithms = sending["algorithms"] if same_size else None
        self.reducer.regroup(layout, algorithms, sending.get("observed", True))
        if same_size:
            self.buffer_sync.algorithms = sending.get("buffers", {})

    def resume_state(self) -> dict[str, Any]:
        """Return the state of module, buckets and hook, to resume a run with the same bits.

        :meth:`load_state_dict` loads it.  (``state_dict()`` returns the module's state alone.)  The
        state of a communication hook is that of this rank; a :class:`Checkpoint` saves those of all
        ranks.
        """
        sending = self.sending()
        save = getattr(self.reducer.hook, "save", None)
        hook = {} if save is None else Divided({self.comm.rank: save(self.buckets)})
        return {"module": self.module.state_dict(), "sending": sending, "hook": hook}

    def checkpoint_state(self) -> dict[str, Any]:
        """Return :meth:`resume_state` for a :class:`Checkpoint`, with buffers marked.

        A Checkpoint raises an error if values that are not marked differ between ranks.  Of marked
        buffers it saves rank 0's and, with ``buffers="keep"``, also those of each rank.  With
        ``buffers="average"`` they are equal on all ranks, and not marked.  Parameters and buffers
        that PyTorch's DistributedDataParallel ignores are saved for each rank.
        """
        state, how = self.resume_state(), self.buffer_sync.how
        module = state["module"]
        if not isinstance(module, Mapping):
            return state
        buffers = {name for name, _ in self.framework.buffers(self.module)} & set(module)
        own = self.framework.ignored(self.module) & set(module)  # each rank's, saved for each
        own |= buffers if how == "keep" else set()
        # Averaged ones are equal on all ranks, and the checkpoint checks it.
        marked = own | (set() if how == "average" else buffers)
        if marked:
            state["module"] = {k: MayDiffer(v) if k in marked else v for k, v in module.items()}
        if own:
            state["buffers"] = Divided({self.comm.rank: {k: module[k] for k in own}})
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        """Load a state of a module, or of :meth:`resume_state`, in place; the latter is collective.

        For a module's state return what the module's ``load_state_dict`` returns, otherwise None.

        For a module of PyTorch names may begin with ``module.``, as those of this wrapper and of
        ``DistributedDataParallel`` do, and `strict` is an option.  On another number of ranks
        algorithms are chosen again, and the state of a hook is refused.

        Raises
        ------
        InvalidArgument
            If it is another kind of state, or has the state of a hook on another number of ranks.
        """
        # Either the state of a module, by itself; or that of a DDP, which has three parts:
        #
        #     module    the parameters and buffers, and in "buffers" each rank's own, for its rank
        #     sending   buckets, and with as many ranks as then their algorithms: for the same bits
        #     hook      what a communication hook has left out so far, for each rank its own
        state = state_dict  # the name of PyTorch's argument
        if not is_state(state):
            if not isinstance(state, Mapping) or isinstance(state.get("sending"), Mapping):
                raise InvalidArgument(
                    f"rank {self.comm.rank}: state is not the result of state_dict() of a module "
                    f"or a DDP, or of resume_state() of a DDP: {type(state).__name__}"
                )
            return self.load_module_state(state, *args, **options)
        sending, hook = state["sending"], state.get("hook", {})
        same_size = sending["ranks"] == self.comm.size
        restore = getattr(self.reducer.hook, "restore", None)
        if hook and restore is not None and not same_size:
            raise InvalidArgument(
                f"rank {self.comm.rank}: the state has residuals of a communication hook on "
                f"{sending['ranks']} ranks, this job has {self.comm.size}: expected as many, or a "
                "state without its entry 'hook', for residuals that begin at zero"
            )
        own = state.get("buffers", {}).get(self.comm.rank, {}) if same_size else {}
        self.module.load_state_dict(
            read_all({**state["module"], **own} if own else state["module"])
        )
        self.adopt(sending)
        if hook and restore is None and self.comm.rank == 0:
            log.warning(
                "the saved state of a communication hook is ignored: this DDP has no such hook"
            )
        elif hook and restore is not None:
            self._restore_hook(restore, hook)

    def _restore_hook(self, restore: Callable[..., Any], states: Mapping[int, Any]) -> None:
        """Call the hook's `restore` with this rank's entry of `states`, the saved ones by rank."""
        rank = self.comm.rank
        if rank not in states:
            log.warning(
                "rank %d: the loaded state has no entry for this rank's communication hook", rank
            )
            return
        if len(states[rank]) != len(self.buckets):
            raise InvalidArgument(
                f"rank {rank}: the state of the hook is for {len(states[rank])} buckets, this DDP "
                f"has {len(self.buckets)}"
            )
        restore(self.buckets, states[rank])


@cache
def _with_wrapper(cls: Any, name: str | None) -> type[DDP]:
    """Return the class `cls`, if necessary as a subclass with the methods of a library's module.

    `name` is "torch" for PyTorch; None for :mod:`mpidist.nn` and other objects.
    """
    wrapper = adapter(name, "wrapper").Wrapper
    if issubclass(cls, wrapper):
        return cls
    members = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls, wrapper), members)


def _remove(removes: list[Remove | None]) -> None:
    """Remove callbacks: call each function of the list, which removes one, and empty the list."""
    while removes:
        remove = removes.pop()
        if remove is not None:
            remove()


def is_state(state: Any) -> bool:
    """Return whether an object is the result of :meth:`DDP.resume_state`."""
    if not isinstance(state, Mapping) or not isinstance(state.get("sending"), Mapping):
        return False
    return "module" in state and {"ranks", "buckets", "algorithms"} <= set(state["sending"])


def _check_arguments(module: Any, rank: int, hook: Any, options: Mapping[str, Any]) -> None:
    """Raise InvalidArgument if a module cannot be wrapped with these options."""
    for name in ("bucket_bytes", "first_bucket_bytes", "check_replicas"):
        least, more = (0, "; 0 never compares") if name == "check_replicas" else (1, "")
        if options[name] is None and name != "check_replicas":
            continue
        whole(name, options[name], least, f"rank {rank}: ", more)
    choices: tuple[Any, ...]
    for name, choices in (
        ("buffers", BufferSync.HOW),
        ("unused", UNUSED),
        ("sync", SYNC),
        ("differing", ReplicaCheck.HOW),
        ("static_graph", (True, False)),
        ("init_sync", (True, False)),
    ):
        one_of(name, options[name], choices, f"rank {rank}: ")
    if options["differing"] != "raise" and not options["check_replicas"]:
        raise InvalidArgument(
            f"rank {rank}: differing={options['differing']!r} with check_replicas=0, which never "
            "compares: expected check_replicas >= 1"
        )
    if isinstance(hook, type):
        raise InvalidArgument(
            f"rank {rank}: hook={hook.__name__} is a class: expected a function of a bucket, such "
            f"as {hook.__name__}()"
        )
    if hook is not None and not callable(hook):
        raise InvalidArgument(
            f"rank {rank}: hook={hook!r}: expected a function of a bucket, such as "
            "hooks.Compress('float16')"
        )
    if isinstance(module, DDP) or not callable(getattr(module, "parameters", None)):
        raise InvalidArgument(
            f"rank {rank}: module has type {type(module).__name__}: expected a module of PyTorch "
            "or mpidist.nn, or another object with parameters(), not wrapped yet"
        )
