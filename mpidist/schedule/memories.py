"""The memories that a schedule can need: which buffers of a rank other ranks read and write."""

from __future__ import annotations

from dataclasses import dataclass

from .rounds import BUFFERS


@dataclass(frozen=True)
class Memory:
    """What the ranks of one node may do with each other's buffers, as a schedule declares it.

    Attributes
    ----------
    name, summary : str
        Name for ``@algorithm(memory=…)``, and one line about it.
    reads, writes : frozenset of str
        The buffers of a rank that other ranks may read, and those that they may write.
    scratch : tuple of str
        Buffers besides "in", "out" and "tmp".  They are not the caller's: two sets of them take
        turns, so that a later call uses them again only when all ranks have met in the next one.
    kernels : bool
        Whether it is that of thread blocks on GPUs, for plans that are proved and not run.  Strands
        of a rank use each other's blocks, in the order that Signal and Wait give them.  A schedule
        has several calls in a row, and the caller's steps between them: "in" is the data that it
        begins each with, which nobody else reaches; others reach "input".
    """

    name: str
    summary: str
    reads: frozenset[str]
    writes: frozenset[str] = frozenset()
    scratch: tuple[str, ...] = ()
    kernels: bool = False

    def why_not(self, does: str, buffer: str) -> str | None:
        """Return why other ranks may not "read" or "write" (`does`) a buffer; None if they may."""
        allowed = self.reads if does == "read" else self.writes
        if buffer in allowed:
            return None
        what = ", ".join(sorted(map(repr, allowed))) or "no buffer"
        return f"in {self.name!r} memory others may {does} {what}"

    @property
    def buffers(self) -> tuple[str, ...]:
        """The names of all buffers."""
        return (*BUFFERS, *("input",) * self.kernels, *self.scratch)


_OWN = frozenset(BUFFERS)
MEMORIES = {
    memory.name: memory
    for memory in (
        Memory("mapped", "others read and write a rank's arrays", _OWN, _OWN - {"in"}),
        Memory("published", "others read a rank's arrays", _OWN),
        Memory(
            "slots",
            "others read the two halves of a rank's slot, into which it copies",
            frozenset(("slot0", "slot1")),
            scratch=("slot0", "slot1"),
        ),
        Memory(
            "kernels",
            "thread blocks of GPUs reach each other's input, output and scratch",
            frozenset(("input", "out", "scratch")),
            frozenset(("out", "scratch")),
            scratch=("scratch",),
            kernels=True,
        ),
    )
}
"""The memories by name."""
