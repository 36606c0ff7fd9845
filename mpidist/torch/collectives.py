"""The collectives of a process group, as c10d calls them, each composed of the same steps.

::

    source   before   load  ┐
                            call
    target                  └ store   after   back

*call* is a public collective of the communicator.  Most tensors need no other step: *before*
changes the input of a reduction and *after* its result; *load* and *store* copy small tensors to
and from memory that the communicator knows; *back* copies a result to where it belongs.  What can
be checked is checked, and copied if need be, at once; the steps may run later, in another thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from ..calls.call import Caller
from ..communicator.communicator import Communicator
from ..device import tensors as host
from ..errors import UnsupportedDtype
from .c10d_arguments import gated, one, one_list, options
from .memory import USE_OTHER_GROUP, TensorMemory, apart, deal, is_memory, joined, readable
from .messages import Messages
from .operation_queue import OperationQueue
from .sparse import add_up
from .work import Act, Member, Work, uncompiled

Call = Callable[..., object]  # call(data, …, out): of the memory of the source and of the target
Change = Callable[[Tensor], object]  # of a tensor, in place
Reduction = tuple[str, Change | None, Change | None]  # the name; of the input; of the result

_Kind = c10d.ReduceOp.RedOpType
OPERATIONS = {
    _Kind.SUM: "sum",
    _Kind.AVG: "mean",
    _Kind.PRODUCT: "prod",
    _Kind.MIN: "min",
    _Kind.MAX: "max",
    _Kind.BAND: "and",
    _Kind.BOR: "or",
    _Kind.BXOR: "xor",
}
SCALED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # by PREMUL_SUM, as NCCL
ON_BOOL = {"sum": "or", "max": "or", "prod": "and", "min": "and"}  # equal in arithmetic of bool


class Collectives(dist.ProcessGroup):
    """The collectives of a process group, which return c10d's Work.

    Their `opts` are c10d's options; as in c10d, the operation of a reduction or the rank of the
    root may be given instead.
    """

    def __init__(self, comm: Communicator, messages: Communicator, name: str):
        super().__init__(comm.rank, comm.size)
        self.comm, self._rank, self._size = comm, comm.rank, comm.size
        self.member = Member(comm.rank, comm.size, name)
        self._memory = TensorMemory(comm, self.member)
        self._posted = Messages(messages, self.member, self._memory)
        self._queue = OperationQueue(comm, self.member, self._posted)
        self._check_root = Caller(comm.rank, comm.size).check_root
        self._sums: dict[torch.dtype, Reduction] = {}

    # -- composition ------------------------------------------------------------------------------

    def _operation(
        self,
        call: Call,
        arguments: tuple[Any, ...],
        source: Tensor | None,
        target: Tensor | None = None,
        what: str = "",
        before: Change | None = None,
        after: Change | None = None,
        late: bool = False,
    ) -> Act:
        """Return an operation that reads `source` and fills `target`, one tensor or two, or None.

        `arguments` are those of `call` between the two, `what` names the target, and `late` is as
        in :meth:`TensorMemory.writable`.
        """
        data = out = load = store = back = filled = None
        if target is None:
            after = None
        else:
            filled, back = self._memory.writable(what, target, late)
            out, load, store = self._memory.through(filled, "out")
        if source is target:
            source, data = filled, out
        elif source is not None:
            source = readable(source if filled is None else apart(source, filled))
            if before is not None:  # the caller's tensor stays as it is
                source = source.detach().clone()
            data, load, _ = self._memory.through(source, "in")
        act = partial(call, data, *arguments, out)
        steps = (
            before and partial(before, source),
            load,
            act,
            store,
            after and partial(after, filled),
            back,
        )
        # The steps have only the address of most tensors.  The Work keeps the target.
        return _composed(steps, None if source is filled else source)

    def _dealt(
        self, call: Call, x: Tensor, outs: Sequence[Tensor], total: int, check: Act | None = None
    ) -> Act:
        """Return an operation that reads `x` and fills a list, by way of `total` elements.

        `check` is called before the list is written.
        """
        x, outs = readable(x), [out.detach() for out in outs]
        data, load, _ = self._memory.through(x, "in")

        def act() -> None:
            if load is not None:
                load()
            flat, memory = self._memory.scratch(x, total)
            call(data, out=memory)
            if check is not None:
                check()
            deal(flat, outs)

        return act

    def _run(self, *operation: Any) -> Work:
        """Run an operation, and return its Work, see :meth:`OperationQueue.run`."""
        self._check_alone()  # once, at the first operation
        self._run = self._queue.run  # type: ignore[method-assign]
        return self._run(*operation)

    def _check_alone(self) -> None:
        """Raise InvalidArgument if the group has other backends too, which PyTorch would not use.

        Their names are known only when the group is complete: not before the first operation.
        """
        named = c10d._world.pg_backend_config.get(self, "")
        if not all(part.endswith("mpidist") for part in named.split(",") if part):
            raise self.member.wrong(
                f"group {self.member.name!r} was made with backend {named!r}: expected 'mpidist', "
                f"alone{USE_OTHER_GROUP}"
            )

    # -- reductions -------------------------------------------------------------------------------

    def _reduction(self, op: Any, dtype: torch.dtype) -> Reduction:
        """Return mpidist's name of a reduction, and what changes its input and its result."""
        known = self._sums.get(dtype)
        if known is not None and op == _Kind.SUM:  # a tenth of the time of what follows
            return known
        kind = getattr(op, "op", op)
        known = self._named(op, kind, dtype)
        if kind == _Kind.SUM:
            self._sums[dtype] = known
        return known

    def _named(self, op: Any, kind: Any, dtype: torch.dtype) -> Reduction:
        name = OPERATIONS.get(kind)
        if name is None:
            if kind == _Kind.PREMUL_SUM:
                return "sum", self._scale(op, dtype), None
            allowed = ", ".join([*(kind.name for kind in OPERATIONS), "PREMUL_SUM"])
            raise self.member.wrong(
                f"op={kind.name}: expected an operation of the backend mpidist: {allowed}"
            )
        if needs := host.needs(dtype):
            raise UnsupportedDtype(f"rank {self._rank}: op={name!r} of a tensor of {dtype}{needs}")
        if dtype is torch.bool:
            name = ON_BOOL.get(name, name)
        elif name == "mean" and not (dtype.is_floating_point or dtype.is_complex):
            # A sum, which is divided by the number of members, towards zero as NCCL does.
            return "sum", None, lambda x: x.div_(self._size, rounding_mode="trunc")
        return name, None, None

    def _scale(self, op: Any, dtype: torch.dtype) -> Change:
        """Return the function that multiplies an input of PREMUL_SUM by the factor, in place."""
        if dtype not in SCALED:
            allowed = ", ".join(map(str, SCALED))
            raise self.member.wrong(f"PREMUL_SUM of {dtype}: expected one of {allowed}")
        _, factor = op.__getstate__()  # a number, or a tensor with one element
        factor = float(factor)
        return lambda x: x.detach().mul_(factor)

    @gated
    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Combine a tensor of all ranks elementwise, in place on every rank."""
        x, opts = one(tensors), options(c10d.AllreduceOptions, timeout, opts, reduceOp=opts)
        if x.layout is torch.sparse_coo:
            act: Act = partial(self._allreduce_sparse, x, opts.reduceOp)
        else:
            act = self._allreduce(x, opts.reduceOp)
        return self._run("all_reduce", act, [x], opts)

    def _allreduce(self, x: Tensor, op: Any) -> Act:
        name, before, after = self._reduction(op, x.dtype)
        return self._operation(
            self.comm.allreduce, (name,), x, x, "all_reduce: tensor", before, after
        )

    def _allreduce_sparse(self, x: Tensor, op: Any) -> None:
        kind = getattr(op, "op", op)
        if kind != _Kind.SUM:
            raise self.member.wrong(
                f"op={kind.name} of a sparse tensor in all_reduce: expected SUM"
            )
        x.copy_(add_up(self.comm, x.detach().coalesce()))

    @gated
    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        """Combine several tensors of all ranks in place, by one allreduce for each dtype."""
        opts = options(c10d.AllreduceCoalescedOptions, None, opts)
        self._memory.check_separate("all_reduce_coalesced: tensors[{}]", *tensors)
        kinds: dict[torch.dtype, list[Tensor]] = {}
        for x in tensors:
            kinds.setdefault(x.dtype, []).append(x.detach())

        def act() -> None:
            for some in kinds.values():
                flat = joined(some)
                self._allreduce(flat, opts.reduceOp)()
                deal(flat, some)

        return self._run("all_reduce_coalesced", act, tensors, opts)

    @gated
    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> Any:
        """Combine a tensor of all ranks elementwise, in place on the root.

        `op` is the operation if `opts` is the root's rank.
        """
        x = one(tensors)
        opts = options(c10d.ReduceOptions, timeout, opts, rootRank=opts, reduceOp=op)
        root = self._check_root(opts.rootRank)
        name, before, after = self._reduction(opts.reduceOp, x.dtype)
        target = x if root == self._rank else None
        what = "reduce: tensor"
        act = self._operation(self.comm.reduce, (name, root), x, target, what, before, after, True)
        return self._run("reduce", act, [x], opts)

    @gated
    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> Any:
        """Combine the ranks' lists of tensors elementwise; rank r gets the r-th result.

        The tensors of a list may differ in length.
        """
        x, given = one(outputs), one_list(inputs)
        opts = options(c10d.ReduceScatterOptions, timeout, opts, reduceOp=opts)
        self._check_list("reduce_scatter: input_list", given, "output", x)
        act = self._reduce_scatter("reduce_scatter", x, joined(given), opts, _counts(given))
        return self._run("reduce_scatter", act, [x], opts)

    @gated
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Combine one tensor of each rank elementwise; rank r gets the r-th of equal parts."""
        opts = options(c10d.ReduceScatterOptions, None, opts)
        act = self._reduce_scatter_single(output, input, opts)
        return self._run("reduce_scatter_single", act, [output], opts)

    @gated
    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Perform several :meth:`reduce_scatter_single` as one operation."""
        opts = options(c10d.ReduceScatterOptions, None, opts)
        acts = map(partial(self._reduce_scatter_single, opts=opts), outputs, inputs)
        return self._run("reduce_scatter_coalesced", _composed(acts), outputs, opts)

    def _reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any) -> Act:
        self._check("reduce_scatter_tensor: input", given, "output", output, self._size)
        return self._reduce_scatter("reduce_scatter_tensor", output, given, opts)

    def _reduce_scatter(
        self, what: str, output: Tensor, given: Tensor, opts: Any, counts: Any = None
    ) -> Act:
        name, before, after = self._reduction(opts.reduceOp, given.dtype)
        call = _with(counts, self.comm.reduce_scatter)
        return self._operation(call, (name,), given, output, f"{what}: output", before, after)

    # -- from one rank, and to one ----------------------------------------------------------------

    @gated
    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Send the root's tensor to all."""
        x, opts = one(tensors), options(c10d.BroadcastOptions, timeout, opts, rootRank=opts)
        root = self._check_root(opts.rootRank)
        target = None if root == self._rank else x  # the root's may not be writable: expand()
        what, call = "broadcast: tensor", self.comm.broadcast
        act = self._operation(call, (root,), x, target, what, late=True)
        return self._run("broadcast", act, [x], opts)

    @gated
    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Send each rank's tensor to the root, into a list of tensors there, in rank order."""
        x, opts = one(inputs), options(c10d.GatherOptions, timeout, opts, rootRank=opts)
        root = self._check_root(opts.rootRank)
        outs = one_list(outputs) if root == self._rank else []

        def check() -> None:
            self._check_list("gather: gather_list", outs, "tensor", x, uneven=False)
            self._memory.check_separate("gather: gather_list[{}]", *outs)

        return self._run("gather", self._gather(outs, x, root, check), outs, opts, [x])

    @gated
    def gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Send each rank's tensor to the root, into one tensor there, in rank order.

        PyTorch has it from 2.15 on.  `output` is used on the root only.
        """
        opts = options(c10d.GatherOptions, None, opts)
        root = self._check_root(opts.rootRank)
        outs = [output] if root == self._rank else []

        def check() -> None:
            self._check("gather_single: output", output, "input", input, self._size)
            self._memory.check_separate("gather_single: output", output)

        act = self._gather(outs, input, root, check)
        return self._run("gather_single", act, outs, opts, [input])

    def _gather(self, outs: Sequence[Tensor], x: Tensor, root: int, check: Act) -> Act:
        if root != self._rank:
            return self._operation(self.comm.gather, (root,), x)
        # The list is checked after the call: the others would wait for a root that fails before it.
        call = partial(self.comm.gather, root=root)
        return self._dealt(call, x, outs, self._size * x.numel(), check)

    @gated
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Send one tensor of the root's list to each rank."""
        x, opts = one(outputs), options(c10d.ScatterOptions, timeout, opts, rootRank=opts)
        root, source = self._check_root(opts.rootRank), None
        if root == self._rank:
            given = one_list(inputs)
            self._check_list("scatter: scatter_list", given, "tensor", x, uneven=False)
            source = joined(given)
        act = self._operation(self.comm.scatter, (root,), source, x, "scatter: tensor")
        return self._run("scatter", act, [x], opts)

    # -- from all ranks to all --------------------------------------------------------------------

    @gated
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Send each rank's tensor to all, into a list of tensors; their lengths may differ."""
        x, outs = one(inputs), one_list(outputs)
        opts = options(c10d.AllgatherOptions, timeout, opts)
        self._check_list("all_gather: tensor_list", outs, "tensor", x)
        self._memory.check_separate("all_gather: tensor_list[{}]", *outs)
        return self._run("all_gather", self._allgather(outs, x), outs, opts)

    def _allgather(self, outs: Sequence[Tensor], x: Tensor) -> Act:
        call = _with(_counts(outs), self.comm.allgather)
        return self._dealt(call, x, outs, sum([out.numel() for out in outs]))

    @gated
    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Send several tensors of each rank to all: ``outputs[r][k]`` is the k-th of rank r."""
        opts, what = options(c10d.AllgatherOptions, None, opts), "all_gather_coalesced: output"
        self._check_length(what, outputs)
        own, mine = outputs[self._rank], f"{what}[{self._rank}]"
        self._check_length(mine, own, len(inputs))
        columns = [[given[k] for given in outputs] for k in range(len(inputs))]
        for k, (x, column) in enumerate(zip(inputs, columns)):
            self._check(f"{mine}[{k}]", own[k], f"input[{k}]", x)
            self._memory.check_separate(f"{what}[{{}}][{k}]", *column)
        act = _composed(map(self._allgather, columns, inputs))
        return self._run("all_gather_coalesced", act, [t for c in columns for t in c], opts)

    @gated
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Send each rank's tensor to all, into one tensor, in rank order."""
        opts = options(c10d.AllgatherOptions, None, opts)
        act = self._all_gather_single(output, input)
        return self._run("all_gather_single", act, [output], opts)

    @gated
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Perform several :meth:`all_gather_single` as one operation."""
        opts = options(c10d.AllgatherOptions, None, opts)
        act = _composed(map(self._all_gather_single, outputs, inputs))
        return self._run("all_gather_coalesced", act, outputs, opts)

    def _all_gather_single(self, output: Tensor, given: Tensor) -> Act:
        what, call = "all_gather_into_tensor: output", self.comm.allgather
        self._check(what, output, "input", given, self._size)
        own = output.data_ptr() + self._rank * given.numel() * given.element_size()
        if given.data_ptr() == own and is_memory(given) and is_memory(output):  # in place
            call = partial(call, self._memory.flat(given), self._memory.flat(output))
            return _composed([call], given)
        return self._operation(call, (), given, output, what)

    @gated
    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Send one tensor of a list to each rank; the tensors may differ in length."""
        opts = options(c10d.AllToAllOptions, None, opts)
        self._check_length("all_to_all: input_tensor_list", inputs)
        own, what = inputs[self._rank], f"input_tensor_list[{self._rank}]"
        self._check_list("all_to_all: output_tensor_list", outputs, what, own)
        self._memory.check_separate("all_to_all: output_tensor_list[{}]", *outputs)
        call = _with([x.numel() for x in inputs], self.comm.alltoall)
        given, total = joined(inputs), sum(out.numel() for out in outputs)
        act = self._dealt(call, given, outputs, total)
        return self._run("all_to_all", act, outputs, opts)

    @gated
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
        timeout: Any = None,
    ) -> Any:
        """Send a part of one tensor to each rank; the splits are the parts' numbers of rows.

        Empty splits mean equal parts.
        """
        opts, counts = options(c10d.AllToAllOptions, timeout, opts), None
        what, many = "all_to_all_single: output", None if input_splits or output_splits else 1
        self._check(what, output, "input", input, many)
        if input_splits or output_splits:
            counts = self._elements(input, input_splits, "input")
            gets = self._elements(output, output_splits, "output")
            if sum(gets) != output.numel() or sum(counts) != input.numel():
                raise self.member.wrong(
                    f"all_to_all_single: input_split_sizes={list(input_splits)} of "
                    f"{tuple(input.shape)}, output_split_sizes={list(output_splits)} of "
                    f"{tuple(output.shape)}: expected sizes that add up to the rows"
                )
        act = self._operation(_with(counts, self.comm.alltoall), (), input, output, what)
        return self._run("all_to_all_single", act, [output], opts)

    def _elements(self, x: Tensor, splits: Sequence[int], which: str) -> list[int]:
        """Return the number of elements for each rank, given the rows for each in `splits`."""
        if not splits:
            if x.dim() and x.shape[0] % self._size:
                raise self.member.wrong(
                    f"all_to_all_single: the {which} has {x.shape[0]} rows, which {self._size} "
                    f"ranks cannot share evenly: pass {which}_split_sizes"
                )
            return [x.numel() // self._size] * self._size
        self._check_length(f"all_to_all_single: {which}_split_sizes", splits)
        row = x[0].numel() if x.dim() and x.shape[0] else 0
        return [n * row for n in splits]

    @uncompiled
    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        """Wait until all members have reached the barrier."""
        if isinstance(opts, timedelta):
            opts, timeout = None, opts
        opts = options(c10d.BarrierOptions, timeout, opts)
        return self._run("barrier", self.comm.barrier, [], opts)

    # older names of the same
    _allgather_base = all_gather_single
    gather_into_tensor = gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # -- checks -----------------------------------------------------------------------------------

    def _check_length(self, what: str, given: Sequence[Any], length: int | None = None) -> None:
        if len(given) != (self._size if length is None else length):
            each = f"{self._size}, one for each member of group {self.member.name!r}"
            raise self.member.wrong(
                f"{what} has {len(given)} entries, expected {each if length is None else length}"
            )

    def _check(self, what: str, x: Tensor, name: str, like: Tensor, times: int | None = 1) -> None:
        """Raise InvalidArgument unless `x` has the dtype of `like`, and `times` as many elements.

        `what` and `name` name them in the message; with None for `times` any number may be.
        """
        if x.dtype is not like.dtype:
            raise self.member.wrong(f"{what} is {x.dtype}, expected {like.dtype}, as {name} is")
        if times is not None and x.numel() != times * like.numel():
            members = f"{self._size} ranks times " if times == self._size > 1 else ""
            raise self.member.wrong(
                f"{what} has shape {tuple(x.shape)}, expected {times * like.numel()} elements: "
                f"{members}those of {name}, of shape {tuple(like.shape)}"
            )

    def _check_list(
        self, what: str, given: Sequence[Tensor], name: str, like: Tensor, uneven: bool = True
    ) -> None:
        """Raise InvalidArgument unless a list has a tensor like `like` for each member.

        If `uneven`, only this rank's must have as many elements.
        """
        self._check_length(what, given)
        for k, x in enumerate(given):
            self._check(f"{what}[{k}]", x, name, like, None if uneven and k != self._rank else 1)


def _counts(tensors: Sequence[Tensor]) -> list[int] | None:
    """Return the number of elements of each tensor; None if all have equally many."""
    counts = [t.numel() for t in tensors]
    return None if len(set(counts)) == 1 else counts


def _with(counts: Sequence[int] | None, call: Call) -> Call:
    return call if counts is None else partial(call, counts=counts)


def _composed(steps: Iterable[Act | None], keeping: Tensor | None = None) -> Act:
    """Return a function that calls `steps` one after another, and keeps the memory of a tensor."""
    some = list(filter(None, steps))
    if len(some) == 1 and keeping is None:
        return some[0]

    def act(_: Tensor | None = keeping) -> None:
        for step in some:
            step()

    return act
