"""Arguments of every call of c10d: their names, and tensors that stand for others."""

import re
from datetime import timedelta

import pytest

from mpidist.errors import InvalidArgument
from tests.support.torch_groups import SECONDS
from tests.support.training_kits import NEEDS_TORCH, torch

pytestmark = pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)
if torch is not None:
    import torch.distributed as dist

    from tests.support.odd_arrays import Named, odd_tensors


def forms_of_c10d():
    """Yield (method, names of its arguments) for each form that c10d's docstrings list."""
    kind = torch._C._distributed_c10d.ProcessGroup
    for name in dir(kind):
        text = getattr(kind, name).__doc__ or ""
        for given in re.findall(rf"\b{name}\(self: [^,]*, (.*)\) -> c10d::Work", text):
            words = re.findall(r"(?:^|, )(\w+): ", given)
            if words[0] != "arg0" and name not in ("_end_coalescing", "reconfigure"):
                yield name, words


def test_names_of_arguments(place):
    """Every form of c10d's methods, by the names of its arguments, and its result."""
    rank, size = place
    group, tried = dist.group.WORLD, set()
    ranks, total = [r + 1.0 for r in range(size)], size * (size + 1) / 2
    for name, words in forms_of_c10d():
        x, y, wide = torch.tensor([rank + 1.0]), torch.zeros(1), torch.full((size,), rank + 1.0)
        rows, blank = list(wide.clone().chunk(size)), list(torch.zeros(size).chunk(size))
        gathers, scatters = "gather" in name, "scatter" in name
        lists = "output_tensors" in words and "opts" in words and name != "alltoall"
        outs, given = (blank, [x]) if gathers else (([y], rows) if scatters else (blank, rows))
        if lists:
            outs, given = ([outs], given) if gathers else (outs, [given])
        values = {"tensors": [x], "tensor": x, "root": 0, "op": dist.ReduceOp.SUM, "tag": 4}
        values |= {"dstRank": (rank + 1) % size, "srcRank": (rank - 1) % size}
        values |= {"timeout": timedelta(seconds=SECONDS)}
        values |= {"output_split_sizes": [], "input_split_sizes": [], "input_list": [x]}
        values |= {"output_lists": [[b] for b in blank], "output_tensor": y, "input_tensor": x}
        values |= {"output_tensors": outs, "input_tensors": given}
        if name == "reduce_scatter":
            values |= {"output": y, "input": rows}
        else:
            output, input_ = (torch.zeros(size), x) if gathers else ((y, wide))
            if "to_all" in name or "toall" in name:
                output = torch.zeros(size)
            values |= {"output": output, "input": input_, "outputTensor": y, "inputTensor": wide}
            values |= {"outputs": [output], "inputs": [input_]}
        if name in ("gather", "scatter") and rank:
            values["output_tensors" if name == "gather" else "input_tensors"] = []
        if name in ("send", "recv"):
            continue  # below
        getattr(group, name)(**{word: values[word] for word in words if word != "opts"}).wait()
        tried.add(name)
        at_root = name in ("gather", "gather_single", "gather_into_tensor", "reduce")
        if name == "barrier" or (at_root and rank):
            continue
        got = {"broadcast": x, "reduce": x, "allreduce": x, "allreduce_coalesced": x}.get(name)
        if got is None and scatters:
            got = y
        if got is None:
            got = torch.cat(blank)
            got = values["output"] if not got.any() else got
        want = ranks if gathers or "all_to" in name or "alltoall" in name else [total]
        want = [1.0] if name in ("broadcast", "scatter") else want
        assert got.tolist() == want, (name, words)
    assert len(tried) > 15
    x, y = torch.tensor([rank + 1.0]), torch.zeros(1)
    works = [
        group.send(tensors=[x], dstRank=(rank + 1) % size, tag=4),
        group.recv(tensors=[y], srcRank=(rank - 1) % size, tag=4),
    ]
    for work in works:
        work.wait()
    assert y.item() == (rank - 1) % size + 1
    with pytest.raises(TypeError, match=r"broadcast\(tensor, opts, root\)"):
        group.broadcast(tensor=x, opts=None, root=0)


def every_call(rank, size, wait):
    """Yield (name, call): ``call(make)`` returns what a call gives, of tensors ``make(rows)``.

    Each is on tensors of `make` in every place, inputs, outputs and lists; `wait` ends a call.
    """

    def plain(x):
        return x.tolist()

    def results(outputs):
        return [plain(x) for x in outputs]

    def in_place(call):
        def act(make):
            x = make(size)
            wait(call(x))
            return plain(x)

        return act

    def into(call, rows):
        def act(make):
            out = make(rows)
            wait(call(out, make(size)))
            return plain(out)

        return act

    def into_list(call):
        def act(make):
            outs = [make(size) for _ in range(size)]
            wait(call(outs, make))
            return results(outs)

        return act

    def chunks(make):
        return [make(1) for _ in range(size)]

    root, how = size - 1, {"async_op": wait is not done}
    yield "all_reduce", in_place(lambda x: dist.all_reduce(x, **how))
    yield "broadcast", in_place(lambda x: dist.broadcast(x, root, **how))
    yield "reduce", in_place(lambda x: dist.reduce(x, root, **how))
    yield "all_gather", into_list(lambda outs, make: dist.all_gather(outs, make(size), **how))
    yield (
        "gather",
        into_list(
            lambda outs, make: dist.gather(make(size), outs if rank == root else None, root, **how)
        ),
    )
    yield "into_tensor", into(lambda o, x: dist.all_gather_into_tensor(o, x, **how), size * size)
    yield "reduce_scatter_tensor", into(lambda o, x: dist.reduce_scatter_tensor(o, x, **how), 1)
    yield "all_to_all_single", into(lambda o, x: dist.all_to_all_single(o, x, **how), size)

    def reduce_scatter(make):
        out = make(1)
        wait(dist.reduce_scatter(out, chunks(make), **how))
        return plain(out)

    def all_to_all(make):
        outs = chunks(make)
        wait(dist.all_to_all(outs, chunks(make), **how))
        return results(outs)

    def coalesced(make):
        x, y = make(size), make(1)
        wait(dist.all_reduce_coalesced([x, y], **how))
        return results([x, y])

    def manager(make):
        x, y = make(size), make(1)
        with dist._coalescing_manager(async_ops=how["async_op"]) as block:
            dist.all_reduce(x)
            dist.all_reduce(y)
        wait(block if how["async_op"] else None)
        return results([x, y])

    def messages(make):
        out, to, source = make(size), (rank + 1) % size, (rank - 1) % size
        if how["async_op"]:
            works = [dist.irecv(out, source), dist.isend(make(size), to)]
        else:
            operations = [
                dist.P2POp(dist.irecv, out, source),
                dist.P2POp(dist.isend, make(size), to),
            ]
            works = dist.batch_isend_irecv(operations)
        for work in works:
            work.wait()
        return plain(out)

    def blocking_messages(make):
        out, x = make(size), make(size)
        if rank:  # around the ring, so that every rank makes both calls
            dist.recv(out, rank - 1)
        dist.send(x, (rank + 1) % size)
        if not rank:
            dist.recv(out, size - 1)
        return plain(out)

    def scatter(make):
        out = make(size)
        given = [make(size) for _ in range(size)]
        wait(dist.scatter(out, given if rank == root else None, root, **how))
        return plain(out)

    yield "scatter", scatter
    yield "reduce_scatter", reduce_scatter
    yield "all_to_all", all_to_all
    yield "all_reduce_coalesced", coalesced
    yield "coalescing_manager", manager
    if size > 1:
        yield "messages", messages
        yield "blocking_messages", blocking_messages


def done(work):
    assert work is None


def wait_for(work):
    work.wait()


ENDS = [done, wait_for]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wait", ENDS, ids=["blocking", "async"])
def test_unfinished_results_are_waited_for(place, wait):
    """An AsyncCollectiveTensor in every place of every call gives what a plain tensor gives."""
    rank, size = place
    functional = torch.distributed._functional_collectives

    def plain(rows):
        return torch.full((rows,), 1.0 + rank)

    def pending(rows):
        own = [rows if r == rank else 0 for r in range(size)]
        made = functional.all_to_all_single(plain(rows), own, own, dist.group.WORLD)
        assert type(made) is functional.AsyncCollectiveTensor
        return made

    def parameter(rows):
        return torch.nn.Parameter(plain(rows), requires_grad=False)

    for name, call in every_call(rank, size, wait):
        want = call(plain)
        for make in (pending, parameter, lambda rows: plain(rows).as_subclass(Named)):
            assert call(make) == want, name


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wait", ENDS, ids=["blocking", "async"])
def test_tensors_that_are_not_their_memory(place, wait):
    """Refused by every call, alike on all ranks, with the type and what to do; none is sent."""
    rank, size = place
    kinds = [words for _, *words in odd_tensors(2)]
    for name, call in every_call(rank, size, wait):
        for k, words in enumerate(kinds):
            if words[0] == "a lazy parameter":  # PyTorch's own functions refuse it
                continue
            errors = InvalidArgument, NotImplementedError, RuntimeError
            with pytest.raises(errors) as caught:
                call(lambda rows, k=k: odd_tensors(max(rows, 2))[k][0])
            text = str(caught.value)
            if type(caught.value) is not RuntimeError:  # PyTorch's own, of tensors of transforms
                said = words[0], "without memory", " has shape", "layout"
                assert f"rank {rank}: " in text and any(s in text for s in said), (name, text)
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == size
