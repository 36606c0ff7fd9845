"""Random sequences of calls, messages and memory, drawn by hypothesis; every result is exact.

Rank 0 draws, and shrinks what fails; the others play what it tells them, over a communicator that
mpidist knows nothing of.  A sequence has failed if it failed on any rank.
"""

import os
import time
import traceback
from collections import Counter

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from mpi4py import MPI

from tests.support.sequences import Player, sequences

SECONDS = float(os.environ.get("MPIDIST_STRESS_SECONDS", "20"))
os.environ["MPIDIST_STREAM_BYTES"] = "4K"  # what is drawn is shorter than the default
SHRINK_SECONDS = 60.0  # to look for a shorter sequence once one has failed
TIMEOUT = 15.0
EXAMPLES = 25  # between two seeds: a seed that is told is soon back at its failure


class Group:
    """The ranks that play together."""

    def __init__(self):
        self.control = MPI.COMM_WORLD.Dup()
        self.counts = Counter()
        self.failed_at = None
        self.failures = set()

    def lead(self, sequence):
        """Play on all ranks; raise what any of them says."""
        told = repr(sequence)
        late = self.failed_at is not None and time.monotonic() - self.failed_at > SHRINK_SECONDS
        if late and told not in self.failures:
            return  # no time left to find a shorter one
        self.control.bcast(sequence)
        verdicts = self.play(sequence)
        if any(verdicts):
            lines = [f"rank {rank}: {text}" for rank, text in enumerate(verdicts) if text]
            if self.failed_at is None:
                self.failed_at = time.monotonic()
                print("\nfailed at first:", told, *lines, sep="\n", flush=True)
            self.failures.add(told)
            raise AssertionError("\n".join(lines))

    def follow(self):
        while (sequence := self.control.bcast(None)) is not None:
            self.play(sequence)

    def play(self, sequence):
        """Play here; give what went wrong on each rank, or None."""
        wrong = None
        try:
            player = Player(TIMEOUT)
            player.play(sequence)
            self.counts += player.counts
            self.counts["sequences"] += 1
            wrong = "\n".join(player.wrong[:3]) or None
        except Exception:
            wrong = traceback.format_exc()
        return self.control.allgather(wrong)

    def search(self, seed, seconds):
        """Draw until the time is over."""
        until = time.monotonic() + seconds
        profile = settings(
            max_examples=EXAMPLES,
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            print_blob=False,
        )
        try:
            while time.monotonic() < until:
                self.seed, seed = seed, seed + 1

                @hypothesis.seed(self.seed)
                @profile
                @given(sequences())
                def attempt(sequence):
                    if time.monotonic() < until or self.failed_at is not None:
                        self.lead(sequence)

                attempt()
        finally:
            self.control.bcast(None)


@pytest.mark.timeout(0)
def test_random_sequences():
    group = Group()
    if MPI.COMM_WORLD.rank:
        group.follow()
        return
    seed = int(os.environ.get("MPIDIST_STRESS_SEED", time.time()))
    try:
        group.search(seed, SECONDS)
    except BaseException:
        print(f"\nagain with MPIDIST_STRESS_SEED={group.seed}", flush=True)
        raise
    print(f"\nseeds {seed} to {group.seed}:", *sorted(group.counts.items()), flush=True)
    assert group.counts["sequences"] and group.counts["native"]
    assert group.counts["symmetric"] or os.environ.get("MPIDIST_RANKS_PER_NODE")
