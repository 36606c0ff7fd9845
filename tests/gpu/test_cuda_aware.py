"""Whether an MPI library reads the memory of GPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpidist.errors import ConfigError
from mpidist.gpu.cuda_aware import Awareness, MpiLibrary, detect
from tests.support import jobs

YES, NO = Awareness("yes", "it says so"), Awareness("no", "it says not")


def library(vendor, version=(5, 0, 0), kinds="", **functions):
    return MpiLibrary(vendor, version, kinds, functions.get)


def says(value):
    def query(kind, answer):
        assert kind.value == 0
        answer._obj.value = value
        return 0

    return query


def never(*_):
    raise AssertionError("this query ends the process")


ASKED = [
    (library("Open MPI"), {"MPIDIST_GPU_AWARE": "1"}, "yes", "MPIDIST_GPU_AWARE=1"),
    (library("Open MPI", kinds="mpi,cuda"), {"MPIDIST_GPU_AWARE": "0"}, "no", "AWARE=0"),
    (library("Open MPI", kinds="mpi,system,cuda:device"), {}, "yes", "mpi_memory_alloc_kinds"),
    (library("Open MPI", MPIX_Query_cuda_support=lambda: 1), {}, "yes", "MPIX_Query_cuda_support"),
    (library("Open MPI", MPIX_Query_cuda_support=lambda: 0), {}, "no", "reports no CUDA support"),
    (library("MPICH", (4, 2), MPIX_GPU_query_support=says(1)), {}, "yes", "MPIX_GPU_query"),
    (library("MPICH", (3, 4), MPIX_Query_cuda_support=never), {}, "unknown", "safe to ask"),
    (library("Intel MPI", MPIX_GPU_query_support=never), {}, "no", "I_MPI_OFFLOAD=1"),
    (
        library("Intel MPI", MPIX_GPU_query_support=says(1)),
        {"I_MPI_OFFLOAD": "1"},
        "yes",
        "reports CUDA support",
    ),
    (library("Cray MPICH"), {}, "no", "MPICH_GPU_SUPPORT_ENABLED=1"),
    (library("Fujitsu MPI"), {}, "unknown", "no query for CUDA support; MPIDIST_GPU_AWARE=1"),
]


@pytest.mark.parametrize(("known", "environ", "answer", "words"), ASKED)
def test_detection(known, environ, answer, words):
    found = detect(known, environ)
    assert found.answer == answer and words in found.why


def test_detection_refuses_other_values():
    with pytest.raises(ConfigError, match="MPIDIST_GPU_AWARE='maybe': expected 0 or 1"):
        detect(library("Open MPI"), {"MPIDIST_GPU_AWARE": "maybe"})


ASK = """
import json, os, mpidist.gpu.cuda_aware as aware
library = aware.loaded_library()
found = aware.detect(library, json.loads(os.environ.get("PRETENDED") or "{}"))
print(json.dumps([library.vendor, found.answer, found.why]))
"""


def ask(python, pretended="", **environ):
    """What detection says of the library that a Python loads, in a pretended environment."""
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environ}
    environ["PRETENDED"] = pretended
    done = subprocess.run(
        [python, "-c", ASK], env=environ, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@jobs.each_mpi
def test_detection_of_the_libraries_here(python):
    """Those of the package index are built without CUDA, and say so when asked."""
    vendor, answer, why = ask(python)
    query = {"Open MPI": "MPIX_Query_cuda_support", "MPICH": "MPIX_GPU_query_support"}[vendor]
    assert answer == "no" and query in why


def test_detection_of_intel_mpi():
    """Its library, where the package impi-rt is installed beside this Python."""
    path = Path(sys.prefix) / "lib/libmpi.so.12"
    if not path.exists():
        pytest.skip("needs Intel MPI: pip install impi-rt")
    environ = {"MPI4PY_LIBMPI": str(path), "I_MPI_FABRICS": "shm"}
    vendor, answer, why = ask(sys.executable, **environ)
    assert vendor == "Intel MPI" and answer == "no" and "only with I_MPI_OFFLOAD=1" in why
    # Started without it, for with it the library ends a process that finds no GPU.
    answer, why = ask(sys.executable, pretended='{"I_MPI_OFFLOAD": "1"}', **environ)[1:]
    assert answer == "no" and "MPIX_GPU_query_support" in why
