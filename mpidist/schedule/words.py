"""The words that strands post and await in the prover's machine: Signal and Wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from .rounds import Signal, Wait
from .strand import Known, Strand

ChannelKey = tuple[int, int, str]  # who posts, who waits, and the channel


@dataclass(slots=True)
class Word:
    """A word that was posted: by whom, in which round, and what the poster knew."""

    strand: Strand
    number: int
    relaxed: bool
    known: Known
    tick: int
    clock: int


@dataclass(slots=True)
class Channel:
    """The words of a channel that nobody has taken yet, and the strand that waits for the next."""

    words: deque[Word] = field(default_factory=deque)
    waiting: tuple[Strand, Wait] | None = None
    # The strands that post and that take: a channel has one of each, in every call.
    posts: tuple[int, ...] | None = None
    takes: tuple[int, ...] | None = None


class Words:
    """All channels.  ``depart(strand)`` is called with each strand whose last wait ends."""

    def __init__(self, depart: Callable[[Strand], None]):
        self._depart = depart
        self._channels: dict[ChannelKey, Channel] = {}
        self.posted = 0

    def post(self, strand: Strand, step: Signal) -> None:
        """Post a word; the strand that waits for it, if one does, goes on."""
        channel = self._channels.setdefault((strand.rank, step.peer, step.channel), Channel())
        if channel.posts not in (None, strand.path):
            raise strand.error(
                f"signals on {step.channel}, as another strand of its rank does: which of their "
                "words a wait takes is not determined"
            )
        channel.posts = strand.path
        self.posted += 1
        # Not of this round: its other steps may come after the word.
        known, tick = (strand.begun, 0) if step.relaxed else (strand.known, strand.tick - 1)
        channel.words.append(Word(strand, strand.number, step.relaxed, known, tick, strand.clock))
        if channel.waiting is not None:
            waiting, wait = channel.waiting
            channel.waiting = None
            self._take(waiting, wait, channel)
            waiting.pending -= 1
            if not waiting.pending:
                self._depart(waiting)

    def wait(self, strand: Strand) -> bool:
        """Begin a round of waits; return whether the strand must wait."""
        strand.pending = 0
        for step in strand.steps:
            assert isinstance(step, Wait)
            channel = self._channels.setdefault((step.peer, strand.rank, step.channel), Channel())
            if channel.takes not in (None, strand.path) or channel.waiting is not None:
                raise strand.error(
                    f"waits on {step.channel}, as another strand of its rank does, or twice at "
                    "once: which of them takes a word is not determined"
                )
            channel.takes = strand.path
            if channel.words:
                self._take(strand, step, channel)
            else:
                channel.waiting = strand, step
                strand.pending += 1
        return strand.pending > 0

    def _take(self, strand: Strand, step: Wait, channel: Channel) -> None:
        word = channel.words.popleft()
        known, tick = word.known, word.tick
        if step.relaxed:
            known, tick = word.strand.begun, 0
        strand.heard += ((known, word.strand.thread, tick),)
        strand.clock = max(strand.clock, word.clock + 1)

    def missing(self, strand: Strand) -> list[Wait]:
        """Return the waits of a strand's round for which no word was posted."""
        waiting = (channel.waiting for channel in self._channels.values())
        return [found[1] for found in waiting if found is not None and found[0] is strand]

    def check_end(self) -> None:
        """Raise if a word was posted for which nobody waits: a later call would take it."""
        for (_, peer, name), channel in self._channels.items():
            for word in channel.words:
                raise word.strand.error(
                    f"signals rank {peer} on {name}, which does not wait for it: its next call "
                    "takes the word for a later one",
                    number=word.number,
                )
