"""Modules of PyTorch: their parameters, gradients and dtypes; and what needs no PyTorch."""

import subprocess
import sys
import threading

import numpy as np
import pytest

from mpidist.errors import InvalidArgument
from mpidist.frameworks.base import framework_of
from mpidist.parallel import DDP
from mpidist.shared_memory.compiled import runs_steps
from mpidist.shared_memory.digest import digest
from tests.support.training_kits import SMALLEST, needs_torch, torch

if torch is not None:
    from torch import nn

    from tests.support.odd_arrays import Named, TwoTensor, odd_tensors, waiting


ONE_AT_A_TIME = threading.Lock()  # TorchScript's compiler is not for the threads of simulated ranks
WITHOUT = """
import sys
sys.modules["torch"] = None  # whoever imports it fails
import numpy as np
import mpidist as md
from mpidist.nn import Linear

def main(comm):
    model = md.DDP(Linear(2, 2), comm)
    model(np.ones((1, 2), np.float32))
    model.backward(np.ones((1, 2), np.float32))
    model.sync_gradients()
    assert list(md.shard([1, 2], comm)) == [comm.rank + 1]

md.run_simulated(2, main)
"""


def test_not_needed_without_a_module_of_it():
    subprocess.run([sys.executable, "-c", WITHOUT], check=True, timeout=200)


@needs_torch
@pytest.mark.ranks(1, 2, 3)
def test_parameters_that_are_not_their_memory_are_refused(comm):
    """Refused when a module is wrapped, on every rank, also where one rank alone has it."""
    for x, word, *_ in odd_tensors(4):
        module = nn.Linear(4, 4)
        if isinstance(x, torch.nn.Parameter) or not x.is_floating_point() or x.is_nested:
            continue
        module.register_buffer("odd", x if comm.rank == comm.size - 1 else torch.ones(4))
        with pytest.raises(InvalidArgument, match=f"module: odd is .*{word}"):
            DDP(module, comm)
    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(TwoTensor(module.weight.detach(), module.weight.detach()))
    with pytest.raises(InvalidArgument, match="module: weight is .*TwoTensor"):
        DDP(module, comm)


@needs_torch
@pytest.mark.ranks(1, 2, 3)
def test_lazy_parameters_are_named(comm):
    net = nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d())
    said = rf"rank {comm.rank}: .*0\.weight, 0\.bias, 1\.weight, .*1\.running_mean.*\bshape\b"
    with pytest.raises(InvalidArgument, match=said):
        DDP(net, comm)
    net(torch.ones(3, 4))
    DDP(net, comm)


@needs_torch
@pytest.mark.ranks(1, 2, 3)
def test_torchscript_modules_are_refused(comm):
    """By name, on every rank, if only one has such a module."""
    last = comm.size - 1
    for make, kind in (
        (torch.jit.script, "RecursiveScriptModule"),
        (lambda net: torch.jit.trace(net, torch.ones(1, 2)), "TopLevelTracedModule"),
    ):
        for ranks in (range(comm.size), (last,)):
            net = nn.Linear(2, 2)
            with ONE_AT_A_TIME:
                net = make(net) if comm.rank in ranks else net
            with pytest.raises(InvalidArgument, match=rf"rank .: module: .*\b{kind}\b.*torch\.jit"):
                DDP(net, comm)
    assert float(comm.allreduce(1.0)) == comm.size


@needs_torch
def test_changes_are_those_of_pytorch_in_place():
    framework, p = framework_of(torch.zeros(3)), nn.Parameter(torch.ones(4))
    memory = np.zeros(6, np.float32)
    p.grad = framework.view(memory, 2, p)
    before = framework.changes(p.grad)
    for added in (1, 2):
        p.sum().backward()
        assert framework.changes(p.grad) == before + added
    memory[...] = 0  # by numpy, as buckets are filled
    assert framework.changes(p.grad) == before + 2
    p.grad[1:].mul_(2)
    assert framework.changes(p.grad) == before + 3


@needs_torch
@pytest.mark.ranks(1, 2, 3)
def test_gradient_with_a_graph_is_copied(comm):
    net = nn.Linear(3, 1, bias=False)
    model = DDP(net, comm)
    out = model(torch.full((1, 3), comm.rank + 1.0))
    (out**2).sum().backward(create_graph=True)
    model.sync_gradients()
    assert not net.weight.grad.requires_grad or comm.size == 1
    assert model.stats().copies == (comm.size > 1)
    weight = net.weight.detach()
    scale = np.mean([2 * (r + 1.0) ** 2 for r in range(comm.size)])
    torch.testing.assert_close(net.weight.grad.detach(), weight.sum() * torch.full((1, 3), scale))


@needs_torch
@pytest.mark.ranks(1, 2, 3)
def test_mixed_dtypes_tied_frozen_and_sparse_are_averaged(comm):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide = nn.Linear(3, 3).double()
            self.tied = self.wide
            self.short = nn.Linear(3, 2, bias=False).bfloat16()
            self.frozen = nn.Linear(3, 3).requires_grad_(False)
            self.words = nn.Embedding(5, 3, sparse=True)

        def forward(self, index):
            x = self.frozen(self.words(index)).double()
            return self.short(self.tied(self.wide(x)).bfloat16()).float()

    model = DDP(Mixed(), comm, overlap="polls", **SMALLEST)
    names = {name for name, _ in model.reducer.grouping.named}
    assert names == {"wide.weight", "wide.bias", "short.weight", "words.weight"}
    for _ in range(3):
        model.zero_grad()
        model(torch.tensor([comm.rank % 5])).sum().backward()
        model.sync_gradients()
        assert {str(p.grad.dtype) for _, p in model.reducer.grouping.named} == {
            "torch.float64",
            "torch.bfloat16",
            "torch.float32",
        }
        grad = model.module.words.weight.grad.to_dense()
        used = grad.abs().sum(1) > 0
        assert used.nonzero().flatten().tolist() == sorted({r % 5 for r in range(comm.size)})


@needs_torch
@pytest.mark.ranks(1, 2, 3)
def test_gradients_of_subclasses_are_read_or_refused(comm):
    """Of a subclass: an unfinished result is waited for, another one refused by name."""
    model = DDP(nn.Linear(2, 1, bias=False), comm)
    p = model.module.weight
    want = comm.allreduce(float(comm.rank), op="mean")
    for make in (waiting, lambda x: x.as_subclass(Named)):
        model(torch.ones(1, 2))
        p.grad = make(torch.full((1, 2), float(comm.rank)))
        model.sync_gradients()
        if comm.size > 1:
            assert type(p.grad) is torch.Tensor
        assert p.grad.tolist() == [[want, want]]
    if comm.size > 1:
        p.grad = TwoTensor(torch.ones(1, 2), torch.ones(1, 2))
        with pytest.raises(InvalidArgument, match=r"the gradient of weight is .*TwoTensor"):
            model.sync_gradients()


@needs_torch
def test_digest_is_of_the_values_without_an_array_of_most_parameters(monkeypatch):
    framework, p = framework_of(nn.Linear(1, 1)), nn.Parameter(torch.arange(35.0).reshape(5, 7))
    odd = [p.T, p[::2, 1:], p.to(torch.bfloat16), p[:0], torch.nn.Parameter(p[1:])]
    for x in (p, *odd):
        assert framework.digest(x) == digest(np.ascontiguousarray(framework.values(x)))
    if runs_steps():
        monkeypatch.setattr("mpidist.torch.framework._array", None)
        assert framework.digest(p) == digest(p.detach().numpy())
