"""Libraries beside mpidist in the published comparison: oneCCL, DeepSpeed's allreduce, gloo.

python benchmarks/peers.py --prepare FOLDER     # compile what this Python can run; say what not
mpidist run -n 2 benchmarks/peers.py --built FOLDER --libraries oneCCL --bytes 8,64K allreduce

They are measured like every candidate of ``mpidist bench``, beside the bare mpi4py call: the same
data, barriers, checks, rows and file.  The two in C++ are called by ctypes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import mpidist
from mpidist.bench import Case, Settings, run_benchmark
from mpidist.bench.candidates import Candidate
from mpidist.bench.machine import Watch
from mpidist.measure import parse_sizes

HERE = Path(__file__).resolve().parent
ADDRESS = 256  # bytes of the address where the ranks of oneCCL meet

Maker = Callable[[Case], Callable[[], Any]]


class Missing(Exception):
    """What a library lacks here, as a sentence."""


# -- oneCCL ----------------------------------------------------------------------------------------


def prepare_oneccl(folder: Path) -> None:
    """Compile the functions of oneccl.cpp with the oneCCL of this virtual environment."""
    include, library = Path(sys.prefix, "include"), Path(sys.prefix, "lib")
    if not (include / "oneapi" / "ccl.hpp").exists():
        raise Missing("no oneapi/ccl.hpp: pip install oneccl-devel")
    # Not the newer RUNPATH: libccl's own libraries are found by this one.
    found = [f"-L{library}", f"-Wl,-rpath,{library}", "-Wl,--disable-new-dtags", "-lccl"]
    compiled(folder, "oneccl", ["-std=c++17", f"-I{include}"], found)


@contextmanager
def oneccl(comm: mpidist.Communicator, folder: Path) -> Iterator[Maker]:
    """Yield a function that makes calls of oneCCL."""
    library = ctypes.CDLL(str(folder / "oneccl.so"))
    address = ctypes.create_string_buffer(ADDRESS)
    if comm.rank == 0:
        library.oneccl_address(address)
    address.raw = comm.broadcast_object(address.raw)
    library.oneccl_begin(comm.size, comm.rank, address)
    yield partial(in_c, library, "oneccl")
    comm.barrier()
    library.oneccl_end()


# -- DeepSpeed -------------------------------------------------------------------------------------


def prepare_deepspeed(folder: Path) -> None:
    """Compile the functions of deepspeed.cpp with the source of DeepSpeed in the folder."""
    archives = sorted(folder.glob("deepspeed-*.tar.gz"))
    if not archives:
        raise Missing("no source: pip download --no-deps --no-build-isolation deepspeed")
    needs_torch()
    from torch.utils.cpp_extension import include_paths, library_paths

    with tarfile.open(archives[-1]) as archive:
        inside = [m for m in archive.getmembers() if "/csrc/cpu/comm/" in m.name and m.isfile()]
        source = folder / inside[0].name.partition("/csrc/")[0] / "csrc" / "cpu" / "comm"
        archive.extractall(folder, inside, filter="data")
    headers = [source, *include_paths(), sysconfig.get_path("include")]
    flags = ["-std=c++20", "-march=native", "-fopenmp", *(f"-I{path}" for path in headers)]
    found = [flag for path in library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    compiled(folder, "deepspeed", flags, [*found, "-ltorch", "-ltorch_cpu", "-lc10"])


@contextmanager
def deepspeed(comm: mpidist.Communicator, folder: Path) -> Iterator[Maker]:
    """Yield a function that makes calls of DeepSpeed's allreduce in shared memory."""
    import torch  # noqa: F401  (its libraries, before one that needs them)

    library = ctypes.CDLL(str(folder / "deepspeed.so"))
    name = comm.broadcast_object(f"{os.getpid()}").encode()
    library.deepspeed_begin(comm.size, comm.rank, name)
    comm.barrier()
    library.deepspeed_unlink(comm.rank, name)

    def make(case: Case) -> Callable[[], Any]:
        if case.collective == "allreduce" and not case.in_place:
            raise mpidist.Unsupported("DeepSpeed's allreduce is in place only")
        return in_c(library, "deepspeed", case)

    yield make


# -- gloo ------------------------------------------------------------------------------------------


def prepare_gloo(folder: Path) -> None:
    """Look for PyTorch with gloo."""
    needs_torch()
    import torch.distributed

    if not torch.distributed.is_gloo_available():
        raise Missing("this PyTorch has no gloo")


@contextmanager
def gloo(comm: mpidist.Communicator, folder: Path) -> Iterator[Maker]:
    """Yield a function that makes calls of torch.distributed over gloo."""
    import torch
    import torch.distributed as dist

    from mpidist.bench.torch import process_groups

    def make(group: Any, case: Case) -> Callable[[], Any]:
        x, out = (None if a is None else torch.from_numpy(a) for a in (case.x, case.out))
        if case.collective == "allreduce" and not case.in_place:
            raise mpidist.Unsupported("all_reduce of torch.distributed is in place only")
        calls = {
            "allreduce": lambda: partial(dist.all_reduce, x, group=group),
            "broadcast": lambda: partial(dist.broadcast, x, case.root, group),
            "allgather": lambda: partial(dist.all_gather_into_tensor, out, x, group),
            "reduce_scatter": lambda: partial(dist.reduce_scatter_tensor, out, x, group=group),
            "alltoall": lambda: partial(dist.all_to_all_single, out, x, group=group),
        }
        if case.collective not in calls:
            raise mpidist.Unsupported(f"{case.collective} over gloo is not measured")
        return calls[case.collective]()

    with process_groups(comm) as (_, group):
        yield partial(make, group)


# -- all of them -----------------------------------------------------------------------------------

Begin = Callable[[mpidist.Communicator, Path], AbstractContextManager[Maker]]
LIBRARIES: dict[str, tuple[Callable[[Path], None], Begin]] = {
    "oneCCL": (prepare_oneccl, oneccl),
    "DeepSpeed": (prepare_deepspeed, deepspeed),
    "gloo": (prepare_gloo, gloo),
}
"""For each library, what makes it ready, or raises Missing, and what begins it on all ranks."""


def needs_torch() -> None:
    """Raise Missing if this Python has no PyTorch."""
    try:
        import torch  # noqa: F401
    except ImportError:
        raise Missing("PyTorch is not installed") from None


def compiled(folder: Path, name: str, flags: Sequence[str], libraries: Sequence[str]) -> None:
    """Compile benchmarks/NAME.cpp to NAME.so in the folder, unless that is newer than its source.

    Raise Missing without a compiler, and with its first error if it fails.
    """
    source, made = HERE / f"{name}.cpp", folder / f"{name}.so"
    if made.exists() and made.stat().st_mtime > source.stat().st_mtime:
        return
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise Missing("no C++ compiler: apt install g++")
    command = [compiler, "-O3", "-shared", "-fPIC", *flags, str(source), *libraries]
    done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        raise Missing(f"it cannot be compiled: {(errors or [done.stderr])[0]}")


def in_c(library: Any, prefix: str, case: Case) -> Callable[[], Any]:
    """Return a call of the function PREFIX_collective (input, result, elements) of a library."""
    try:
        function = getattr(library, f"{prefix}_{case.collective}")
    except AttributeError:
        raise mpidist.Unsupported(f"{prefix} has no {case.collective}") from None
    parts = {"reduce_scatter": case.out, "allgather": case.x}
    count = parts.get(case.collective, case.x).size
    if case.collective == "alltoall":
        count //= case.size
    x, out = (ctypes.c_void_p(None if a is None else a.ctypes.data) for a in (case.x, case.out))
    return partial(function, x, out, ctypes.c_size_t(count))


def prepare(folder: Path) -> dict[str, str]:
    """Make ready what this Python can run; return for each library what it lacks, or ""."""
    folder.mkdir(parents=True, exist_ok=True)
    lacks = {}
    for name, (make_ready, _) in LIBRARIES.items():
        try:
            make_ready(folder)
            lacks[name] = ""
        except Missing as error:
            lacks[name] = str(error)
    return lacks


def version_of(name: str, folder: Path) -> str:
    """Return the version of a library; gloo has that of its PyTorch."""
    if name == "DeepSpeed":
        archive = max(folder.glob("deepspeed-*.tar.gz")).name
        return archive.removeprefix("deepspeed-").removesuffix(".tar.gz")
    return version({"oneCCL": "oneccl", "gloo": "torch"}[name])


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("collectives", nargs="*", help="collectives to measure")
    parser.add_argument("--prepare", type=Path, metavar="FOLDER", help="compile into it, and end")
    parser.add_argument("--built", type=Path, metavar="FOLDER", help="what --prepare compiled")
    parser.add_argument("--libraries", default="", help=f"of {', '.join(LIBRARIES)}")
    parser.add_argument("--bytes", default="8,64K,1M", help="sizes of the whole buffer")
    parser.add_argument("--budget", type=float, default=0.25, help="seconds for each size")
    parser.add_argument("--in-place", action="store_true", help="write the result over the input")
    parser.add_argument("--json", metavar="FILE", help="write the results")
    options = parser.parse_args(arguments)
    options.libraries = [name for name in options.libraries.split(",") if name]
    for name in options.libraries:
        if name not in LIBRARIES:
            parser.error(f"--libraries {name}: expected some of {', '.join(LIBRARIES)}")
    if options.prepare is None and not (options.collectives and options.built):
        parser.error("expected --prepare, or collectives and --built")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the libraries on all ranks; return 1 if any result was wrong."""
    options = read_options(arguments)
    if options.prepare is not None:
        sys.stdout.write(json.dumps(prepare(options.prepare)) + "\n")
        return 0
    comm = mpidist.init()
    settings = Settings(
        sizes=parse_sizes(options.bytes),
        algorithms=[],
        dtype=np.float32,
        in_place=options.in_place,
        budget=options.budget,
    )
    machine = Watch(comm).begin()
    with ExitStack() as stack:
        others = [
            Candidate(name, other=stack.enter_context(LIBRARIES[name][1](comm, options.built)))
            for name in options.libraries
        ]
        results = run_benchmark(comm, options.collectives, settings, others=others)
    machine.end(results)
    results.header["versions"] |= {
        name: version_of(name, options.built) for name in options.libraries
    }
    if comm.rank == 0 and options.json:
        results.save(options.json)
    return 0 if results.correct else 1


if __name__ == "__main__":
    raise SystemExit(main())
