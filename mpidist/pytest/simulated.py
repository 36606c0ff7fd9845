"""Tests on simulated ranks: without an mpiexec each rank of a test is a thread of this process.

pytest prepares a test once, in the main thread.  What depends on the communicator cannot be: the
value of such a fixture is :class:`Deferred`, and every rank's thread computes its own.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.fixtures import resolve_fixture_function

from .reports import BAD, PASSED, RankFailures, Verdict, named, together_by_message

if TYPE_CHECKING:
    from ..communicator.communicator import Communicator

MARKERS = (
    "mpi(min_size=1): the test needs so many ranks",
    "ranks(*sizes): the numbers of simulated ranks of the test, in place of --ranks",
    "real_ranks: the test never runs on simulated ranks",
)
LINGER = 1.0  # seconds that a rank has to end after the deadline of its test
UNLIMITED = 1e6  # seconds
SKIPS = (pytest.skip.Exception, pytest.xfail.Exception)


class Size(int):
    """A number of simulated ranks; by its type such a parameter of a test is recognised."""


class Abandoned(BaseException):
    """Raised in a rank that goes on beyond the deadline of its test, to end it."""


@dataclass(eq=False)
class Deferred:
    """The value of a fixture that every rank computes for itself, from `arguments`."""

    name: str
    function: Callable[..., Any]
    arguments: dict[str, Any]

    def __getattr__(self, attribute: str) -> Any:
        raise AttributeError(
            f"{attribute}: the fixture {self.name!r} has a value on each simulated rank; a test or "
            "fixture gets it as an argument, not by request.getfixturevalue"
        )


def parse_sizes(text: str) -> tuple[int, ...]:
    """Read the value of ``--ranks``: ``"1,2,3"``."""
    words = text.split(",")
    if not all(word.isdecimal() and int(word) for word in words):
        raise pytest.UsageError(
            f"--ranks={text}: expected numbers of ranks >= 1 with commas between, such as 1,2,3"
        )
    return tuple(dict.fromkeys(map(int, words)))


def least_ranks(node: pytest.Item) -> int:
    """Return the least number of ranks of a test, as its markers ``mpi(min_size=…)`` have it."""
    return max([1, *(mark.kwargs.get("min_size") or 1 for mark in node.iter_markers("mpi"))])


def simulated_size(item: pytest.Item) -> int:
    """Return the number of simulated ranks of a test, 0 if it has none."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return next((int(value) for value in params.values() if isinstance(value, Size)), 0)


class SimulatedRanks:
    """Hooks of pytest that run each test with the fixture `function` on simulated ranks.

    `sizes` are the numbers of ranks; a test may take `limit` seconds where pytest-timeout has no
    time limit for it.
    """

    def __init__(self, function: Callable[..., Any], sizes: Sequence[int], limit: float):
        self.function, self.sizes, self.limit = function, sizes, limit
        # Of the test that runs: fixtures in the order of set-up; failures as they are printed.
        self.deferred: list[Deferred] = []
        self.failures: list[tuple[str, str, str]] = []
        self.watched: pytest.Item | None = None  # the last test with a time limit of pytest-timeout

    @pytest.hookimpl(trylast=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make a test of each number of ranks, unless it is marked ``real_ranks``."""
        test = metafunc.definition
        name = self._name_of_fixture(metafunc)
        if name is None or test.get_closest_marker("real_ranks"):
            return
        mark, least = test.get_closest_marker("ranks"), least_ranks(test)
        sizes = tuple(mark.args) if mark else self.sizes
        fitting = [size for size in sizes if size >= least] or [least]
        ids = [f"{size}rank{'s' * (size > 1)}" for size in fitting]
        metafunc.parametrize(name, list(map(Size, fitting)), ids=ids, indirect=True)

    def _name_of_fixture(self, metafunc: pytest.Metafunc) -> str | None:
        """Return the name under which a test has the fixture, None without it.

        A fixture of the same name that does not ask for the one it overrides replaces it.
        """
        for name, known in metafunc._arg2fixturedefs.items():
            functions = [fixture.func for fixture in known]
            if self.function in functions:
                above = known[functions.index(self.function) + 1 :]
                if all(name in fixture.argnames for fixture in above):
                    return name
        return None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Forget the test before."""
        self.deferred, self.failures = [], []

    @pytest.hookimpl(tryfirst=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Deferred | None:
        """Defer the communicator and the fixtures that depend on it to the ranks."""
        if not simulated_size(request.node):
            return None
        arguments = {name: request.getfixturevalue(name) for name in fixturedef.argnames}
        function = fixturedef.func
        if function is not self.function:
            if not any(isinstance(value, Deferred) for value in arguments.values()):
                return None
            function = resolve_fixture_function(fixturedef, request)  # bound to the instance
        made = Deferred(fixturedef.argname, function, arguments)
        self.deferred.append(made)
        fixturedef.cached_result = made, fixturedef.cache_key(request), None
        return made

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """Run a test on its ranks; raise the error of the first rank that failed by itself."""
        if not simulated_size(pyfuncitem):
            return None
        from ..communicator.simulation import run_simulated

        test = pyfuncitem
        values = {name: test.funcargs[name] for name in test._fixtureinfo.argnames}
        size, deferred = simulated_size(test), tuple(self.deferred)
        errors: dict[int, BaseException] = {}
        threads: dict[int, int] = {}
        done: set[int] = set()

        def body(comm: Communicator) -> None:
            threads[comm.rank] = threading.get_ident()
            try:
                with self._fixtures(deferred, comm) as own:
                    test.obj(**{name: own.get(id(v), v) for name, v in values.items()})
            except BaseException as error:
                errors[comm.rank] = error
                # As another error: the rank is written into its text, and no skip ends the others.
                raise RuntimeError(f"{type(error).__name__}: {error}") from error
            finally:
                done.add(comm.rank)

        limit = UNLIMITED if self.watched is test else self.limit
        begin, outer = time.monotonic(), None
        try:
            run_simulated(size, body, timeout=limit)
        except (Exception, pytest.fail.Exception) as error:  # a rank's; or the time limit's
            outer = error
        hung = {rank: thread for rank, thread in threads.items() if rank not in done}
        seconds = time.monotonic() - begin  # of all alike: they are one failure
        found = {r: _hang(thread, seconds) for r, thread in hung.items()}
        found.update(errors)
        if hung:
            _end(hung, done)
        if outer is not None and not found:
            raise outer
        self._judge(test, found, size)
        return True

    @contextmanager
    def _fixtures(
        self, deferred: Sequence[Deferred], comm: Communicator
    ) -> Iterator[dict[int, Any]]:
        """Compute a rank's values of the deferred fixtures, by the identity of each."""
        own: dict[int, Any] = {}
        with ExitStack() as stack:
            for made in deferred:
                if made.function is self.function:
                    own[id(made)] = comm
                    continue
                arguments = {name: own.get(id(v), v) for name, v in made.arguments.items()}
                value = made.function(**arguments)
                if inspect.isgeneratorfunction(made.function):
                    value = stack.enter_context(_as_context(value))
                own[id(made)] = value
            yield own

    def _judge(self, test: pytest.Item, errors: dict[int, BaseException], size: int) -> None:
        """Raise the error by which the test has the outcome of its ranks, and note what to print.

        A failure goes before a skip; a skip, or an expected failure, must be one of all ranks.
        """
        skips = [r for r in sorted(errors) if isinstance(errors[r], SKIPS)]
        failed = [r for r in sorted(errors) if r not in skips]
        # A rank that waited for one that had ended says nothing new.
        causes = [r for r in failed if not _is_echo(errors[r])] or ([] if skips else failed)
        if causes:
            verdicts = [Verdict(PASSED) for _ in range(size)]
            for rank in causes:
                info = pytest.ExceptionInfo.from_exception(errors[rank])
                message = info.exconly(tryshort=True).partition("\n")[0]
                verdicts[rank] = Verdict(BAD, message, str(test.repr_failure(info)))
            self.failures = together_by_message(verdicts)
            raise errors[causes[0]]
        if len(skips) == size:
            raise errors[skips[0]]
        if skips:
            others = [rank for rank in range(size) if rank not in skips]
            who = f"skipped on {named(skips)} but not on {named(others)}"
            pytest.fail(f"{who}: {errors[skips[0]]}", pytrace=False)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Report each different failure of a test once, with the ranks that had it."""
        report = yield
        if call.when == "call" and report.failed and self.failures:
            report.longrepr = RankFailures(item.nodeid, self.failures)
        return report

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_timeout_set_timer(self, item: pytest.Item) -> None:
        """Leave the time limit of a test to pytest-timeout, which interrupts the main thread."""
        self.watched = item


class RealRanks:
    """pytest-mpi's plugin `theirs` for the tests on real ranks: it knows no simulated ones."""

    def __init__(self, theirs: Any):
        self.theirs = theirs

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Let it skip the tests marked ``mpi`` without ``--with-mpi``."""
        real = [item for item in items if not simulated_size(item)]
        self.theirs.pytest_collection_modifyitems(config, real)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Let it skip a test that needs more ranks than there are."""
        if not simulated_size(item):
            self.theirs.pytest_runtest_setup(item)

    def pytest_terminal_summary(self, terminalreporter: Any, exitstatus: int) -> None:
        """Let it print what it knows of MPI."""
        self.theirs.pytest_terminal_summary(terminalreporter, exitstatus)


def simulate(
    config: pytest.Config, function: Callable[..., Any], sizes: Sequence[int], limit: float
) -> None:
    """Register the hooks for simulated ranks, see :class:`SimulatedRanks`."""
    manager = config.pluginmanager
    manager.register(SimulatedRanks(function, sizes, limit))
    for plugin in list(manager.get_plugins()):
        if type(plugin).__module__ == "pytest_mpi":
            manager.unregister(plugin)
            manager.register(RealRanks(plugin))


def _is_echo(error: BaseException) -> bool:
    """Return whether an error only tells that a rank waited for others that had ended."""
    from ..errors import DeadlockError

    return getattr(error, "echo", False) or isinstance(error, DeadlockError)


@contextmanager
def _as_context(generator: Generator[Any, None, None]) -> Iterator[Any]:
    """Use the generator of a fixture: it goes on after the test, however that ends."""
    yield_ = next(generator)
    try:
        yield yield_
    finally:
        for _ in generator:
            raise RuntimeError("the generator of a fixture yielded twice")


def _hang(thread: int, seconds: float) -> BaseException:
    """Return the error of a rank that hangs, with its stack below this file."""
    stack = traceback.extract_stack(sys._current_frames().get(thread))
    own = [number for number, entry in enumerate(stack) if entry.filename == __file__]
    lines = "".join(traceback.format_list(stack[own[-1] + 1 :] if own else stack))
    error = pytest.fail.Exception(f"did not end within {seconds:.3g} s\n{lines}", pytrace=False)
    try:
        raise error  # pytest wants a traceback
    except pytest.fail.Exception:
        return error


def _end(hung: dict[int, int], done: set[int]) -> None:
    """End the threads of ranks that hang, those that run Python; the others are left behind."""
    until = time.monotonic() + LINGER
    for thread in hung.values():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread), ctypes.py_object(Abandoned)
        )
    while not done.issuperset(hung) and time.monotonic() < until:
        time.sleep(0.01)
