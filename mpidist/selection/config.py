"""The configuration of collectives: strategies, thresholds, numbers of ranks, and the deadline."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..arguments import whole
from ..errors import ConfigError, UnknownName
from ..foreign import read_json
from .strategy import ALLOWED, Strategy, strategy_for

LEVELS = ("local", "global")
# The algorithms of a level with strategy "auto", inside and between nodes, if the other is set.
OPEN = {
    "allreduce": ("direct", "ring"),
    "reduce": ("direct", "binomial"),
    "broadcast": ("direct", "binomial"),
}


ENVIRONMENT_PREFIX = "MPIDIST_"


def _remember_given(cls: type) -> type:
    """Make ``cls.__init__`` record which fields the user gave: only these steer ``auto``."""
    init = cls.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def remembering(self: Any, **values: Any) -> None:
        object.__setattr__(self, "given", frozenset(values))
        init(self, **values)

    cls.__init__ = remembering  # type: ignore[misc]
    return cls


@_remember_given
@dataclass(frozen=True, kw_only=True)
class CollectiveConfig:
    """The user's settings for collectives; immutable, and validated on construction.

    A field that was given, even with the value of its default, steers ``algorithm="auto"``; a
    default does not.  Strategies are written as in :class:`~mpidist.selection.strategy.Strategy`.

    Parameters
    ----------
    num_devices : int
        Ranks on each node.  If given, a communicator must have ``num_devices * (num_nodes or 1)``
        ranks.
    local_allreduce, local_reduce, local_broadcast : str
        Strategies of a single level, or inside the nodes if there are two levels.
    num_nodes : int or None
        Number of nodes; if given, collectives have two levels, and all `global_` strategies must
        be given.
    global_allreduce, global_reduce, global_broadcast : str or None
        Strategies between the nodes.
    tree_threshold_bytes : int
        Size in bytes below which a tree is preferred over a ring.
    tree_arity : int
        Arity, ≥ 2, of a tree whose strategy does not include one.
    timeout : float or None
        Deadline of every wait in seconds; None waits forever.

    Attributes
    ----------
    given : frozenset of str
        The fields that the user set.

    Raises
    ------
    ConfigError
        If a value is not allowed or the fields contradict each other.

    Notes
    -----
    Fields, defaults and ``select_allreduce`` are those of ``CollectiveConfig`` in the Rust crate
    pmetal-distributed, where the timeout and the global strategies were accepted but never used.
    What it names centralized and direct is ``"linear"``, as everywhere in mpidist.
    """

    num_devices: int = 1
    local_allreduce: str = Strategy("auto")
    local_reduce: str = Strategy("auto")
    local_broadcast: str = Strategy("auto")
    num_nodes: int | None = None
    global_allreduce: str | None = None
    global_reduce: str | None = None
    global_broadcast: str | None = None
    tree_threshold_bytes: int = 1 << 20
    tree_arity: int = 2
    timeout: float | None = 60.0
    given: frozenset[str] = field(init=False, repr=False, default=frozenset())

    def __post_init__(self) -> None:
        for level in LEVELS:
            for collective in ALLOWED:
                name = f"{level}_{collective}"
                text = getattr(self, name)
                if text is not None or level == "local":
                    object.__setattr__(self, name, strategy_for(collective, text, name))
        self.validate()

    @classmethod
    def single_node(cls, num_devices: int) -> CollectiveConfig:
        """Return a configuration of `num_devices` ranks on one node, with allreduce by a ring."""
        return cls(num_devices=num_devices, local_allreduce="ring")

    @classmethod
    def multi_node(cls, num_devices: int, num_nodes: int) -> CollectiveConfig:
        """Return a configuration of `num_devices` ranks on each of `num_nodes` nodes.

        Allreduce is by binary trees inside the nodes and a ring between them; reduce and broadcast
        are by binary trees between the nodes.
        """
        return cls(
            num_devices=num_devices,
            num_nodes=num_nodes,
            local_allreduce="tree:2",
            global_allreduce="ring",
            global_reduce="tree:2",
            global_broadcast="tree:2",
        )

    def validate(self) -> None:
        """Raise ConfigError if a value is not allowed; called on construction."""
        whole("num_devices", self.num_devices, error=ConfigError)
        whole("tree_threshold_bytes", self.tree_threshold_bytes, 0, error=ConfigError)
        whole("tree_arity", self.tree_arity, 2, error=ConfigError)
        if self.num_nodes is not None:
            whole("num_nodes", self.num_nodes, error=ConfigError)
            missing = [n for c in ALLOWED if getattr(self, n := f"global_{c}") is None]
            if missing:
                names = ", ".join(missing)
                raise ConfigError(
                    f"num_nodes={self.num_nodes} needs all global strategies; missing: {names}"
                )
        wait = self.timeout
        number = isinstance(wait, (int, float)) and not isinstance(wait, bool)
        if wait is not None and not (number and wait > 0):
            raise ConfigError(f"timeout={wait!r}: expected seconds > 0, or None to wait forever")

    def replace(self, **changes: Any) -> CollectiveConfig:
        """Return a copy with `changes`, which count as set by the user."""
        _check_known(changes)
        return CollectiveConfig(**{**{n: getattr(self, n) for n in self.given}, **changes})

    def check_size(self, size: int, rank: int | None = None) -> None:
        """Raise ConfigError unless `num_devices` and `num_nodes` fit `size` ranks."""
        nodes = self.num_nodes or 1
        who = "" if rank is None else f"rank {rank}: "
        counts = f"num_devices={self.num_devices}, num_nodes={self.num_nodes}"
        if "num_devices" in self.given and self.num_devices * nodes != size:
            needed = self.num_devices * nodes
            raise ConfigError(f"{who}{counts} needs {needed} ranks, the communicator has {size}")
        if size % nodes:
            raise ConfigError(f"{who}{counts}: {size} ranks are not divisible by {nodes} nodes")

    def groups(self, natural: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each node according to the configuration.

        Parameters
        ----------
        natural : tuple of tuple of int
            The ranks of each real node (``Topology.groups``).

        Returns
        -------
        tuple of tuple of int
            `natural` if `num_nodes` is not set, or if there are that many nodes, all of one size;
            else every ``size / num_nodes`` consecutive ranks are a node.
        """
        size = sum(map(len, natural))
        self.check_size(size)
        each = size // (self.num_nodes or 1)
        fits = len(natural) == self.num_nodes and {*map(len, natural)} == {each}
        if fits or not self.two_level:
            return natural
        return tuple(tuple(range(first, first + each)) for first in range(0, size, each))

    @property
    def two_level(self) -> bool:
        """Whether collectives run on two levels, inside the nodes and between them."""
        return self.num_nodes is not None

    def select_allreduce(self, nbytes: int, size: int) -> Strategy:
        """Return the allreduce strategy for a number of bytes, by pmetal-distributed's rule.

        Parameters
        ----------
        nbytes : int
            Size of the whole buffer in bytes.
        size : int
            Number of ranks.

        Returns
        -------
        Strategy
            `local_allreduce` if that is not auto; else a tree of `tree_arity` for buffers below
            `tree_threshold_bytes` or fewer than 4 ranks, and a ring for the others.
        """
        if self.local_allreduce != "auto":
            return Strategy(self.local_allreduce)
        if nbytes < self.tree_threshold_bytes or size < 4:
            return Strategy.tree(self.tree_arity)
        return Strategy("ring")

    def steering(self, collective: str, nbytes: int, size: int) -> str | None:
        """Return the algorithm that the settings select for ranks taken as one flat group.

        Parameters
        ----------
        collective : str
            Name of any collective; only allreduce, reduce and broadcast can be configured.
        nbytes, size : int
            Bytes of the whole buffer, and number of ranks.

        Returns
        -------
        str or None
            ``"ring"``, ``"tree:k"`` or ``"linear"``; None if the settings leave the choice open.
            A strategy other than auto decides.  Otherwise, if a threshold or an arity is set,
            allreduce follows :meth:`select_allreduce`; if an arity is set, reduce and broadcast
            of fewer bytes than the threshold use a tree of `tree_arity`; else the result is None.
        """
        if collective not in ALLOWED:
            return None
        strategy = Strategy(getattr(self, f"local_{collective}"))
        if strategy != "auto":
            return strategy.algorithm(self.tree_arity)
        if collective == "allreduce":
            if self.given & {"tree_threshold_bytes", "tree_arity"}:
                return self.select_allreduce(nbytes, size).algorithm(self.tree_arity)
        elif "tree_arity" in self.given and nbytes < self.tree_threshold_bytes:
            return f"tree:{self.tree_arity}"
        return None

    def asked(self, collective: str, nbytes: int, size: int, commutes: bool = True) -> str | None:
        """Return the algorithm that the user's settings select, on one level or two; None if none.

        Parameters
        ----------
        collective, nbytes, size
            As for :meth:`steering`.
        commutes : bool
            Whether the operation is commutative.  If not, a single level is used, because the
            ranks of a node need not be consecutive.
        """
        if not self.given:  # defaults select nothing
            return None
        if self.two_level and collective in OPEN and commutes:
            return self.both_levels(collective, nbytes, size)
        return self.steering(collective, nbytes, size)

    def both_levels(self, collective: str, nbytes: int, size: int) -> str | None:
        """Return the two-level algorithm composed of the strategies of both levels.

        Parameters
        ----------
        collective : {"allreduce", "reduce", "broadcast"}
            Name of the collective.
        nbytes, size : int
            Bytes of the whole buffer, and number of ranks on all nodes.

        Returns
        -------
        str or None
            ``"hierarchical/LOCAL/GLOBAL"`` if the local strategy is a ring or auto, so that every
            local rank sends a slice between the nodes; ``"hierarchical_leaders/LOCAL/GLOBAL"`` if
            it is another one, so that one rank of each node does; None if both levels are auto.
            If only one is, a default of the collective replaces it.
        """
        nodes = self.num_nodes or 1
        local = self.level(collective, "local", nbytes, size // nodes)
        across = self.level(collective, "global", nbytes, nodes)
        if local == across == "auto":
            return None
        kind = "hierarchical" if local in ("auto", "ring") else "hierarchical_leaders"
        parts = (p if p != "auto" else o for p, o in zip((local, across), OPEN[collective]))
        return "/".join((kind, *parts))

    def at_level(self, which: str) -> CollectiveConfig:
        """Return a single-level configuration with the strategies inside or between the nodes.

        Parameters
        ----------
        which : {"local", "global"}
            The level; the result is for a sub-communicator of the ranks of that level.
        """
        if which not in LEVELS:
            raise ConfigError(f"level {which!r}: expected {' or '.join(LEVELS)}")
        kept = {n: getattr(self, n) for n in self.given if n.startswith(("tree", "timeout"))}
        for collective in ALLOWED:
            name = f"{which}_{collective}"
            if name in self.given and getattr(self, name) is not None:
                kept[f"local_{collective}"] = getattr(self, name)
        return CollectiveConfig(**kept)

    def level(self, collective: str, which: str, nbytes: int, size: int) -> str:
        """Return the algorithm for one of the two levels; ``"auto"`` if the user has not set it.

        Parameters
        ----------
        collective : str
            Name of the collective on that level.
        which : {"local", "global"}
            The level: inside the nodes or between them.
        nbytes, size : int
            Bytes of the whole buffer, and number of ranks on that level.
        """
        return self.at_level(which).steering(collective, nbytes, size) or "auto"

    def to_json(self) -> str:
        """Return the fields that were set, and only these, as a JSON object."""
        values = {n: getattr(self, n) for n in FIELDS if n in self.given}
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str) -> CollectiveConfig:
        """Return the configuration in `text` of :meth:`to_json`; ConfigError for other text."""
        values = read_json(text, "the configuration", dict[str, Any], ConfigError)
        _check_known(values)
        return cls(**values)

    @classmethod
    def from_environment(
        cls, environ: Mapping[str, str] = os.environ, base: CollectiveConfig | None = None
    ) -> CollectiveConfig:
        """Return the configuration of ``MPIDIST_NUM_DEVICES``, …: one variable per field.

        Parameters
        ----------
        environ : mapping
            The variables; an empty one counts as not set, ``none`` or ``forever`` means None.
        base : CollectiveConfig, optional
            The configuration that the variables override.
        """
        changes = {}
        for name in FIELDS:
            text = environ.get(ENVIRONMENT_PREFIX + name.upper(), "").strip()
            if text:
                changes[name] = _read(name, text)
        try:
            return (base or cls()).replace(**changes)
        except ConfigError as error:
            names = ", ".join(ENVIRONMENT_PREFIX + name.upper() for name in changes)
            raise ConfigError(f"{error} (from the environment: {names})") from None


def switch(variable: str, environ: Mapping[str, str] = os.environ) -> bool | None:
    """Return the setting of a variable that is 0 or 1, None if unset; ConfigError if neither."""
    text = environ.get(variable, "").strip()
    if text not in ("", "0", "1"):
        raise ConfigError(f"{variable}={text!r}: expected 0 or 1")
    return text == "1" if text else None


FIELDS = tuple(f.name for f in dataclasses.fields(CollectiveConfig) if f.init)
"""Names of the fields that a user can set."""


VARIABLES = (
    *(ENVIRONMENT_PREFIX + name.upper() for name in FIELDS),
    *(ENVIRONMENT_PREFIX + name for name in ("DEBUG", "TUNING", "CALIBRATE", "STREAM_BYTES")),
    *(ENVIRONMENT_PREFIX + name for name in ("RANKS_PER_NODE", "LOG", "LOG_RANKS")),
    *(ENVIRONMENT_PREFIX + name for name in ("TRACE", "FULL_TRACEBACK", "FLIGHT", "SPARES")),
    *(ENVIRONMENT_PREFIX + name for name in ("VAULTS", "RESTART")),
    *(ENVIRONMENT_PREFIX + name for name in ("GPU", "GPU_AWARE", "GPU_CHUNK_BYTES")),
    *(ENVIRONMENT_PREFIX + name for name in ("TERMINAL", "RUN_SECRET", "RUN_NOTES")),
    ENVIRONMENT_PREFIX + "TORCH_VARIABLES",
)
"""All environment variables that are read."""
_OF_TESTS = tuple(ENVIRONMENT_PREFIX + name for name in ("TEST_", "STRESS_", "MPICH_PYTHON"))


def misspelt(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return a warning for each variable ``MPIDIST_…`` in the environment that is not read."""
    found = []
    for name in sorted(environ):
        if not name.startswith(ENVIRONMENT_PREFIX) or name.startswith(_OF_TESTS):
            continue
        if name not in VARIABLES:
            near = difflib.get_close_matches(name.upper(), VARIABLES, n=1, cutoff=0.0)[0]
            found.append(f"{name}={environ[name]} has no effect: did you mean {near}?")
    return found


def _read(name: str, text: str) -> Any:
    """Return the value of the field `name`, given the text of its environment variable."""
    if text.lower() in ("none", "forever") and name != "tree_arity":
        return None
    if name not in ("num_devices", "num_nodes", "tree_threshold_bytes", "tree_arity", "timeout"):
        return text
    try:
        return float(text) if name == "timeout" else int(text)
    except ValueError:
        kind = "a number" if name == "timeout" else "a whole number"
        variable = ENVIRONMENT_PREFIX + name.upper()
        raise ConfigError(f"{variable}={text!r}: expected {kind}") from None


def _check_known(names: Any) -> None:
    for name in names:
        if name not in FIELDS:
            raise ConfigError(str(UnknownName("configuration field", name, FIELDS)))
