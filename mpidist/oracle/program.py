"""The program of each process of a check: the user's script, with taps."""

from __future__ import annotations

import os
import random
import runpy
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import numpy as np

from ..communicator.failure import describe
from ..communicator.launcher_notes import launched_rank
from ..errors import CommunicationError
from ..frameworks.base import adapter, library
from ..parallel import DDP, ZeroOptimizer
from . import pipelines, reference
from .plan import ROLES, Plan
from .reference import Link, connect
from .taps import Taps

BACKEND_ERROR = "DistBackendError"  # of torch.distributed


class AfterImport:
    """Calls a function right after a module has been imported; an entry of ``sys.meta_path``."""

    def __init__(self, name: str, act: Callable[[], object]):
        self._name, self._act = name, act

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the module, with a loader that calls the function; else None."""
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._act()

            spec.loader.exec_module = exec_module  # type: ignore
        return spec


def install(taps: Taps, number: int, link: Link | None = None) -> None:
    """Have everything that trains in this process report to `taps`; `number` is a seed."""
    reference.install(taps, link)
    pipelines.install(taps)
    adapter(None, "taps").LIBRARY.install(taps)

    def with_torch() -> None:
        taps.writer.facts(torch=True)
        torch = adapter("torch", "taps")
        torch.seed(number)
        torch.LIBRARY.install(taps)

    if "torch" in sys.modules:
        with_torch()
    else:
        sys.meta_path.insert(0, AfterImport("torch", with_torch))  # type: ignore[arg-type]
    wrap, step = DDP.__init__, ZeroOptimizer.step

    @wraps(wrap)
    def tapped_wrap(model: Any, module: Any, *arguments: Any, **options: Any) -> None:
        # Before the DDP: its own callbacks on gradients come after those of the taps.
        if callable(getattr(module, "parameters", None)) and not isinstance(module, DDP):
            taps.know(adapter(library(module), "taps").LIBRARY, module)
        wrap(model, module, *arguments, **options)
        taps.writer.facts(wrapper="DDP")
        if options.get("reproducible"):
            taps.writer.facts(reproducible=options["reproducible"])
            taps.promise_bits(model.framework, module)

    @wraps(step)
    def tapped_step(optimizer: Any, *arguments: Any) -> Any:
        return taps.zero_step(step, optimizer, *arguments)

    DDP.__init__ = tapped_wrap  # type: ignore
    ZeroOptimizer.step = tapped_step  # type: ignore


def run(plan: Plan, folder: Path, rank: int, words: list[str], link: Link | None = None) -> None:
    """Run the script in `words` with its arguments, as ``__main__``, in this process."""
    taps = Taps(plan, folder, rank)
    # Rank 0 begins like the reference, the others unlike it: what rank 0 did not send them shows.
    number = plan.seed + (rank if plan.role == "ranks" else 0)
    random.seed(number)
    np.random.seed(number)
    install(taps, number, link)
    sys.argv[:] = words
    sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
    try:
        runpy.run_path(words[0], run_name="__main__")
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            if not _follows(error):
                line = str(error).strip().partition("\n")[0]
                taps.writer.facts(failed=f"{type(error).__name__}: {line}")
            raise
    taps.ended()  # by sys.exit(0), too


def _follows(error: BaseException) -> bool:
    """Return whether an error may only follow from the end of another rank."""
    ended = any(f"Connection {how} by peer" in str(error) for how in ("closed", "reset"))  # gloo's
    of_mpi = type(error).__module__.startswith("mpi4py.")
    of_torch = type(error).__name__ == BACKEND_ERROR
    return ended or of_mpi or of_torch or isinstance(error, CommunicationError)


def main() -> None:
    """Run a rank of the ranks' run: ``sys.argv`` has its folder, the script, and its arguments."""
    folder = Path(sys.argv[1])
    run(Plan.load(folder), folder, launched_rank() or 0, sys.argv[2:])


def references() -> None:
    """Run the references, all at a time, in children: ``sys.argv`` has the folder above theirs.

    What takes long to import is imported before, once for all of them.
    """
    above, words = Path(sys.argv[1]), sys.argv[2:]
    folders = [above / role for role in ROLES[1:]]
    plans = [Plan.load(folder) for folder in folders]
    if plans[0].torch:
        adapter("torch", "taps")
    children = []
    for plan, folder in zip(plans, folders, strict=True):
        links = connect(plan.processes)
        for rank, link in enumerate(links):
            child = os.fork()
            if child == 0:
                for other in links:
                    if other is not link:
                        other.close()
                _become(plan, folder, rank, words, link)
            children.append(child)
        for link in links:
            link.close()
    for child in children:
        os.waitpid(child, 0)


def _become(plan: Plan, folder: Path, rank: int, words: list[str], link: Link) -> NoReturn:
    """Run the script in this child, and end it."""
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    status = 1
    try:
        run(plan, folder, rank, words, link)
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if leaving.code is not None and status is not leaving.code:
            sys.stderr.write(f"{leaving.code}\n")
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.stderr.write(describe(type(error), error, trace, os.environ)["text"])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
