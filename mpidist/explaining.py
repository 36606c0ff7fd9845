"""What "auto" would do and why: the answer of ``Communicator.explain``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from .errors import Unsupported
from .memory import why_no_symmetric_memory
from .objects import example_call
from .operations import find_op
from .schedule.registry import RESERVED
from .selection import Way, Ways, choose
from .symmetric import NEEDS, SYMMETRIC
from .tuning_entry import MEMORIES, PRIVATE

NOT_WRITTEN_BY_HAND = RESERVED[1:]

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
        Executors that are not to be taken.

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
    reasons = dict(means.reasons)
    if memory != PRIVATE:
        reason = why_no_symmetric_memory(self)
        if reason is not None:
            raise Unsupported(f"rank {self.rank}: {reason}")
        if collective in NEEDS:
            reasons[SYMMETRIC] = None
    for name in without:
        if name not in reasons:
            allowed = ", ".join(reasons)
            raise self._place.wrong(f"without={without!r}: allowed are {allowed}")
        reasons[name] = "the caller does without it"
    advice = service.chooser.advice
    ways = Ways(call, replace(means, reasons=reasons))
    chosen = choose(ways, "auto", self.config, advice)
    if chosen.missing:
        why = f"{chosen.why}; the first call will calibrate, and may choose by the cost model"
        chosen = replace(chosen, why=why)
    every = ways.every()
    if advice is not None:
        where = PRIVATE if collective not in NEEDS else memory
        every = [advice.predicted(call, way, where) for way in every]
        chosen = advice.predicted(call, chosen, where)
    return chosen, every
