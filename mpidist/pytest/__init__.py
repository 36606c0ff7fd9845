"""A plugin of pytest for tests on several ranks: ``-p mpidist.pytest``.

Under mpiexec, with ``--with-mpi``, pytest runs in every rank, and rank 0 reports for all.  After
each test the ranks tell each other how it went: a test that fails on any rank fails, with each
rank's failure.  A rank that does not come in time ends the launch, with its stacks and its number;
every other failure lets the later tests go on.  Without an mpiexec each rank of a test is a thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from ..communicator.launcher_notes import OF_MPI, launched_rank
from .reports import Exchange, RankReports, outcome_of, silence
from .simulated import MARKERS, SimulatedRanks, least_ranks, parse_sizes, simulate

if TYPE_CHECKING:  # importing it here would start nothing, but takes 0.2 s
    from ..communicator.communicator import Communicator

__all__ = ["Exchange", "RankReports", "SimulatedRanks", "comm", "outcome_of"]

RANKS = pytest.StashKey[RankReports]()


def is_launched() -> bool:
    """Return whether an mpiexec or srun started this process."""
    return launched_rank(launchers=OF_MPI) is not None  # a batch script of SLURM has its rank 0


def add_rank_grace(group: pytest.OptionGroup) -> None:
    """Add the option for the seconds that :class:`RankReports` waits for other ranks."""
    group.addoption(
        "--rank-grace",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="how long beyond a test's time limit the other ranks are waited for",
    )


def add_ranks(group: pytest.OptionGroup, default: str = "1,2,3") -> None:
    """Add the option for the numbers of simulated ranks."""
    group.addoption(
        "--ranks",
        default=default,
        metavar="N,…",
        help="without an mpiexec: the numbers of simulated ranks on which a test with the fixture "
        f"comm runs (default: {default})",
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add this plugin's options to pytest's command line."""
    group = parser.getgroup("mpidist")
    add_rank_grace(group)
    add_ranks(group)
    group.addoption(
        "--rank-timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="time limit of a test for which pytest-timeout has none",
    )


def pytest_load_initial_conftests(early_config: pytest.Config, parser: pytest.Parser) -> None:
    """Add ``--with-mpi`` unless pytest-mpi, loaded by now, has done so."""
    if not hasattr(early_config.known_args_namespace, "with_mpi"):
        group = parser.getgroup("mpidist")
        group.addoption("--with-mpi", action="store_true", help="one report of all MPI ranks")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Let the ranks report together under mpiexec, with ``--with-mpi``; else simulate them."""
    add_markers(config)
    sizes = parse_sizes(config.getoption("ranks"))
    grace, limit = config.getoption("rank_grace"), config.getoption("rank_timeout")
    if not is_launched():
        simulate(config, session_communicator, sizes, limit)
    elif config.getoption("with_mpi", False) and RANKS not in config.stash:
        report_together(config, RankReports(Exchange(), grace, limit=limit))


def add_markers(config: pytest.Config) -> None:
    """Make the markers of this plugin known to pytest."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)


@pytest.hookimpl(trylast=True)  # pytest-mpi, if it is there, has words of its own
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test under mpiexec that needs more ranks."""
    ranks = item.config.stash.get(RANKS, None)
    if ranks and ranks.exchange.size < least_ranks(item):
        pytest.skip(f"needs at least {least_ranks(item)} ranks")


def report_together(config: pytest.Config, ranks: RankReports, log: str | None = None) -> None:
    """Register the hooks by which ranks report together.

    Ranks other than 0 write pytest's output to the file `log`, or nowhere if that is None.
    """
    if ranks.exchange.rank:
        silence(config, log)
    config.pluginmanager.register(ranks)
    config.stash[RANKS] = ranks


def session_communicator(request: pytest.FixtureRequest) -> Iterator[Communicator]:
    """Yield the communicator of all ranks; a new one after each test that failed on any rank.

    Without an mpiexec that of the simulated ranks, new for each test.
    """
    from ..communicator.launch import init

    yield init()


comm = pytest.fixture(session_communicator)
