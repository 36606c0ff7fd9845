"""Strategies: how a configuration says which family of algorithms it wants."""

from __future__ import annotations

from ..errors import ConfigError, UnknownName

KINDS = ("auto", "ring", "tree", "centralized", "direct")
ALLOWED = {
    "allreduce": ("auto", "ring", "tree", "centralized"),
    "reduce": ("auto", "tree", "centralized", "direct"),
    "broadcast": ("auto", "tree", "centralized", "direct"),
}
"""The strategies of each collective: no direct allreduce, no ring to or from a root."""


class Strategy(str):
    """A family of algorithms: auto, ring, tree, tree:4, centralized (or linear), direct.

    It is a string and compares equal to its name; ``"linear"`` becomes ``"centralized"``.  A tree
    without a number takes the configuration's ``tree_arity``.

    Parameters
    ----------
    text : str
        The name, in any case.

    Raises
    ------
    ConfigError
        For an unknown name (with the nearest ones), or an arity that is not a whole number ≥ 2.

    Examples
    --------
    >>> Strategy("tree:4").arity
    4
    >>> Strategy("linear")
    Strategy('centralized')
    """

    __slots__ = ()

    def __new__(cls, text: str) -> Strategy:  # noqa: D102  (see the class)
        if not isinstance(text, str):
            raise ConfigError(f"{text!r} is no strategy: allowed are {', '.join(KINDS)}, as a str")
        kind, colon, arity = text.strip().lower().partition(":")
        kind = "centralized" if kind == "linear" else kind
        if kind not in KINDS:
            raise ConfigError(str(UnknownName("strategy", text, [*KINDS, "linear"])))
        if not colon:
            return super().__new__(cls, kind)
        if kind != "tree":
            raise ConfigError(f"strategy {text!r}: {kind} has no arity; only tree has one")
        if not arity.isdigit() or int(arity) < 2:
            raise ConfigError(f"strategy {text!r}: the arity must be a whole number >= 2")
        return super().__new__(cls, f"{kind}:{int(arity)}")

    @classmethod
    def tree(cls, arity: int) -> Strategy:
        """Give the tree in which every rank has up to `arity` children."""
        return cls(f"tree:{arity}")

    @property
    def kind(self) -> str:
        """The name without the arity."""
        return self.partition(":")[0]

    @property
    def arity(self) -> int | None:
        """Children of a rank in the tree; None where the strategy does not say."""
        number = self.partition(":")[2]
        return int(number) if number else None

    def algorithm(self, tree_arity: int) -> str:
        """Give the algorithm that the strategy stands for.

        Parameters
        ----------
        tree_arity : int
            Arity of a tree that does not give its own.

        Returns
        -------
        str
            ``"auto"``, ``"ring"``, ``"tree:k"``, or ``"linear"`` for centralized and direct: over a
            star the root talks to everyone directly.
        """
        if self.kind == "tree":
            return f"tree:{self.arity or tree_arity}"
        return {"centralized": "linear", "direct": "linear"}.get(self.kind, str(self))

    def __repr__(self) -> str:
        return f"Strategy({str(self)!r})"


def strategy_for(collective: str, text: str, argument: str) -> Strategy:
    """Read the strategy `text` of `collective`, given as `argument`.

    Raises
    ------
    ConfigError
        That names the argument, if there is no such strategy or the collective does not have it.
    """
    try:
        strategy = Strategy(text)
    except ConfigError as error:
        raise ConfigError(f"{argument}: {error}") from None
    if strategy.kind not in ALLOWED[collective]:
        allowed = ", ".join(ALLOWED[collective])
        raise ConfigError(f"{argument}={text!r}: allowed for {collective} are {allowed}")
    return strategy
