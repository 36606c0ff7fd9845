"""Clipping by the norm of all gradients."""

import numpy as np
import pytest

from mpidist.errors import InvalidArgument
from mpidist.parallel import DDP
from tests.support.training_kits import KITS, SMALL, batch


@pytest.mark.parametrize("kit", KITS)
def test_clip_gradients_is_by_the_norm_of_all(comm, kit):
    net, alone = kit.mlp(), kit.mlp()
    model = DDP(net, comm, **SMALL)
    x, labels = batch()
    kit.step(model, x[comm.rank :: comm.size], labels[comm.rank :: comm.size], comm.size)
    kit.step(alone, x, labels, 1.0)
    model.sync_gradients()
    expected = np.sqrt(sum((g**2).sum() for g in kit.gradients(alone)))
    assert model.clip_gradients(0.5) == pytest.approx(expected, rel=1e-12)
    for mine, whole in zip(kit.gradients(net), kit.gradients(alone), strict=True):
        np.testing.assert_allclose(mine, whole * 0.5 / expected, rtol=1e-9, atol=1e-15)
    assert model.clip_gradients(10.0) == pytest.approx(0.5)  # below: nothing changes
    for wrong in (0, "a", None, True, float("nan")):
        with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: max_norm={wrong!r}: "):
            model.clip_gradients(wrong)
