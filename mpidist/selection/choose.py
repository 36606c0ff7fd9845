"""The choice of executor and algorithm, by the call, the configuration, tuning and rules."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ..backends.executor import MESSAGES, Executor
from ..calls.call import Call
from ..errors import UnknownName, Unsupported
from ..measure import format_size
from ..operations import ANY as ANY_GROUPING
from ..operations import AT_ONCE, TREE
from ..schedule.registry import GENERATION, Choice, Groups, algorithms, find, reserve, reserved
from .config import CollectiveConfig
from .estimates import (
    CROWDED,
    TABLE,
    TRIED,
    TRIED_FROM,
    TRIED_TO,
    Estimates,
    Rival,
)
from .names import IPC_SLOTS, MPI, NATIVE, NCCL, SINGLE_COPY, SYMMETRIC
from .rules import ANY, ON_DEVICE, RULES, Place, Rule
from .tuning import AUTO, MEMORIES, PRIVATE, kind_for


@dataclass(frozen=True)
class Candidate:
    """One candidate to serve a call: an executor, with the algorithm that it runs.

    Attributes
    ----------
    name : str
        Name of an executor such as ``"native"``, or of an algorithm with its parameter.
    choice : Choice or None
        The algorithm, over messages or in shared memory; None for an executor by its own name.
    why : str
        Why it was chosen, or cannot serve the call; in the answer of ``explain`` else how it works.
    can : bool
        Whether the candidate can serve the call.
    seconds : float or None
        Expected time in seconds; only in the answer of ``explain``, None if unknown.
    basis : str
        Source of the expected time (tuning table or cost model), or why there is none.
    missing : tuple of str
        Names of the calibration's parts that are still to be measured and could change this
        choice; empty if none could.
    untried : tuple of str
        Names of the candidates that the first such call will try out, and may choose among.
    tried : bool
        Whether it was chosen because the first such call has tried out several.
    executor : str
        Name of the executor that serves the call; only in the answer of ``explain``.
    """

    name: str
    choice: Choice | None
    why: str
    can: bool = True
    seconds: float | None = None
    basis: str = ""
    missing: tuple[str, ...] = ()
    untried: tuple[str, ...] = ()
    tried: bool = False
    executor: str = ""


_ASKED = "the call asks for it"
PUBLISHED = "published"  # the schedules of single copies


class Reasons(Mapping[str, "str | None"]):
    """Each executor's reason not to serve a call, None if it can; computed when looked up."""

    def __init__(
        self, executors: Mapping[str, Executor], call: Call, algorithm: str, background: bool
    ):
        self._executors, self._asked = executors, (call, algorithm, background)

    def __getitem__(self, name: str) -> str | None:
        return self._executors[name].why_not(*self._asked)

    def __contains__(self, name: object) -> bool:
        return name in self._executors

    def __iter__(self) -> Iterator[str]:
        return iter(self._executors)

    def __len__(self) -> int:
        return len(self._executors)


def _no_executor(choice: Choice) -> str:
    memory = choice.algorithm.memory
    assert memory is not None
    return f"it needs {memory.name} memory, in which no executor runs schedules"


@dataclass(frozen=True)
class Means:
    """The executors' reasons not to serve one call, and the facts that rules depend on."""

    groups: Groups
    # For every executor but messages, in the order of `explain`: None if it can serve the call.
    reasons: Mapping[str, str | None]
    crowded: bool = False  # as of a Place
    how: Callable[[str], str] = "the executor {}".format  # how an executor works, by its name
    # Why no executor can run a schedule in shared memory for the call; None if one can.
    cannot_run: Callable[[Choice], str | None] = _no_executor
    # For "auto": why ranks may not all know that one can run a schedule; None if they do.
    unknown: Callable[[Choice], str | None] = lambda choice: None
    # The schedules of which an executor runs one for the call by its own name.
    schedules: Callable[[str], Sequence[Choice]] = lambda name: ()
    # The executors to try beside one in symmetric memory, by its name.
    rivals: Callable[[str], Sequence[str]] = lambda name: ()
    # An executor of GPU arrays: if it has a rule for the collective, no other may take its place.
    required: str = ""


class Measures(Protocol):
    """What a communicator measures for its choices."""

    def calibrate(self, operation: str) -> object:
        """Measure the constants of the cost model, for the call of that text."""

    def try_out(self, call: Call, names: Sequence[str]) -> object:
        """Measure the time of a call in several ways."""


class _Listed:
    """The executors of one kind of arrays, by what the Chooser asks for."""

    def __init__(self, executors: Sequence[Executor]):
        self.by_name = {e.name: e for e in executors if e.name != "messages"}
        self.runners: dict[str, list[Executor]] = {}  # of schedules, by memory
        for executor in executors:
            if executor.memory is not None:
                self.runners.setdefault(executor.memory, []).append(executor)
        usual = Executor.depends_on
        self.depend = [e.depends_on for e in executors if type(e).depends_on is not usual]


class Chooser:
    """Chooses how to serve the calls of a communicator, once for all similar calls.

    The executors are in the order of ``explain``, the groups as the configuration has them.
    """

    def __init__(
        self,
        executors: Sequence[Executor],
        config: CollectiveConfig,
        groups: Groups,
        crowded: bool,
    ):
        self.config, self.groups = config, groups
        self._crowded = crowded
        self.relist(executors, {}, False)
        self.estimates: Estimates | None = None
        self._chosen: dict[Hashable, Candidate] = {}

    def forget(self) -> None:
        """Drop all cached choices, after a change of the executors, algorithms or constants."""
        self._chosen.clear()

    def relist(
        self,
        executors: Sequence[Executor],
        required: Mapping[tuple[str, bool], str],
        takes_turns: bool,
    ) -> None:
        """Replace the executors, once there are some of arrays on a GPU.

        ``required[algorithm, background]`` is `Means.required` of such calls on a GPU;
        `takes_turns` is whether ranks take turns on one.
        """
        self._on_host = _Listed([e for e in executors if not e.on_device])
        self._on_device = _Listed([e for e in executors if e.on_device])
        reserve(self._on_host.by_name)
        reserve(self._on_device.by_name, on_host=False)
        self._required, self._takes_turns = required, takes_turns

    def executor(self, candidate: Candidate, call: Call, background: bool = False) -> Executor:
        """Return the executor of a candidate; of those that run its schedule the first that can."""
        listed, choice = self._on_device if call.on_device else self._on_host, candidate.choice
        if choice is None:
            return listed.by_name[candidate.name]
        memory = choice.algorithm.memory
        *others, last = listed.runners[MESSAGES if memory is None else memory.name]
        for executor in others:
            if executor.why_not(call, choice, background) is None:
                return executor
        return last

    def choose(
        self,
        call: Call,
        algorithm: str,
        background: bool = False,
        measures: Measures | None = None,
    ) -> Candidate:
        """Return the candidate for a call, from the cache or by :func:`choose`.

        It is equal on all ranks, because it depends only on facts that they share.
        With `measures`, what the choice needs to know is measured first; collective.
        """
        if not isinstance(algorithm, str):
            known = [a.name for a in algorithms(call.collective)]
            raise UnknownName(f"{call.collective} algorithm", algorithm, [*known, *reserved()])
        listed = self._on_device if call.on_device else self._on_host
        asked = None if call.on_device else listed.by_name.get(algorithm)
        if asked is not None and asked.why_not(call, algorithm, background) is None:
            return Candidate(algorithm, None, _ASKED)
        op = call.op
        key: tuple[Hashable, ...] = (
            call.collective,
            algorithm,
            call.nbytes,
            call.dtype.itemsize,  # a library's limit is one of elements
            call.even,
            op is None or op.commute,
            GENERATION[0],
            kind_for(call),
            op is None or op.builtin,
            ANY_GROUPING if op is None else op.grouping,
            background,
            call.on_device,
        )
        for depends_on in listed.depend:
            key += (depends_on(call),)
        candidate = self._chosen.get(key)
        if candidate is None:
            candidates = Candidates(call, self.means(call, algorithm, background))
            candidate = choose(candidates, algorithm, self.config, self.estimates)
            if candidate.missing and measures is not None:
                measures.calibrate(call.signature)  # drops all choices made without the constants
                candidate = choose(candidates, algorithm, self.config, self.estimates)
            if candidate.untried and measures is not None:
                measures.try_out(call, candidate.untried)
                candidates = Candidates(call, self.means(call, algorithm, background))
                candidate = choose(candidates, algorithm, self.config, self.estimates)
            if len(self._chosen) > 4096:
                self._chosen.clear()
            in_memory = candidate.choice is not None and candidate.choice.algorithm.memory
            if algorithm != AUTO and in_memory:  # by name, others may not be in that memory
                return candidate
            if background or not candidate.untried:  # else the call that follows may try
                self._chosen[key] = candidate
        return candidate

    def means(self, call: Call, algorithm: str = "auto", background: bool = False) -> Means:
        """Return the executors' reasons not to serve a call, and the facts that rules depend on."""
        listed = self._on_device if call.on_device else self._on_host
        reasons = Reasons(listed.by_name, call, algorithm, background)

        def cannot_run(choice: Choice) -> str | None:
            memory = choice.algorithm.memory
            runners = None if memory is None else listed.runners.get(memory.name)
            if runners is None:
                return "its arrays are on a GPU" if call.on_device else _no_executor(choice)
            return runners[0].why_not(call, choice, background)

        def unknown(choice: Choice) -> str | None:
            memory = choice.algorithm.memory
            if algorithm != AUTO or memory is None:
                return None
            return listed.runners[memory.name][0].unknown(call, choice, background)

        def schedules(name: str) -> Sequence[Choice]:
            executor = listed.by_name.get(name)
            return () if executor is None else executor.schedules(call.collective)

        def rivals(name: str) -> Sequence[str]:
            return listed.by_name[name].rivals(call)

        def how(name: str) -> str:
            return listed.by_name[name].described()

        required = self._required.get((algorithm, background), "") if call.on_device else ""
        crowded = self._takes_turns if call.on_device else self._crowded
        facts = self.groups, reasons, crowded
        return Means(*facts, how, cannot_run, unknown, schedules, rivals, required)


class Candidates:
    """All candidates of one call, by name; each is looked up and checked once, when needed."""

    def __init__(self, call: Call, means: Means):
        self.call, self.means, self.nbytes = call, means, call.nbytes
        self._reasons: dict[str, str | None] = {}
        self._choices: dict[str, Choice] = {}

    def why_not(self, name: str) -> str | None:
        """Return why a candidate cannot serve the call, or None; UnknownName if there is none."""
        known = self._reasons
        if name in known:
            return known[name]
        if name in self.means.reasons:
            reason = self.means.reasons[name]
        else:
            choice = self._choices[name] = find(self.call.collective, name)
            reason = why_not(choice, self.call, self.means.groups)
            if reason is None and choice.algorithm.memory is not None:
                reason = self.means.cannot_run(choice) or self.means.unknown(choice)
        known[name] = reason
        return reason

    def can(self, name: str) -> bool:
        """Return whether the candidate `name` can serve the call."""
        return self.why_not(name) is None

    def algorithm(self, name: str) -> Choice | None:
        """Return the algorithm `name` if it can serve the call, else None."""
        return self._choices[name] if self.can(name) else None

    def taken(self, name: str, why: str) -> Candidate:
        """Return a candidate, with the reason for its choice; Unsupported if it cannot serve."""
        reason = self.why_not(name)
        if reason is not None:
            raise self.unsupported(name, reason)
        choice = self._choices.get(name)
        return Candidate(name if choice is None else choice.name, choice, why)

    def every(self) -> Iterator[Candidate]:
        """Yield every candidate for ``explain``, also those that cannot serve the call.

        Of the schedules in shared memory only those that can: most need another memory.
        """
        for name in self.means.reasons:
            reason = self.why_not(name)
            yield Candidate(name, None, reason or self.means.how(name), reason is None)
        every = algorithms(self.call.collective, one_sided=True)
        for algorithm in sorted(every, key=lambda one: one.memory is not None):
            reason = self.why_not(algorithm.name)
            if reason is not None and algorithm.memory is not None:
                continue
            choice = self._choices[algorithm.name]
            yield Candidate(algorithm.name, choice, reason or algorithm.summary, reason is None)

    def first(self, why: str) -> Candidate:
        """Return the first candidate that can serve the call, with the reason `why`."""
        for candidate in self.every():
            if candidate.can:
                return replace(candidate, why=why)
        raise self.unsupported("auto", "no registered algorithm can serve this call")

    def predicted(self, candidate: Candidate, estimates: Estimates, memory: str) -> Candidate:
        """Return a candidate with its measured or predicted time, if that is known."""
        call = self.call
        entry, _ = estimates.entry(call, memory)
        if not candidate.can:
            return candidate
        if entry is not None:
            names = (candidate.name, f"{candidate.name}:2")
            times = [entry.seconds(name, call.nbytes) for name in names]
            seconds = next((s for s in times if s is not None), None)
            if seconds is not None:
                return replace(candidate, seconds=seconds, basis=TABLE)
            least, most = min(entry.times), max(entry.times)
            if least <= call.nbytes <= most:
                return candidate
            sizes = f"{format_size(least)} to {format_size(most)}"
            return replace(candidate, basis=f"none, as the tuning table was measured for {sizes}")
        tried = memory == PRIVATE or self.means.rivals(SYMMETRIC)  # else in place, as the example
        seconds = estimates.tried(call, memory).get(candidate.name) if tried else None
        if seconds is not None and call.nbytes <= TRIED_TO:
            return replace(candidate, seconds=seconds, basis=TRIED)
        if self.means.crowded:
            return replace(candidate, basis=CROWDED)
        choice = candidate.choice
        choices = self.means.schedules(candidate.name) if choice is None else [choice]
        expected = estimates.expected(call, candidate.name, choices)
        if expected is None:
            return candidate
        return replace(candidate, seconds=expected[0], basis=expected[2])

    def unsupported(self, name: str, reason: str) -> Unsupported:
        """Return the error that `name` cannot serve the call; it lists the names that can."""
        able = ", ".join(candidate.name for candidate in self.every() if candidate.can)
        call = self.call
        return Unsupported(
            f"rank {call.rank}: {call.collective} {name!r}: {reason}; able to serve this call: "
            f"{able or 'nothing that is registered'}"
        )


def why_not(choice: Choice, call: Call, groups: Groups) -> str | None:
    """Return why an algorithm cannot serve a call, or None if it can."""
    algorithm = choice.algorithm
    reason = algorithm.unsupported(call.size, groups=groups)
    if reason is not None:
        return reason
    if call.op is not None and not call.op.commute and not algorithm.ordered:
        name = algorithm.name
        return f"op {call.op.name!r} is not commutative and {name} combines out of rank order"
    if call.op is not None and call.op.grouping == AT_ONCE and not algorithm.at_once:
        name = algorithm.name
        return f"op {call.op.label} needs all terms at once and {name} sends partial results"
    in_tree = algorithm.combines_as_tree(call.size, groups)
    if call.op is not None and call.op.grouping == TREE and not in_tree:
        return f"op {call.op.label}: {algorithm.name} groups {call.size} ranks otherwise"
    if algorithm.equal_blocks and not call.even:
        return f"{algorithm.name} needs equal counts"
    blocks = algorithm.block_count(call.size, groups) if algorithm.equal_blocks else 1
    if call.count % max(blocks, 1):
        return f"{algorithm.name} needs a number of elements that {blocks} divides"
    return None


def choose(
    candidates: Candidates,
    algorithm: str,
    config: CollectiveConfig,
    estimates: Estimates | None = None,
) -> Candidate:
    """Choose the candidate of a call.

    Precedence: the call's ``algorithm=``, a strategy or threshold that the user set, the tuning
    table, the cost model after a full calibration, what was tried out, the measured links and the
    cost model, shipped rules.  An explicit name is never replaced by another one.  For arrays on a
    GPU: the call's ``algorithm=``, MPIDIST_GPU, shipped rules.

    If `missing` of the result is not empty, the shipped rules decided because constants of the cost
    model are missing: calibrate, and choose again.

    Raises UnknownName, or Unsupported: then the message names those that can serve this call.
    """
    call = candidates.call
    if call.on_device and algorithm in (AUTO, NATIVE):
        return _for_device(candidates, algorithm)
    if algorithm != AUTO:
        return candidates.taken(algorithm, _ASKED)
    commutes = call.op is None or (call.op.commute and call.op.grouping == ANY_GROUPING)
    asked = config.asked(call.collective, candidates.nbytes, call.size, commutes)
    if asked is not None:
        return candidates.taken(asked, "the configuration asks for it")
    tuned, without = _tuned(candidates, estimates)
    if tuned is not None:
        return tuned
    candidate = _untuned(candidates, estimates)
    return replace(candidate, why=f"{candidate.why}; {without}") if without else candidate


def _for_device(candidates: Candidates, algorithm: str) -> Candidate:
    """Return the candidate of the first rule for arrays on a GPU that can serve the call.

    Strategies, tuning tables and the cost model are about host memory: they choose for the chunks
    of a staged call.  "native" is NCCL's collective or the MPI library's, on GPU addresses if it
    takes them.
    """
    call, means, reason = candidates.call, candidates.means, ""
    required, place = means.required, Place(call.size, len(means.groups), means.crowded, False)
    nbytes = ANY if call.uneven_alltoall else candidates.nbytes  # the ranks must choose alike
    rules: Iterable[Rule] = ON_DEVICE[call.collective]
    if algorithm == NATIVE:
        rules = (*(rule for rule in rules if rule.choose in (NCCL, MPI)), Rule(NATIVE))
    for rule in rules:
        if rule.choose != required and not rule.holds(nbytes, place):
            continue
        reason = candidates.why_not(rule.choose) or ""
        if not reason:
            return candidates.taken(rule.choose, f"shipped rule: {rule}")
        if rule.choose == required != IPC_SLOTS:  # the others serve what slots cannot
            break
    if required and algorithm == AUTO:
        raise Unsupported(f"rank {call.rank}: MPIDIST_GPU={required}: {call.collective}: {reason}")
    raise candidates.unsupported(algorithm, reason)


def _tuned(candidates: Candidates, estimates: Estimates | None) -> tuple[Candidate | None, str]:
    """Return (candidate, "") by the tuning table, or (None, why it does not decide).

    Without a table, the reason is "".
    """
    call = candidates.call
    if estimates is None or estimates.table is None:
        return None, ""
    in_symmetric = call.collective != "barrier" and candidates.can(SYMMETRIC)
    entry, without = estimates.entry(call, MEMORIES[in_symmetric])
    if entry is None:
        return None, without
    rule = entry.at(candidates.nbytes)
    table = f"tuning table {estimates.table.source}"
    if rule.choose == AUTO:
        return None, f"the {table} leaves it open"
    try:
        reason = candidates.why_not(rule.choose)
    except UnknownName:
        reason = "that is not registered"
    if reason is not None:
        return None, f"the {table} names {rule.choose}, but {reason}"
    return candidates.taken(rule.choose, f"{table}: {rule}"), ""


def _untuned(candidates: Candidates, estimates: Estimates | None) -> Candidate:
    """Return the candidate to use without a tuning table's entry.

    The measured links or the cost model decide, else the first shipped rule that holds, and whose
    executor or algorithm can serve the call.
    """
    call, means = candidates.call, candidates.means
    place = Place(call.size, len(means.groups), means.crowded, candidates.can(NATIVE))
    nbytes = ANY if call.uneven_alltoall else candidates.nbytes  # the ranks must choose alike
    holding = (rule for rule in RULES[call.collective] if rule.holds(nbytes, place))
    rule = next((rule for rule in holding if candidates.can(rule.choose)), None)
    ways = () if estimates is None or rule is None else _ways(candidates, estimates, rule, place)
    if estimates is not None and rule is not None and len(ways) > 1:
        memory = memory_of(ways)
        times = estimates.tried(call, memory)
        untried = tuple([name for name in ways if name not in times])
        if untried:
            named = candidates.taken(rule.choose, f"shipped rule: {rule}")
            return replace(named, untried=untried)
        able = {name: times[name] for name in ways}
        best = candidates.taken(*estimates.fastest_tried(call, able, rule.choose))
        return replace(best, tried=True)
    fastest, missing = (None, ()) if estimates is None else _predicted(candidates, estimates, rule)
    if fastest is None and rule is not None:
        fastest = candidates.taken(rule.choose, f"shipped rule: {rule}")
    none = "nothing that the shipped rules name can serve this call"
    candidate = fastest or candidates.first(none)
    return replace(candidate, missing=missing) if missing else candidate


def _ways(candidates: Candidates, estimates: Estimates, rule: Rule, place: Place) -> Sequence[str]:
    """Return the ways to serve a call of which the fastest is to be found by trying; else none.

    On one node with a core for each rank, where the MPI library is a rival, of private arrays of
    which the rules were measured elsewhere: what stands for a call of some bytes on one machine is
    half as fast as another on the next.

    Where the rules name something else for symmetric arrays, these are tried as private ones, alike
    on all ranks.
    """
    call = candidates.call
    if (
        not estimates.calibrates
        or estimates.decides(call)
        or candidates.nbytes < TRIED_FROM
        or place.nodes > 1
        or place.crowded
        or not place.native
        or call.uneven_alltoall
        or (call.op is not None and not call.op.builtin)
    ):
        return ()
    if rule.choose == SYMMETRIC:
        # Slots gain less the longer the arrays, and a trial takes the longer: in far cores an
        # allreduce of 4 MiB took 0.75 of the time in them, of 16 MiB 1.4; reduce_scatter 0.6, 2.2.
        rivals = candidates.means.rivals(SYMMETRIC) if call.nbytes <= TRIED_TO else ()
        return (SYMMETRIC, *filter(candidates.can, rivals))
    return _of_private_arrays(candidates, rule.choose)


def _of_private_arrays(candidates: Candidates, *first: str) -> list[str]:
    """Return the names `first`, and those of what serves private arrays without messages."""
    names = dict.fromkeys([*first, NATIVE, *candidates.means.reasons])
    ways = [name for name in names if name != SYMMETRIC and candidates.can(name)]
    # What only moves data has no single copies of its own, but is as fast by them.
    every = algorithms(candidates.call.collective, one_sided=True)
    known = any(one.name == PUBLISHED for one in every)
    if known and SINGLE_COPY not in ways and candidates.can(PUBLISHED):
        ways.append(PUBLISHED)
    return ways


def memory_of(ways: Iterable[str]) -> str:
    """Return the memory in which ways are tried out, one of MEMORIES."""
    return MEMORIES[SYMMETRIC in ways]


def _predicted(
    candidates: Candidates, estimates: Estimates, rule: Rule | None
) -> tuple[Candidate | None, tuple[str, ...]]:
    """Return the fastest candidate by the cost model, and the constants to be measured first.

    The candidate is None if the model does not decide; there are no constants if it would not with
    them either.  If the shipped rule that holds chooses shared memory, one level and two are not
    compared.
    """
    call, groups, missing = candidates.call, candidates.means.groups, estimates.missing
    if call.uneven_alltoall or (estimates.model is None and not missing):
        return None, ()
    shared = rule is not None and candidates.means.schedules(rule.choose)
    levels = [] if shared or groups != estimates.groups else _two_levels(candidates)
    full = not candidates.means.crowded and estimates.decides(call)
    if len(groups) > 1 or groups != estimates.groups:  # many ranks are scaled down
        full = full and groups == estimates.groups and not estimates.simulated
    linked = bool(levels) and estimates.knows_links and not full
    rivals = levels if linked else (_every if full else _one_level)(candidates, rule)
    fastest = estimates.cheapest(call, rivals, linked)
    if fastest is not None:
        return candidates.taken(*fastest), ()
    return None, missing if len(rivals) > 1 or levels else ()


def _two_levels(candidates: Candidates) -> list[Rival]:
    """Return the two-level algorithm of the rules and its rival on one level; none unless both are.

    The rival is the MPI library (``native``) if it can serve the call.  Its time is taken to be
    that of the best single-level algorithm, plus that of a barrier where the rules, which were
    measured over a slow link, choose two levels: a native call with a deadline first waits until
    all ranks have arrived.
    """
    call, means = candidates.call, candidates.means
    if len(means.groups) < 2:
        return []
    place = Place(call.size, len(means.groups), means.crowded)

    def fitting(rules: list[Rule], place: Place) -> list[Choice]:
        # The rules' algorithms that can serve the call, first those whose rule holds.
        ordered = sorted(rules, key=lambda rule: not rule.holds(call.nbytes, place))
        names = dict.fromkeys(rule.choose for rule in ordered)
        return [choice for name in names if (choice := candidates.algorithm(name)) is not None]

    across = [r for r in RULES[call.collective] if r.between_nodes and r.at(place)]
    two = fitting(across, place)[:1]
    flat = fitting(_by_messages(call.collective), replace(place, native=False))
    if not two or not flat:
        return []
    name = two[0].name
    prior = any(rule.choose == name and rule.holds(call.nbytes, place) for rule in across)
    if not candidates.can(NATIVE):
        return [Rival(name, two, prior), Rival(flat[0].name, flat[:1], not prior)]
    waits = prior and call.collective != "barrier"
    meets = find("barrier", _by_messages("barrier")[0].choose) if waits else None
    return [Rival(name, two, prior), Rival(NATIVE, flat, not prior, meets)]


def _every(candidates: Candidates, rule: Rule | None) -> list[Rival]:
    """Return what can serve the call; of it the model of a full calibration chooses.

    Of symmetric arrays ranks know of each other only that all have them: see `Executor.rivals`.
    """
    prior = [] if rule is None else [rule.choose]
    if candidates.can(SYMMETRIC):
        names = [*prior, SYMMETRIC, *candidates.means.rivals(SYMMETRIC)]
    else:
        several = len(candidates.means.groups) > 1
        every = algorithms(candidates.call.collective)
        known = [one.name for one in every if several or not one.local]
        levels = [rival.name for rival in _two_levels(candidates)]
        names = [*_of_private_arrays(candidates, *prior), *levels, *known]
    able = [name for name in dict.fromkeys(names) if candidates.can(name)]
    return [
        Rival(name, [] if one is None else [one], name in prior)
        for name in able
        for one in [None if name in candidates.means.reasons else candidates.algorithm(name)]
    ]


def _one_level(candidates: Candidates, rule: Rule | None) -> list[Rival]:
    """Return the executors in shared memory and the rules' algorithms that can serve the call.

    Of these the cost model chooses; none if native or symmetric memory can serve it.
    """
    call, means = candidates.call, candidates.means
    if candidates.can(NATIVE) or candidates.can(SYMMETRIC):
        return []
    rules = _by_messages(call.collective)
    if len(means.groups) > 1:
        rules += [rule for rule in RULES[call.collective] if rule.between_nodes]
    every = {name: [*means.schedules(name)] for name in means.reasons}
    named = {name: runs for name, runs in every.items() if runs and candidates.can(name)}
    for name in dict.fromkeys(rule.choose for rule in rules):
        choice = candidates.algorithm(name)
        if choice is not None:
            named[name] = [choice]
    prior = None if rule is None else rule.choose
    return [Rival(name, choices, name == prior) for name, choices in named.items()]


def _by_messages(collective: str) -> list[Rule]:
    """Return the rules without a library's collective, which choose algorithms on one level."""
    return [rule for rule in RULES[collective] if rule.native is False]
