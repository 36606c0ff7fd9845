"""A longer deadline for training."""

import numpy as np
import pytest

from mpidist.parallel import DDP
from mpidist.selection.config import CollectiveConfig
from tests.support.training_kits import Weights


@pytest.mark.ranks(1, 2, 3, 4, 5)
def test_ddp_deadline_is_thirty_minutes(comm):
    """Unless the user has set a deadline: ranks validate and compile while others wait."""
    for seconds, kept in ((comm.timeout, 1800.0), (7.0, 7.0), (None, None)):
        own = comm.split(0)
        if own.timeout != CollectiveConfig().timeout or "timeout" in own.config.given:
            kept = seconds  # these tests have a deadline of their own
        own.timeout = seconds
        model = DDP(Weights(np.ones(3), np.ones(3)), own, 24, 24, overlap="polls")
        assert own.timeout == kept and model.reducer.comm.timeout == kept
        model.close()
        own.free()
