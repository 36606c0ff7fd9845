"""Which class of devices a process uses."""

import numpy as np
import pytest

from mpidist import run_simulated
from mpidist.device.find import find_device, install_device, installed_device, why_no_device
from mpidist.errors import Unsupported
from tests.support.emulated import EmulatedDevice


def test_install_device():
    """On every thread; each has a device of its own."""

    class Other(EmulatedDevice):
        name = "other"

    def on_rank(comm):
        device = find_device()
        assert device is find_device() and isinstance(device, Other)
        assert (comm.allreduce(device.array(np.ones(3))).get() == comm.size).all()
        return device

    install_device(Other)
    try:
        assert installed_device() is Other and why_no_device() is None
        assert len(set(run_simulated(3, on_rank))) == 3
    finally:
        install_device(None)
    assert installed_device() is None


def test_install_device_that_has_none():
    """The reason is the class's own, with the rank and the argument."""

    class Missing(EmulatedDevice):
        @classmethod
        def why_not(cls):
            return "no board is plugged in"

    install_device(Missing)
    try:
        with pytest.raises(Unsupported, match="rank 3: x is a GPU array .*no board is plugged in"):
            find_device(3, "x", object())
    finally:
        install_device(None)
