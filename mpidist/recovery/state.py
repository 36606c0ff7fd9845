"""The objects from which training continues after a loss, and how they get to who needs them."""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..communicator import layers
from ..communicator.communicator import Communicator
from ..errors import CommunicationError, InvalidArgument
from ..parallel.ddp import DDP
from . import records
from .copies import Copy, Own, objects_alone, read_copies, write_copy
from .guests import Guests
from .kept import (
    GENERATOR,
    MODEL,
    OWN,
    SMALL,
    Groups,
    Kept,
    buffers_of,
    is_plain,
    options_of,
    without_owner,
)
from .observer import Observer, Sending
from .pace import Pace
from .packing import (
    Packed,
    arrays_of,
    filled,
    from_bytes,
    is_part,
    lengths_of,
    packed,
    to_parts,
    unpacked,
)
from .residuals import Residuals, leaves_out
from .vault import SLOTS, Reader, Vault, no_room, room

log = logging.getLogger("mpidist")
T = TypeVar("T")
_HOOKS = "what hooks have left out"
_LOOKED_AT = 4096  # bytes up to which buffers are compared in each commit
_STATE = 78  # tag of the message with the state for a rank that takes a place
Small = bytes | tuple[dict[str, Any], dict[str, Any], dict[str, Groups]]
"""States, values and groups of optimizers at a commit, pickled unless nobody can change them."""


@dataclass
class Told:
    """What a rank tells the others at the begin of a generation."""

    names: list[tuple[str, str, bool]]
    asked: bool  # for copies
    copies: bool  # whether commits have copied: who is new does not know it
    generation: int  # the last one that all ranks have begun, -1 for none
    ranks: dict[int, int]  # this rank's number in that one, and in one that was begun in part
    step: int | None  # of the state that it has; None: it has none, or one restored by half
    touched: bool  # an optimizer has made a step since


@dataclass
class Membership:
    """The ranks of one generation, as far as their vaults can be read here."""

    generation: int
    size: int
    rank: int
    readers: dict[int, Reader]

    def close(self) -> None:
        """Close the files of the vaults."""
        for reader in self.readers.values():
            reader.close()


class State:
    """The objects from which training continues when the ranks change.

    Parameters
    ----------
    per_rank : iterable of str
        Names of objects that differ between the ranks: each rank's is kept, and a rank that takes
        the place of a lost one gets that one's.  Random number generators always are.
    copies : bool, optional
        Whether `commit` copies all objects into memory that outlives this process, a share of
        1 / ranks of those that the ranks have alike.  By default only where it is necessary: with
        objects in `per_rank`, a :class:`ZeroOptimizer` or :class:`Pipeline`, a :class:`DDP` whose
        communication hook leaves something out; and under ``mpidist run --max-restarts``, where
        without ``--spares`` and ``--survive`` not every step is copied, but so many that it takes
        about 2 % of the time.
    **objects
        Models, optimizers and whatever else has ``state_dict()`` and ``load_state_dict()``, arrays,
        and random number generators (see :class:`Checkpoint`), by name.  Those that hold a
        communicator are made inside of the function, and given to :meth:`keep`.

    Attributes
    ----------
    step : int
        Number of commits so far.
    generation : int
        How often the ranks have changed so far.
    lost : mapping of int to str
        The ranks lost in the last change, and how each ended: "on node3 was killed by signal 9
        (SIGKILL)".
    values : dict
        The values of the last commit.
    training : int
        Which call of a function of ``md.elastic`` in this program has the state, from 1 on.

    Raises
    ------
    InvalidArgument
        If an object cannot be restored, or a name in `per_rank` is none of an object.

    Notes
    -----
    Without `copies` an object that all ranks have alike is not copied: a rank that is left has it.
    So it may change only between the last call of the communicator in a step and `commit`, as
    weights do in ``optimizer.step()``; and random number generators, and buffers of a model, only
    before that call.  With `copies` there is no such rule, and `commit` takes the time of a copy.
    """

    def __init__(self, *, per_rank: Iterable[str] = (), copies: bool | None = None, **objects: Any):
        self._kept: dict[str, Kept] = {}
        self._residuals: list[Residuals] = []  # of DDPs, in the order in which they were made
        self._asked = copies
        self._folder = records.folder()  # of records for the next start of this job
        self.training = 0
        names = {per_rank} if isinstance(per_rank, str) else set(per_rank)
        if names - set(objects):
            raise InvalidArgument(
                f"per_rank={sorted(names)}: expected names of objects: {', '.join(objects)}"
            )
        if copies not in (None, True, False):
            raise InvalidArgument(f"copies={copies!r}: expected True, False or None")
        if copies is False and self._folder is not None:
            raise InvalidArgument(
                "copies=False: under mpidist run --max-restarts, training continues from copies: "
                "expected True or None"
            )
        for name, value in objects.items():
            self._kept[name] = self._checked(Kept.of(name, value, name in names))
        self._sort()
        self.step, self.generation = 0, 0
        self.lost: Mapping[int, str] = {}
        self.values: dict[str, Any] = {}
        self._comm: Communicator | None = None
        self._last: Membership | None = None
        self._next: Membership | None = None
        self._vault: Vault | None = None
        self._guests: Guests | None = None  # where there are several nodes, for the next start
        self._ranks: records.Ranks | None = None  # of this generation, where there is a folder
        self._known: tuple[bytes, Any] = b"", None  # what "auto" has measured; the mark of it
        self._valid, self._loaded = True, False  # in full; from another rank
        self._held: dict[str, Any] = {}  # states of the last commit, for `keep`
        # The same for records and other ranks, until `keep` or a commit: by name its kind, or OWN
        # with the parts of some ranks, and a state as it goes along.
        self._carried: dict[str, tuple[str, Any]] = {}
        self._parts: dict[str, dict[int, Any]] = {}
        self._small: Small = b""  # at the last commit
        self._options: dict[str, Any] = {}  # of optimizers, at the last commit before a loss
        self._modes: list[tuple[Any, bool]] = []  # of modules, when the function was first called
        self._begun = 0  # the step with which this generation began
        # What the hooks of DDPs had left out at the last commit, until these are made again.
        self._left_out: list[Packed] = []
        self._own, self._written = b"", b""  # as in the last record
        self._buffered = False  # whether that has buffers
        self._committed = b""  # `_own` at the last commit, unless that was copied
        self._sending: Sending = []  # at the last commit
        self._same = True  # whether there are as many ranks as before the last change
        self._seen: Observer | None = None  # of this generation, else of the one before
        self._size, self._told_once = 1, False
        self._pace: Pace | None = None  # of copies, if not every commit needs one
        self._check_room()  # before MPI starts

    def _checked(self, kept: Kept) -> Kept:
        if self._asked is False and kept.needs_copy:
            raise InvalidArgument(
                f"copies=False: {kept.name} is another one on each rank: expected True or None"
            )
        return kept

    def _check_room(self) -> None:
        """Raise MemoryError if the objects, as they are, do not fit into the folder of the job.

        What all ranks and earlier starts have written there is room for them: so a rank that asks
        later than others has the same answer.  What they have alike the ranks of a node hold
        together.
        """
        if self._folder is None:
            return
        here, length = 1 if self._comm is None else len(_here(self._comm)), 0
        here += 0 if self._guests is None else self._guests.on_this_node
        for kept in self._kinds[MODEL]:
            arrays = arrays_of({kept.name: packed(kept.state(), kept.name)})
            length += sum(map(len, arrays)) * (here if kept.needs_copy else 1)
        free = room(self._folder)
        if length * SLOTS > free + records.held(self._folder.iterdir()):
            raise no_room(length, 0, free, str(self._folder.parent))

    def _sort(self) -> None:
        """Know which objects are looked at in each commit; to be called when they have changed.

        What a commit touches was last touched a step ago, and comes from memory: the fewer objects
        and functions, the better.
        """
        for kept in self._kept.values():
            kept.look()
        kinds = GENERATOR, MODEL, SMALL
        self._kinds = {kind: [k for k in self._kept.values() if k.kind is kind] for kind in kinds}
        rated = [k for k in self._kinds[MODEL] if k.has_rates]
        self._groups = [(k.name, k.groups) for k in rated]
        alike = [k for k in self._kinds[SMALL] if not k.per_rank]
        self._fixed = not alike and all(k.rates_stay for k in rated)
        needs = any(kept.needs_copy for kept in self._kept.values())
        needs |= bool(self._residuals)
        self._copies = bool(self._asked) or self._folder is not None or needs

    @property
    def copies(self) -> bool:
        """Whether `commit` copies all objects."""
        if self._copies or self._left_out:
            return True
        return any(of == OWN for of, _ in self._carried.values())

    # -- inside of the function -------------------------------------------------------------------

    def keep(self, name: str, made: T, per_rank: bool = False) -> T:
        """Keep an object that was made inside of the function, and restore it if a commit has it.

        Parameters
        ----------
        name : str
            Its name, another one than those of the other objects.
        made : object
            The object, such as a shard, a ZeroOptimizer or a Pipeline.
        per_rank : bool
            Whether it differs between the ranks.

        Returns
        -------
        object
            `made`.
        """
        self._inside("keep")
        there = self._kept.get(name)
        if there is not None and not there.made_inside:
            raise InvalidArgument(f"keep({name!r}): State has an object of this name already")
        copied = self.copies
        kept = self._kept[name] = self._checked(Kept.of(name, made, per_rank))
        kept.made_inside = True
        self._sort()
        if name in self._held:
            kept.load(self._held.pop(name))
            self._carried.pop(name, None)
            kept.set_options(self._options.get(name, ()))
        assert self._seen is not None
        self._seen.watch(kept)
        if self.copies and not copied:
            self._begin_copies()
        return made

    def _keep_residuals(self, ddp: DDP) -> None:
        """Keep what the hook of a new DDP leaves out, and restore it if a commit has it."""
        if not leaves_out(ddp.reducer.hook):
            return
        comm = self._inside("keep")
        if ddp.comm.size < comm.size:  # the other ranks do not know that copies are needed
            if ddp.comm.rank == 0 and self.generation == 0:
                log.warning(
                    "what the hook of a DDP of some of the ranks has left out is lost with a rank, "
                    "but that of a Pipeline which State keeps"
                )
            return
        if self._asked is False:
            raise InvalidArgument(
                f"rank {comm.rank}: copies=False: hook={type(ddp.reducer.hook).__name__} leaves "
                "out something else on each rank: expected True or None"
            )
        copied = self.copies
        self._residuals.append(made := Residuals(ddp))
        self._sort()
        if self._left_out:
            made.load(unpacked([self._left_out.pop(0)], _HOOKS))
        if not copied:
            self._begin_copies()

    def _begin_copies(self) -> None:
        """Copy the last commit: a loss before the next one needs copies, too."""
        assert self._vault is not None and self._seen is not None
        # Before a call of this step what this rank alone has may have been written, as it will be
        # behind the step: no copy, and to the others the sign that it has completed the step.
        self._vault.drop(self.step + 1)
        own = Own(self._committed, buffers_of(self._kinds[MODEL], self._seen.forwarded))
        with self._vault.replacing(self.step):
            self._write_copy(self._vault, self.step, self._small, self._sending, own)

    def parts(self, name: str) -> dict[int, Any]:
        """Return the states of a `per_rank` object at the last commit before the ranks changed.

        Returns
        -------
        dict of int to object
            That of each rank, by its rank then, those of lost ranks too: arrays, or results of
            ``state_dict()``.  It is empty before the first change.
        """
        return dict(self._parts.get(name, {}))

    def commit(self, **values: Any) -> None:
        """Mark that this step is complete: after a loss, training continues behind it.

        It sends nothing, but where the step had no call of the communicator: then it is a barrier,
        so that no rank is two steps ahead of another.  Under ``mpidist run --max-restarts`` some
        commits are collective: those that agree how often to copy, and on several nodes those that
        copy, as a rank of the next node gets what this one alone has.

        Parameters
        ----------
        **values
            Plain values, such as ``epoch=3``, which are in `values` afterwards: numbers, strings,
            and what else can be pickled.  All ranks give equal ones, which is not checked: after a
            loss each of them has those of one rank.  What differs between ranks is an object in
            `per_rank`.

        Raises
        ------
        InvalidArgument
            If a value cannot be kept, or a random number generator was used since the last call of
            the communicator, so that nobody could know its state if this rank were lost; or between
            two backward passes of a step, whose gradients would be lost; or an optimizer changes
            parameters that no object has, or buffers of a model were changed after that call.
        """
        comm, seen = self._comm or self._inside("commit"), self._seen
        assert seen is not None
        if not seen.stepped and seen.unused_gradients():
            raise InvalidArgument(
                f"rank {comm.rank}: commit: gradients have been added up and not used, which a "
                "loss would drop: call commit() behind the step of the optimizer only"
            )
        if self.step == self._begun and (name := without_owner([*self._kept.values()])):
            raise InvalidArgument(
                f"rank {comm.rank}: commit: {name} has parameters that no object of State has, so "
                "a loss would leave them as they are: expected their model, too"
            )
        if not seen.called:
            comm.barrier()
        if self._size == 1:  # which has nobody to call
            self._before_call()
        try:
            small = self._take_small(values)
        except Exception as error:
            why = _why_not(values) or error
            raise InvalidArgument(f"rank {comm.rank}: commit: {why}") from error
        step = self.step + 1
        if self._carried:
            self._carried = {n: c for n, c in self._carried.items() if n not in self._kept}
        self._left_out = []  # of DDPs that are not made any more
        sending = seen.now_sending()
        if self._copies or (self._carried and self.copies):
            assert self._vault is not None
            write = partial(self._write_copy, self._vault, step, small, sending)
            if self._pace is None:
                write()
            else:
                if step == self._begun + 1:  # optimizers have their moments now
                    self._check_room()
                self._pace.commit(write)
        elif (self._own or self._kinds[GENERATOR]) and self._own_state() != self._own:
            raise InvalidArgument(
                f"rank {comm.rank}: commit: a random number generator was used after the last call "
                "of the communicator in this step: call commit() directly behind the step of the "
                "optimizer, or pass State(copies=True)"
            )
        elif self._buffered and (name := self._changed_buffers()):
            raise InvalidArgument(
                f"rank {comm.rank}: commit: buffers of {name} were changed after the last call of "
                "the communicator in this step, as by AveragedModel: pass State(copies=True)"
            )
        self._sending, self._committed = sending, self._own
        self._small, self.step, self.values = small, step, values
        seen.committed(sending)

    def _changed_buffers(self) -> str:
        """Return the name of a model whose buffers are not those written before the last call.

        Long ones are looked at now and then: they are compared by their bytes.
        """
        commits = self.step - self._begun
        if len(self._written) > _LOOKED_AT and commits & (commits - 1) and commits % 64:
            return ""
        assert self._seen is not None
        before, now = from_bytes(self._written).buffers, self._seen.own_buffers()
        for name in before.keys() & now.keys():
            if not all(a.tobytes() == b.tobytes() for a, b in zip(before[name], now[name])):
                return name
        return ""

    def _inside(self, what: str) -> Communicator:
        if self._comm is None:
            raise InvalidArgument(
                f"State.{what}: expected inside of the function that md.elastic decorates"
            )
        return self._comm

    # -- what is kept at a commit, and before the calls of a step ---------------------------------

    def _take_small(self, values: Mapping[str, Any]) -> Small:
        """Return what all ranks have alike and changes before a commit: positions."""
        # Only a loss or a copy needs the bytes, and of a group the rates: finding them takes longer
        # than all else of a commit.  A comprehension would be a further function.
        groups: dict[str, Groups] = {}
        for name, now in self._groups:
            copies: list[dict[str, Any]] = []
            groups[name] = copies
            for group in now():
                copies.append(group.copy())
        if self._fixed and not self._carried and (not values or is_plain(values.values())):
            return {}, dict(values), groups
        found = {k.name: k.state() for k in self._kinds[SMALL] if not k.per_rank}
        return _pickled((found | self._waiting(SMALL), dict(values), groups))

    def _waiting(self, kind: str) -> dict[str, Any]:
        """Return the states that no object has: after a loss, until it is made anew."""
        return {name: state for name, (of, state) in self._carried.items() if of == kind}

    def _own_state(self) -> bytes:
        """Return, as bytes, what this rank alone has: the states of random number generators."""
        if not self._kinds[GENERATOR] and not self._carried:
            return b""
        found = {k.name: k.state() for k in self._kinds[GENERATOR]}
        found |= self._waiting(GENERATOR)
        return pickle.dumps(found, 5) if found else b""

    def _before_call(self) -> None:
        """Write what this rank alone has, as it will be after this step, before a call sends.

        A rank that is left may complete the step of which a lost one has sent its part; then this
        is all that is known of it.
        """
        seen = self._seen
        assert seen is not None
        first, seen.called = not seen.called, True
        if seen.stepped and not (self._told_once or self.copies) and self._size > 1:
            self._told_once = True
            log.warning(
                "a call of the communicator comes between the step of an optimizer and commit(): "
                "if a rank is lost in it, that step is done twice; call commit() directly behind "
                "step(), or pass State(copies=True)"
            )
        if self.copies or self._vault is None:
            return
        own = Own(self._own_state(), seen.own_buffers())
        self._buffered = bool(own.buffers)
        if not own.generators and not own.buffers:
            return
        written = b"".join(to_parts(own))
        if first or written != self._written:
            self._own, self._written = own.generators, written
            self._vault.write(self.step + 1, [written])

    def _write_copy(
        self,
        vault: Vault,
        step: int,
        small: Small,
        sending: Sending,
        own: Own | None = None,  # by default as it is now
    ) -> None:
        """Write a record with this rank's share of what all ranks have alike."""
        comm = self._inside("commit")
        if own is None:
            own = Own(self._own_state(), buffers_of(self._kinds[MODEL]))
        parts = {
            k.name: [packed(k.state(), k.name)]
            for k in self._kept.values()
            if k.kind is not GENERATOR and (k.per_rank or k.divided)
        }
        parts |= self._waiting(OWN)
        states = [each.state() for each in self._residuals]
        left_out = [packed(state, _HOOKS) for state in states if state is not None]
        left_out += self._left_out
        head = Copy(
            own.generators,
            own.buffers,
            _pickled(small),
            parts,
            left_out,
            sending,
            self._measured(comm),
            {},
        )
        # For the next start the ranks of each node have all shares, as other nodes may be lost.
        sharers = range(comm.size) if self._folder is None else _here(comm)
        share = sharers.index(comm.rank)
        written = write_copy(vault, step, head, self._shared(), share, len(sharers))
        if self._guests is not None:
            self._guests.exchange(step, written, len(head.parts))

    def _measured(self, comm: Communicator) -> bytes:
        """Return what "auto" has measured, for the next start of the job: for the same bits."""
        if self._folder is None:
            return b""
        shape, calibration, trials = layers.known(comm)
        mark = shape, calibration is None, len(trials)
        if mark != self._known[1]:
            self._known = pickle.dumps((shape, calibration, trials), 5), mark
        return self._known[0]

    def _shared(self) -> dict[str, Packed]:
        """Return the states of models and arrays that all ranks have alike."""
        alike = (k for k in self._kinds[MODEL] if not k.per_rank and not k.divided)
        return {k.name: packed(k.state(), k.name) for k in alike} | self._waiting(MODEL)

    # -- the begin of a generation ----------------------------------------------------------------

    def begin(self, comm: Communicator, lost: Mapping[int, str], measured: Any = None) -> bool:
        """Bring the state of the last commit to every rank of a new communicator; collective.

        `lost` are the ranks that were lost, `measured` what :func:`layers.known` returned of the
        communicator before, where there was one.  Return whether a state was there: after a loss it
        may be gone, with all ranks that had it.
        """
        told: list[Told] = layers.everyone(comm, self._tell())
        self._check_alike(comm, told)
        newest = max(t.generation for t in told)
        if self._next is not None and self._next.generation == newest:
            self._last, self._next = self._next, None
        known = self._last if self._last and self._last.generation == newest else None
        first = newest < 0
        if not first:
            self._restore(comm, told, known, newest, measured)
        elif self._folder is not None:
            newest = self._restart(comm, self._folder)
        # Objects of the generation before are as a failed step has left them.
        self._kept = {k.name: k for k in self._kept.values() if not k.made_inside}
        self._residuals = []
        self._sort()
        self._begun = self.step
        if first or not self._modes:
            modules = (getattr(k.value, "modules", list) for k in self._kinds[MODEL])
            self._modes = [
                (m, m.training) for of in modules for m in of() if hasattr(m, "training")
            ]
        for module, mode in self._modes:  # a loss may have come in a validation
            module.training = mode
        self.lost, self.generation = dict(lost), newest + 1
        if self._folder is None:
            vault = Vault()
        else:
            start = records.start()
            self._ranks = records.Ranks(self.training, start, self.generation, comm.size)
            vault = self._ranks.vault(self._folder, comm.rank)
            self._close_guests()  # they are of a communicator that was left
            if len(comm.topology.groups) > 1:
                keep = partial(self._ranks.vault, self._folder, by=comm.rank)
                self._guests = Guests(comm, keep)
            soon_free = records.held(records.before(self._folder, self._ranks))
            for each in self._vaults(vault):
                each.soon_free = soon_free
        small, self._vault = self._small or self._take_small(self.values), vault
        self._small, self._own = small, self._own_state()
        self._committed = self._own
        resumed = self.generation > 0
        self._seen = Observer(self._kept, self._sending, resumed, self._keep_residuals)
        self._comm, self._size, self._written = comm, comm.size, b""
        self._told_once |= comm.rank != 0
        begin = time.perf_counter()
        if self.copies:
            self._write_copy(vault, self.step, small, self._sending)
        else:
            vault.write(self.step, to_parts(Own(self._own, self._seen.own_buffers())))
        seconds = time.perf_counter() - begin
        if self._next is not None:
            self._next.close()
        self._next = Membership(newest + 1, comm.size, comm.rank, self._open(comm, vault))
        layers.everyone(comm, True)  # all have written: from here on this generation counts
        for each in self._vaults(vault):
            each.soon_free = 0
        if self._folder is not None and self._ranks is not None and comm.rank == _here(comm)[0]:
            records.remove_before(self._folder, self._ranks)
        if self._last is not None:
            self._last.close()
        self._last, self._next = self._next, None
        layers.before_calls(comm, self._before_call)
        # A rank that goes on after a loss is at the last commit, and so must all copies be.
        spaced = self._folder is not None and self._asked is None
        spaced = spaced and comm.backend.why_no_survivors() is not None
        self._pace = Pace(partial(layers.everyone, comm), seconds) if spaced else None
        return newest >= 0

    def _vaults(self, mine: Vault) -> list[Vault]:
        return [mine, *(() if self._guests is None else self._guests.vaults.values())]

    def _tell(self) -> Told:
        names = [(k.name, k.kind, k.per_rank) for k in self._kept.values() if not k.made_inside]
        begun = [m for m in (self._last, self._next) if m is not None]
        return Told(
            sorted(names),
            bool(self._asked),
            self.copies,
            -1 if self._last is None else self._last.generation,
            {m.generation: m.rank for m in begun},
            self.step if self._valid and (begun or self._loaded) else None,
            self._seen is not None and self._seen.stepped,
        )

    def _check_alike(self, comm: Communicator, told: Sequence[Told]) -> None:
        for rank, other in enumerate(told):
            if (other.names, other.asked) != (told[0].names, told[0].asked):
                raise InvalidArgument(
                    f"rank {comm.rank}: State has {other.names} on rank {rank}, {told[0].names} on "
                    "rank 0: expected the same objects on all ranks"
                )

    def _open(self, comm: Communicator, vault: Vault) -> dict[int, Reader]:
        """Open the vaults of the ranks of this node."""
        names = layers.everyone(comm, vault.names)
        others = {r: Reader.open(names[r], r) for r in _here(comm) if r != comm.rank}
        return {comm.rank: vault.reader(), **others}

    def _restore(
        self,
        comm: Communicator,
        told: Sequence[Told],
        known: Membership | None,
        newest: int,
        measured: Any,
    ) -> None:
        """Restore the state of the last commit on all ranks."""
        lengths = {} if known is None else {r: v.steps() for r, v in known.readers.items()}
        size = None if known is None else known.size
        offers = layers.everyone(comm, (lengths, size))
        before = next(size for _, size in offers if size is not None)
        self._same = before == comm.size
        first = None
        if any(t.copies for t in told):
            mine = known.rank if known is not None else comm.rank if self._same else None
            readers = {} if known is None else known.readers
            held = [lengths for lengths, _ in offers]
            first = self._restore_copies(comm, held, readers, before, mine)
            if self._folder is not None:
                guests = {} if self._guests is None else self._guests.vaults
                self._make_room(comm, {**readers, **{r: v.reader() for r, v in guests.items()}})
        if first is None:
            self._restore_in_place(comm, told, offers, known, newest)
        shared = layers.everyone(comm, measured)
        given = next((m for m in shared if m is not None), None)
        if given is not None:
            layers.take_over(comm, given)
        for kept in self._kept.values():
            kept.forget_gradients()

    def _restart(self, comm: Communicator, folder: Path) -> int:
        """Restore what an earlier start of this job has left, if it has; return its generation."""
        there = records.found(folder, self.training)
        offers = layers.everyone(comm, records.offered(there))
        chosen = records.newest(offers)
        for ranks in sorted({ranks for offer in offers for ranks in offer}, reverse=True):
            if chosen is not None and ranks == chosen[0]:
                break
            names = layers.everyone(comm, objects_alone(there.get(ranks, {})))
            if comm.rank == 0:
                why = records.missing([offer.get(ranks, {}) for offer in offers], ranks.size)
                alone = ", ".join(next(filter(None, names), []))
                why += f"; each rank had another {alone}" * bool(alone)
                log.warning("no step of %s of which all ranks have left records: %s", ranks, why)
        if chosen is not None:
            ranks, before = chosen[0], chosen[0].size
            self._same = before == comm.size
            held = [offer.get(ranks, {}) for offer in offers]
            left = sorted(records.complete(held, before)[chosen[1]])
            places = range(before) if self._same else left
            mine = places[comm.rank] if comm.rank < len(places) else None
            first = self._restore_copies(comm, held, there.get(ranks, {}), before, mine)
            assert first is not None  # there are only copies in a folder
            layers.take_over(comm, pickle.loads(first.measured))
            for kept in self._kept.values():
                kept.forget_gradients()
            if comm.rank == 0:
                log.info("step %d goes on from the records of %s", self.step + 1, ranks)
        restored = None if chosen is None else chosen[0]
        others = [readers for ranks, readers in there.items() if ranks != restored]
        self._make_room(comm, {} if restored is None else there.get(restored, {}), *others)
        for readers in there.values():
            for reader in readers.values():
                reader.close()
        return -1 if chosen is None else chosen[0].generation

    def _make_room(
        self, comm: Communicator, restored: Mapping[int, Reader], *others: Mapping[int, Reader]
    ) -> None:
        """Empty the records in the folder, but those of the restored step in the `restored` ones.

        Else those of the next ranks would need as much again.
        """
        layers.everyone(comm, True)  # all have read theirs
        for reader in restored.values():
            reader.leave(self.step)
        for reader in (reader for readers in others for reader in readers.values()):
            reader.leave(None)

    def _restore_copies(
        self,
        comm: Communicator,
        offers: Sequence[records.Steps],
        readers: Mapping[int, Reader],
        before: int,
        mine: int | None,
    ) -> Copy | None:
        """Restore the newest step that is complete, as :func:`read_copies` finds it.

        `mine` is the number of this rank before.  Return the record of the first rank that has left
        one; None if a record is no copy.
        """
        found = read_copies(comm, offers, readers, before)
        if found is None:
            return None
        step, heads, shared = found
        self._valid, first = False, heads[min(heads)]
        self._held, self._carried, self._parts = {}, {}, {}
        for name in first.parts:
            own = [part for head in heads.values() for part in head.parts[name]]
            first_of, behind = (len(own) * r // comm.size for r in (comm.rank, comm.rank + 1))
            self._carried[name] = OWN, own[first_of:behind]
            if any(map(is_part, own)):
                self._give(name, unpacked(own, name))
                continue
            self._parts[name] = {r: unpacked([one], name) for r, one in enumerate(own)}
            if self._same and mine is not None and len(own) == comm.size:
                self._give(name, self._parts[name][mine])
        then = None if mine is None else heads.get(mine)
        self._left_out = [] if then is None else list(then.left_out)  # on fewer ranks, too
        generators = b"" if then is None else then.generators
        lost = sorted(set(range(before)) - set(heads)) if self._same else []
        if lost and first.generators and comm.rank == 0:
            who = ", ".join(map(str, lost))
            log.warning("the random numbers of ranks %s begin anew, as their node was lost", who)
        self._apply(shared, first.small, generators, first.sending)
        self._set_buffers((first if then is None else then).buffers)
        self.step, self._valid, self._loaded = step, True, True
        return first

    def _restore_in_place(
        self,
        comm: Communicator,
        told: Sequence[Told],
        offers: Sequence[tuple[dict[int, dict[int, int]], Any]],
        known: Membership | None,
        newest: int,
    ) -> None:
        """Restore the newest step that a rank has committed, from a rank that has."""
        have = {r: t.step for r, t in enumerate(told) if t.step is not None}
        if not have:
            raise CommunicationError(
                f"rank {comm.rank}: md.elastic: all ranks with the last commit's state are lost"
            )
        step = max(have.values())
        there = [r for r, s in have.items() if s == step]
        clean = [r for r in there if not told[r].touched]
        source = min(clean or there)
        if not clean and comm.rank == source:
            log.warning(
                "a rank was lost between the step of an optimizer and commit(): step %d is done "
                "twice; call commit() directly behind step()",
                step + 1,
            )
        needs = [r for r in range(comm.size) if r not in (clean or there)]
        if comm.rank not in needs and self._seen is not None and self._seen.forwarded:
            for kept in self._kinds[MODEL]:
                kept.set_buffers(kept.buffers)
        # Each rank's own state: that of the rank whose place it has, from whoever can read it.
        new = [r for r in range(comm.size) if newest not in told[r].ranks]
        holders = {
            q: next((r for r, (held, _) in enumerate(offers) if step in held.get(q, ())), None)
            for q in (new if self._same else ())
        }
        given: dict[int, bytes] = {}
        if known is not None:
            held = [q for q, holder in holders.items() if holder == comm.rank]
            given = {q: known.readers[q].read(step) for q in held}
        about = None
        if comm.rank == source:
            shared = self._shared()
            about = (
                lengths_of(shared),
                _pickled(self._small or self._take_small(self.values)),
                self._sending,
                {k.name for k in self._kept.values() if k.made_inside} | set(self._carried),
                buffers_of(self._kinds[MODEL]),  # those, too, that state_dict() leaves out
            )
        answers = layers.everyone(comm, (given, about))
        received = {q: data for held, _ in answers for q, data in held.items()}
        about, small, sending, inside, alike = answers[source][1]
        states: dict[str, Packed] = {}
        everywhere = any(name in inside for name in about) or len(needs) > 2
        if needs or everywhere:
            count = sum(n for _, arrays in about.values() for n, *_ in arrays.values())
            takes = everywhere or comm.rank in (source, *needs)
            flat = np.empty(count if takes else 0, np.uint8)
            if comm.rank == source:
                parts = arrays_of(shared)
                if parts:
                    np.concatenate(parts, out=flat)
            if count and everywhere:
                comm.broadcast(flat, out=flat, root=source, algorithm="binomial")
            elif count and comm.rank == source:  # a spare or two: the others need not wait
                for rank in needs:
                    comm.send(flat, rank, _STATE)
            elif count and takes:
                comm.recv(flat, source, _STATE)
            states = filled(about, flat) if takes else {}
            if comm.rank not in needs:
                states = {name: state for name, state in states.items() if name in inside}
        record = b""
        if comm.rank in received:
            record = received[comm.rank]
        elif known is not None and step in known.readers[known.rank].steps():
            record = known.readers[known.rank].read(step)
        elif self._same and self._kinds[GENERATOR]:
            raise CommunicationError(
                f"rank {comm.rank}: md.elastic: the state at step {step} that rank {comm.rank} "
                "alone had is lost with its node, or it was more than a step behind"
            )
        own = from_bytes(record) if record else Own(b"", {})  # a Copy is one, too
        self._valid = comm.rank not in needs
        self._held, self._carried, self._left_out = {}, {}, []
        self._apply(states, small, own.generators, sending)
        if comm.rank in needs:
            self._set_buffers({**alike, **own.buffers} if self._same else alike)
        self.step, self._valid, self._loaded = step, True, True

    def _set_buffers(self, buffers: Mapping[str, list[Any]]) -> None:
        for name in buffers.keys() & self._kept.keys():
            self._kept[name].set_buffers(buffers[name])

    def _apply(
        self,
        shared: dict[str, Packed],
        small: bytes,
        generators: bytes,
        sending: list[dict[str, Any] | None],
    ) -> None:
        """Restore states in the objects that are there; those of the others wait for `keep`."""
        found, self.values, self._options = pickle.loads(small)
        self._small, self._sending = small, sending
        own = pickle.loads(generators) if generators else {}
        for name, one in shared.items():
            self._give(name, unpacked([one], name), MODEL, one)
        for name, state in found.items():
            self._give(name, state, SMALL, state)
        for name, state in own.items():
            self._give(name, state, GENERATOR, state)
        for name in self._options.keys() & self._kept.keys():
            self._kept[name].set_options(self._options[name])

    def _give(self, name: str, state: Any, kind: str = OWN, carried: Any = None) -> None:
        """Restore the state of an object that is there; that of another one waits for `keep`."""
        kept = self._kept.get(name)
        if kept is None or kept.made_inside:
            self._held[name] = state
            if kind is not OWN:
                self._carried[name] = kind, carried
        else:
            kept.load(state)

    def forget_steps(self) -> None:
        """Forget that optimizers have made steps since the last commit: of other trainings."""
        assert self._seen is not None
        self._seen.stepped = False

    # -- the end of a generation ------------------------------------------------------------------

    def leave(self) -> list[DDP]:
        """End the generation, without communication; return its DDPs."""
        self._comm = None
        return [] if self._seen is None else self._seen.leave()

    def end(self) -> None:
        """Give back all memory, at the end of training."""
        self.leave()
        for membership in filter(None, (self._last, self._next)):
            membership.close()
        self._last = self._next = None
        if self._vault is not None:
            self._vault.close()
            self._vault = None
        self._close_guests()

    def _close_guests(self) -> None:
        if self._guests is not None:
            self._guests.close()
            self._guests = None


def _pickled(small: Small) -> bytes:
    if isinstance(small, bytes):
        return small
    found, values, groups = small
    rates = {name: options_of(of) for name, of in groups.items()}
    return pickle.dumps((found, values, rates), 5)


def _why_not(values: Mapping[str, Any]) -> str:
    """Return which of the values cannot be pickled, and why; "" if all can."""
    for name, value in values.items():
        try:
            pickle.dumps(value, 5)
        except Exception as error:
            return (
                f"{name} has type {type(value).__name__}, which cannot be kept: {error}: expected "
                "a number, a string, or another value that can be pickled"
            )
    return ""


def _here(comm: Communicator) -> Sequence[int]:
    """Return the ranks of this node."""
    return next(group for group in comm.topology.groups if comm.rank in group)
