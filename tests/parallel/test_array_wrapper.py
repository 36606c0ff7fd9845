"""A DDP of a module of mpidist.nn."""

import numpy as np

from mpidist import run_simulated
from mpidist.nn import Module, Parameter
from mpidist.parallel import DDP


class OneWeight(Module):
    """Gives back what it is given."""

    def __init__(self):
        self.weight = Parameter(np.ones(2, np.float32))

    def forward(self, x):
        return x

    def backward(self, grad):
        return grad


def test_wrapper_calls_the_module():
    def rank_main(comm):
        ddp = DDP(OneWeight(), comm)
        assert ddp.training
        assert ddp.eval() is ddp and not ddp.training and not ddp.module.training
        ddp.train()
        assert ddp.training
        assert len(ddp.parameters()) == 1
        assert ddp.named_parameters()[0][0] == "weight"
        assert ddp.comm is comm and ddp.forward(3) == ddp(3) == ddp.backward(3) == 3
        assert "1 bucket on 1 rank)" in repr(ddp)

    run_simulated(1, rank_main)
