"""A communicator's estimates of times: a tuning table, and the calibrated cost model."""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter

from ..calls.call import Call
from ..errors import ScheduleError
from ..measure import format_size, format_time
from ..operations import ANY
from ..schedule.contract import COLLECTIVES
from ..schedule.cost import timed
from ..schedule.registry import GENERATION, Choice, Groups
from .calibration import Calibration
from .segmentation import Segmentation
from .tuning import Key, TuningEntry, TuningTable, kind_for

MOST_RANKS = 16  # above, simulating a schedule takes too long for a call to wait
_MOST_PIECES = 16


def _fewer(groups: Groups) -> Groups:
    """Return the ranks of each node of a smaller communicator: at most four nodes and 16 ranks."""
    nodes = min(len(groups), 4)
    each = min(max(map(len, groups)), MOST_RANKS // nodes)
    return tuple(tuple(range(each * k, each * k + each)) for k in range(nodes))


class Model:
    """Predictions of times by the cost model, each of which is computed once."""

    def __init__(self, calibration: Calibration, groups: Groups, pipelining: Segmentation):
        self.calibration, self.groups = calibration, groups
        self._size = sum(map(len, groups))
        self.small = groups if self._size <= MOST_RANKS else _fewer(groups)
        self._pipelining = pipelining
        self._known: dict[tuple[str, str, int, bool], float | None] = {}

    def seconds(
        self,
        collective: str,
        choice: Choice,
        nbytes: int,
        few: bool = False,
        in_place: bool = False,
    ) -> float | None:
        """Return the predicted time in seconds, on a line between the two nearest powers of two.

        So a program whose sizes vary waits for few simulations.  None for more than 16 ranks, for
        which `few` gives the time on fewer ranks and nodes, or if the schedule cannot be simulated.
        Blocks are simulated in at most 16 segments.
        """
        if self._size > MOST_RANKS and not few:
            return None
        below = 1 << (max(nbytes, 1).bit_length() - 1)
        first = self._at(collective, choice, below, in_place)
        if nbytes <= below or first is None:
            return first
        second = self._at(collective, choice, 2 * below, in_place)
        return None if second is None else first + (nbytes / below - 1) * (second - first)

    def _at(self, collective: str, choice: Choice, nbytes: int, in_place: bool) -> float | None:
        """Return the predicted time at a power of two, which is simulated once."""
        key = (collective, choice.name, nbytes, in_place)
        if key not in self._known:
            self._known[key] = self._simulate(collective, choice, nbytes, in_place)
        return self._known[key]

    def _simulate(
        self, collective: str, choice: Choice, nbytes: int, in_place: bool
    ) -> float | None:
        known, groups, memory = self.calibration, self.small, choice.algorithm.memory
        sharing = None if memory is None else known.sharing(memory.name)
        if memory is not None and sharing is None:
            return None
        size = sum(map(len, groups))
        count = max(choice.algorithm.block_count(size, groups=groups), 1)
        largest, nodes = -(-nbytes // count), len(groups)
        pieces, window = self._pipelining.of(choice.algorithm, size, nodes, count, largest)
        try:
            return timed(
                collective,
                choice,
                size,
                0 if COLLECTIVES[collective].idempotent else nbytes,
                known.messages,
                arity=choice.arity or 2,
                groups=groups,
                segments=min(pieces, _MOST_PIECES),
                window=window,
                link=known.far,
                sharing=sharing,
                in_place=in_place,
            ).seconds
        except ScheduleError:
            return None


TRIED = "measured, in this job"
TRIED_FROM, TRIED_TO = 16 << 10, 4 << 20
"""Bytes from which calls are tried out, and to which: longer ones are like the longest."""
TRIED_AHEAD = 0.95  # as AHEAD, of measured times

# On 2 ranks of a quiet machine the mean regret of 4 and 16 MiB by the curves was 26 % with Open MPI
# and 16 with MPICH, by the rules 26 and 18: up to 2 MiB it was 4.
DECIDED_TO = 2 << 20
"""Bytes up to which "auto" goes by a full calibration: see `Estimates.decides`."""

AHEAD = 0.9  # after a full calibration TRIED_AHEAD
"""Largest predicted time of a candidate, relative to that of the rules, for which it is chosen.

The model does not include other load of the processors; and candidates of similar times must not
alternate from launch to launch, because their bits may differ.
"""


@dataclass(frozen=True)
class Rival:
    """One of the candidates of which the cost model chooses the cheapest."""

    name: str  # of an executor or algorithm
    choices: list[Choice]  # it is assumed to take as long as the fastest of these schedules
    prior: bool = False  # whether the rules name it, so that another one must be clearly faster
    meets: Choice | None = None  # the barrier in which the ranks meet before it, if they do


def _alike(call: Call, memory: str) -> Hashable:
    """Return the key of calls that are tried out once; their arrays are in one of MEMORIES."""
    nearest = min(1 << round(math.log2(max(call.nbytes, 1))), TRIED_TO)
    return call.collective, kind_for(call), call.even, nearest, memory


@lru_cache(maxsize=64)
def _model(
    calibration: Calibration, groups: Groups, pipelining: Segmentation, generation: int
) -> Model:
    """Return one model for all communicators of the same shape: a prediction takes milliseconds."""
    return Model(calibration, groups, pipelining)


log = logging.getLogger("mpidist")

TABLE, MODEL = "measured, from the tuning table", "predicted, by the cost model"
MEASURED = "measured, by the calibration, and linear between its sizes"
CROWDED = "none, as ranks share cores: their times are the scheduler's"

_USUAL = Segmentation()
_SHOWN = 4  # candidates in a reason; `explain` lists all


class Estimates:
    """Estimates of a communicator's times, equal on all ranks, which have the same data.

    `library` is named as in tuning tables; a table for other communicators is not used.  With
    `calibrates`, the cost model's constants may be measured.
    """

    def __init__(
        self,
        library: str,
        groups: Groups,
        calibrates: bool = False,
        calibration: Calibration | None = None,
        tuning: TuningTable | None = None,
        pipelining: Segmentation = _USUAL,
    ):
        self.library, self.groups, self.table = library, groups, tuning
        self.ranks_per_node = tuple(map(len, groups))
        self.calibrates = calibrates and sum(self.ranks_per_node) > 1
        self._pipelining = pipelining
        self.calibration, self.model = None, None  # type: Calibration | None, Model | None
        filed = None if tuning is None else tuning.calibration(library, self.ranks_per_node)
        # That of a larger communicator, from which this one was split, has no times of these ranks.
        if calibration is None or (filed and calibration.ranks_per_node != self.ranks_per_node):
            calibration = filed
        if calibration is not None:
            self.learn(calibration)
        self.unfit = tuning and tuning.why_not(library, self.ranks_per_node)
        self._tuned = tuning is not None and tuning.tunes(library, self.ranks_per_node)
        self.trials: dict[Hashable, dict[str, float]] = {}  # what was tried out, by kind of call

    def learn(self, calibration: Calibration) -> None:
        """Set the constants of the cost model."""
        self.calibration = calibration
        self.model = _model(calibration, self.groups, self._pipelining, GENERATION[0])

    # -- what was tried out ---------------------------------------------------------------------

    def tried(self, call: Call, memory: str) -> dict[str, float]:
        """Return the measured seconds of each way to serve calls like this one, if known."""
        return self.trials.get(_alike(call, memory), {})

    def learn_trial(self, call: Call, memory: str, times: dict[str, float]) -> None:
        """Keep the measured seconds of further ways to serve calls like this one.

        What is known stays, so that no choice made by it changes.
        """
        self.trials[_alike(call, memory)] = times | self.tried(call, memory)

    @property
    def uncalibrated(self) -> bool:
        """Whether the constants will be measured once a choice needs them."""
        return self.calibrates and self.calibration is None

    def warn(self, rank: int) -> None:
        """Log a warning on rank 0 if the tuning table is not for this communicator."""
        if self.table is None or self.table.checked:
            return
        self.table.checked = True  # sub-communicators share the table, which need not fit them
        if rank == 0 and self.unfit:
            log.warning("%s; the shipped rules choose", self.unfit)

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the parts of :class:`Calibration` still to be measured; empty if none is."""
        if not self.uncalibrated:
            return ()
        return ("messages", "far") if len(self.groups) > 1 else ("messages",)

    # -- the table ------------------------------------------------------------------------------

    def entry(self, call: Call, memory: str) -> tuple[TuningEntry | None, str]:
        """Return (the tuning table's entry for a call, ""), or (None, why there is none).

        Without a table of entries the reason is "".
        """
        if self.table is None:
            return None, ""
        if self.unfit:
            return None, self.unfit
        if not self._tuned:  # the file has a calibration only
            return None, ""
        if call.uneven_alltoall:
            return None, "uneven alltoall is not tuned: no rank knows the others' bytes"
        if call.op is not None and not call.op.builtin:
            return None, f"op {call.op.name!r}: exact sums and operations of the user are not tuned"
        key = self.key(kind_for(call), call.collective, memory)
        found = self.table.find(key)
        if found is None:
            wanted = f"{call.collective} of kind {key.kind} in {memory} memory"
            return None, f"the tuning table {self.table.source} has no entry for {wanted}"
        return found, ""

    def key(self, kind: str, collective: str, memory: str) -> Key:
        """Return the tuning table's key for calls of this communicator."""
        return Key(self.library, self.ranks_per_node, kind, collective, memory)

    # -- predicted times ------------------------------------------------------------------------

    def cheapest(
        self, call: Call, rivals: Sequence[Rival], linked: bool = False
    ) -> tuple[str, str] | None:
        """Return the name of the rival with the lowest predicted time, and the reason as text.

        It is the same on all ranks.  None if a time is unknown, or there are fewer than two rivals;
        after a full calibration, only if that of the rules is unknown.  With `linked` the links
        between nodes count most, and many ranks are scaled down.
        """
        model, found, full = self.model, [], self.decides(call)
        if model is None or len(rivals) < 2:
            return None
        for rival in rivals:
            expected = self.expected(call, rival.name, rival.choices, linked)
            if expected is None:
                if full and not rival.prior:
                    continue
                return None
            seconds, by, _ = expected
            if rival.meets is not None:
                seconds += model.seconds("barrier", rival.meets, 0, linked) or 0.0
            label = rival.name if by == rival.name else f"{rival.name} (as {by})"
            ahead = (TRIED_AHEAD if full else AHEAD) if rival.prior else 1.0
            found.append((seconds * ahead, seconds, label, rival.name))
        name, text = _fastest(found)
        few = f" ({self.simulated})" if linked and self.simulated else ""
        links = " with the measured links" if linked else ""
        return name, f"cost model{links}: {text}{few}"

    def fastest_tried(self, call: Call, times: Mapping[str, float], prior: str) -> tuple[str, str]:
        """Return the name of the way with the lowest measured time, and the reason as text."""
        what = TRIED if call.nbytes <= TRIED_TO else f"{TRIED}, of {format_size(TRIED_TO)}"
        found = [
            (seconds * TRIED_AHEAD if name == prior else seconds, seconds, name, name)
            for name, seconds in times.items()
        ]
        name, text = _fastest(found)
        return name, f"{what}: {text}"

    def knows_all(self, call: Call) -> bool:
        """Return whether a full calibration has the times of what can serve a call.

        They are of float32, and of an even number of bytes for each rank.
        """
        known, op = self.calibration, call.op
        return (
            known is not None
            and bool(known.kernels)
            and known.ranks_per_node == self.ranks_per_node
            and kind_for(call) in ("any", "float")
            and (op is None or (op.builtin and op.grouping == ANY))
            and call.even
        )

    def decides(self, call: Call) -> bool:
        """Return whether "auto" goes by a full calibration, without rules and trials.

        Not beyond the measured bytes, nor where its regret was not shown to be less than theirs.
        """
        known = self.calibration
        if known is None or not self.knows_all(call):
            return False
        return call.nbytes <= min(max(curve.sizes[-1] for *_, curve in known.kernels), DECIDED_TO)

    def expected(
        self, call: Call, name: str, choices: Sequence[Choice], few: bool = False
    ) -> tuple[float, str, str] | None:
        """Return the seconds of a candidate, what they are the time of, and their basis as text.

        They are measured, of an executor's own kernel or library call, else those of the fastest of
        the schedules `choices` by the cost model, as `Model.seconds`.  None if unknown.
        """
        model, known = self.model, self.calibration
        if known is None or model is None or call.uneven_alltoall:
            return None
        curve = known.kernel(name, call.collective) if self.knows_all(call) else None
        if curve is not None:
            return curve.at(call.nbytes), name, MEASURED
        kind, nbytes = call.collective, call.nbytes
        times = [(model.seconds(kind, one, nbytes, few, call.in_place), one) for one in choices]
        found = [(seconds, one.name) for seconds, one in times if seconds is not None]
        return (*min(found), MODEL) if found else None

    @property
    def knows_links(self) -> bool:
        """Whether the links between nodes were measured separately."""
        return self.calibration is not None and self.calibration.far is not None

    @property
    def simulated(self) -> str:
        """Text of the ranks simulated in place of all, such as "of 16 ranks on 4 nodes"; or ""."""
        if self.model is None or self.model.small == self.groups:
            return ""
        small = self.model.small
        return f"of {sum(map(len, small))} ranks on {len(small)} nodes"


def _fastest(found: list[tuple[float, float, str, str]]) -> tuple[str, str]:
    """Return the first name and a text on all, of (what counts, seconds, label, name)."""
    found.sort(key=itemgetter(0))
    _, least, _, name = found[0]
    nearest = found[:_SHOWN]
    text = ", ".join(f"{label} {format_time(seconds)}" for _, seconds, label, _ in nearest)
    if len(found) > _SHOWN:
        text += f" and {len(found) - _SHOWN} more"
    if least > min(seconds for _, seconds, *_ in found):
        text += f"; the rules name {name}, and nothing is clearly faster"
    return name, text
