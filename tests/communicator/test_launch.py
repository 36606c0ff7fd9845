"""Importing mpidist starts nothing: MPI starts with the first communicator."""

import subprocess
import sys

_IMPORT_ALL = """
import importlib, pkgutil, sys
import mpidist
OF_MPI = "mpidist.backends.mpi", "mpidist.backends.native", "mpidist.backends.roll_call"
for module in pkgutil.walk_packages(mpidist.__path__, "mpidist."):
    if not module.name.startswith(OF_MPI) and not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name not in ("cupy", "torch"):
                raise
        assert "mpi4py.MPI" not in sys.modules, module.name
"""


def test_import_does_not_start_mpi():
    """Data loaders' workers import mpidist, as do `mpidist list`, `show` and `prove`."""
    code = "import mpidist, mpidist.commands.main, sys; sys.exit('mpi4py.MPI' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT_ALL], timeout=120, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
