"""What "auto" would do and why: the answer of ``Communicator.explain``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .errors import Unsupported
from .memory import why_no_symmetric_memory
from .objects import example_call
from .operations import find_op
from .rules import NATIVE
from .selection import Way, choose, needs_calibration, ways
from .symmetric import NEEDS, SINGLE_COPY, STAGED, SYMMETRIC
from .tuning_entry import MEMORIES, PRIVATE

NOT_WRITTEN_BY_HAND = (NATIVE, SYMMETRIC, STAGED, SINGLE_COPY)

if TYPE_CHECKING:
    from .communicator import Communicator


def explain(
    self: Communicator,
    collective: str,
    nbytes: int,
    op: str = "sum",
    memory: str = PRIVATE,
    without: Sequence[str] = (),
) -> tuple[Way, list[Way]]:
    """Give the way that "auto" takes for `nbytes` of float32, and every way there is.

    No communication: nothing is measured for it.

    Parameters
    ----------
    collective : str
        Which.
    nbytes : int
        Bytes of the whole buffer.
    op : str
        Operation, where it reduces.
    memory : {"private", "symmetric"}
        Where the arrays are: "symmetric" for those of :meth:`empty`.
    without : sequence of {"native", "symmetric", "staged", "single_copy"}
        Ways that are not to be taken.

    Returns
    -------
    chosen : Way
        With the reason in words: the configuration, the tuning table, or the shipped rule.
    every : list of Way
        Whether each can serve, and why not; and the `seconds` that it is expected to take, where
        they are known: measured ones from the tuning table if it holds for such a call, else those
        of the cost model once :meth:`calibrate` has run.

    Raises
    ------
    Unsupported
        If this communicator cannot have arrays in symmetric memory.
    """
    if memory not in MEMORIES:
        raise self._place.wrong(f"memory={memory!r}: allowed are {' and '.join(MEMORIES)}")
    call = example_call(self._place, collective, nbytes, find_op(op))
    service = self._service
    means = service.chooser.means(call)
    if memory != PRIVATE:
        reason = why_no_symmetric_memory(self)
        if reason is not None:
            raise Unsupported(f"rank {self.rank}: {reason}")
        if collective in NEEDS:
            means = replace(means, no_symmetric=None)
    for way in without:
        if way not in NOT_WRITTEN_BY_HAND:
            allowed = ", ".join(NOT_WRITTEN_BY_HAND)
            raise self._place.wrong(f"without={without!r}: allowed are {allowed}")
        change: dict[str, Any] = {f"no_{way}": "the caller does without it"}
        means = replace(means, **change)
    advice = service.chooser.advice
    chosen = choose(call, "auto", self.config, means, advice)
    if needs_calibration(call, "auto", self.config, means, advice):
        why = f"{chosen.why}; the first call will calibrate, and may choose by the cost model"
        chosen = replace(chosen, why=why)
    every = ways(call, means)
    if advice is not None:
        where = PRIVATE if collective not in NEEDS else memory
        every = [advice.predicted(call, way, where) for way in every]
        chosen = advice.predicted(call, chosen, where)
    return chosen, every
