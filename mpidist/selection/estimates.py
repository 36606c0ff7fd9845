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
from ..schedule.contract import COLLECTIVES
from ..schedule.cost import Link, Sharing, timed
from ..schedule.model import Curve, Messages
from ..schedule.registry import GENERATION, Choice, Groups
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
        """Return the predicted time in seconds, for the power of two nearest to `nbytes`.

        None for more than 16 ranks, for which `few` gives the time on fewer ranks and nodes, or if
        the schedule cannot be simulated.  Blocks are simulated in at most 16 segments.
        """
        if self._size > MOST_RANKS and not few:
            return None
        bucket = 1 << round(math.log2(max(nbytes, 1)))
        key = (collective, choice.name, bucket, in_place)
        if key not in self._known:
            self._known[key] = self._simulate(collective, choice, bucket, in_place)
        return self._known[key]

    def _simulate(
        self, collective: str, choice: Choice, nbytes: int, in_place: bool
    ) -> float | None:
        known, groups, memory = self.calibration, self.small, choice.algorithm.memory
        sharing = None if memory is None else known.sharing(memory.name)
        if memory is not None and sharing is None:
            return None
        size, link = sum(map(len, groups)), None
        if known.far_alpha is not None and known.far_beta is not None:
            link = Link(known.far_alpha, known.far_beta)
        count = max(choice.algorithm.block_count(size, groups=groups), 1)
        largest, nodes = -(-nbytes // count), len(groups)
        pieces, window = self._pipelining.of(choice.algorithm, size, nodes, count, largest)
        try:
            return timed(
                collective,
                choice,
                size,
                0 if COLLECTIVES[collective].idempotent else nbytes,
                known.messages or Messages.straight(known.alpha, known.beta, known.gamma),
                arity=choice.arity or 2,
                groups=groups,
                segments=min(pieces, _MOST_PIECES),
                window=window,
                link=link,
                sharing=sharing,
                in_place=in_place,
            ).seconds
        except ScheduleError:
            return None


@dataclass(frozen=True)
class Calibration:
    """The cost model's constants of one communicator.

    A message of n bytes takes α + nβ seconds, or what `messages` says.  Schedules in a memory that
    was not measured (None) have no times.
    """

    alpha: float  # per message
    beta: float  # per byte sent
    gamma: float  # per byte combined
    far_alpha: float | None = None  # between nodes, if that was measured separately
    far_beta: float | None = None
    mapped: Sharing | None = None  # memory that the ranks of a node map: symmetric arrays and slots
    published: Sharing | None = None  # memory of other processes, read by system calls
    messages: Messages | None = None  # curves in place of α, β and γ, if they were measured
    # Executor, collective and measured times of those that run no schedule of messages.
    kernels: tuple[tuple[str, str, Curve], ...] = ()
    noise: float = 0.0  # median deviation of the measured times of `messages`, over their median

    def kernel(self, executor: str, collective: str) -> Curve | None:
        """Return the times of calls that an executor serves by its own name; None if unknown."""
        found = (curve for *key, curve in self.kernels if key == [executor, collective])
        return next(found, None)

    def sharing(self, memory: str) -> Sharing | None:
        """Return the constants of a memory of a node, by its name in schedules."""
        return self.published if memory == "published" else self.mapped


TRIED = "measured, in this job"
TRIED_FROM, TRIED_TO = 16 << 10, 4 << 20
"""Bytes from which calls are tried out, and to which: longer ones are like the longest."""
TRIED_AHEAD = 0.95  # as AHEAD, of measured times

AHEAD = 0.9
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
        self.calibration, self.model = calibration, None  # type: Calibration | None, Model | None
        if calibration is not None:
            self.learn(calibration)
        self.unfit = tuning and tuning.why_not(library, self.ranks_per_node)
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
        """Names of the constants of :class:`Calibration` still to be measured; empty if none is."""
        if not self.uncalibrated:
            return ()
        far = ("far_alpha", "far_beta") if len(self.groups) > 1 else ()
        return "alpha", "beta", "gamma", *far

    # -- the table ------------------------------------------------------------------------------

    def entry(self, call: Call, memory: str) -> tuple[TuningEntry | None, str]:
        """Return (the tuning table's entry for a call, ""), or (None, why there is none).

        Without a table the reason is "".
        """
        if self.table is None:
            return None, ""
        if self.unfit:
            return None, self.unfit
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

        It is the same on all ranks.  None if a time is unknown, or there are fewer than two rivals.
        With `linked` the links between nodes count most, and many ranks are scaled down.
        """
        model, found = self.model, []
        if model is None or len(rivals) < 2:
            return None
        for rival in rivals:
            times = [(self.modelled(call, one, linked), one.name) for one in rival.choices]
            known = [(seconds, by) for seconds, by in times if seconds is not None]
            if not known:
                return None
            seconds, by = min(known)
            if rival.meets is not None:
                seconds += model.seconds("barrier", rival.meets, 0, linked) or 0.0
            label = rival.name if by == rival.name else f"{rival.name} (as {by})"
            counts = seconds * AHEAD if rival.prior else seconds
            found.append((counts, seconds, label, rival.name))
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

    def modelled(self, call: Call, choice: Choice, few: bool = False) -> float | None:
        """Return an algorithm's time by the cost model, as `Model.seconds`; None if unknown."""
        if self.model is None or call.uneven_alltoall:
            return None
        return self.model.seconds(call.collective, choice, call.nbytes, few, call.in_place)

    def of_executor(self, call: Call, executor: str) -> float | None:
        """Return the measured time of an executor's own kernel or library call; None if unknown."""
        if self.calibration is None or call.uneven_alltoall:
            return None
        curve = self.calibration.kernel(executor, call.collective)
        return None if curve is None else curve.at(call.nbytes)

    @property
    def knows_links(self) -> bool:
        """Whether the links between nodes were measured separately."""
        return self.calibration is not None and self.calibration.far_alpha is not None

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
    text = ", ".join(f"{label} {format_time(seconds)}" for _, seconds, label, _ in found)
    if least > min(seconds for _, seconds, *_ in found):
        text += f"; the rules name {name}, and nothing is clearly faster"
    return name, text
