"""The emulated device with our own NCCL, for all files of this folder."""

import threading

import pytest

import mpidist
from tests.support.nccl import Library


@pytest.fixture(autouse=True)
def emulated(emulated_device, monkeypatch):
    monkeypatch.setattr(emulated_device, "nccl", True)
    # The ranks are threads of one process, whose device has one name.
    monkeypatch.setattr(
        "tests.support.emulated.EmulatedDevice.identity", lambda self: f"uuid-{id(self)}"
    )


@pytest.fixture
def by_nccl(monkeypatch):
    """Runs a function on ranks whose collectives on a device find the library above."""
    local = threading.local()
    monkeypatch.setattr("mpidist.gpu.nccl.backend.load", lambda: local.library)
    monkeypatch.setattr("tests.support.emulated.EmulatedDevice.identity", lambda self: local.uuid)

    def run(size, function, forced=""):
        monkeypatch.setenv("MPIDIST_GPU", forced)

        def on_rank(comm):
            local.uuid = f"GPU-{comm.rank}"
            local.library = Library(comm.split(0))
            found = function(comm, local.library)
            broken = comm.broken  # then it is aborted at the end of the process
            comm.free()
            ended = (made.ended in ("destroyed", "aborted") for made in local.library.made)
            assert broken or all(ended)
            return found

        return mpidist.run_simulated(size, on_rank)

    return run
