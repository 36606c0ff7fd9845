"""Strategies: the algorithms that a configuration may name for a collective."""

from __future__ import annotations

from ..errors import ConfigError, UnknownName

KINDS = ("auto", "ring", "tree", "linear")
ALLOWED = {
    "allreduce": ("auto", "ring", "tree", "linear"),
    "reduce": ("auto", "tree", "linear"),
    "broadcast": ("auto", "tree", "linear"),
}
"""The strategies allowed for each collective: no ring with a root."""


class Strategy(str):
    """The name of an algorithm in a configuration: ring, tree, tree:4 or linear; or auto.

    It is a string and equal to its name.  A tree without a number has the configuration's
    ``tree_arity``.

    Parameters
    ----------
    text : str
        The name, in any case.

    Raises
    ------
    ConfigError
        For an unknown name (with the most similar ones), or an arity that is not a whole number
        ≥ 2.

    Examples
    --------
    >>> Strategy("tree:4").arity
    4
    >>> Strategy("Linear")
    Strategy('linear')
    """

    __slots__ = ()

    def __new__(cls, text: str) -> Strategy:
        if not isinstance(text, str):
            raise ConfigError(f"{text!r} is not a strategy: expected one of {', '.join(KINDS)}")
        kind, colon, arity = text.strip().lower().partition(":")
        if kind not in KINDS:
            raise ConfigError(str(UnknownName("strategy", text, KINDS)))
        if not colon:
            return super().__new__(cls, kind)
        if kind != "tree":
            raise ConfigError(f"strategy {text!r}: {kind} has no arity; only tree has one")
        if not arity.isdecimal() or int(arity) < 2:
            raise ConfigError(f"strategy {text!r}: arity {arity!r}: expected a whole number >= 2")
        return super().__new__(cls, f"{kind}:{int(arity)}")

    @classmethod
    def tree(cls, arity: int) -> Strategy:
        """Return the strategy of a tree in which every rank has up to `arity` children."""
        return cls(f"tree:{arity}")

    @property
    def kind(self) -> str:
        """The name without the arity."""
        return self.partition(":")[0]

    @property
    def arity(self) -> int | None:
        """The arity of the tree; None if the strategy does not include one."""
        number = self.partition(":")[2]
        return int(number) if number else None

    def algorithm(self, tree_arity: int) -> str:
        """Return the name of the algorithm for this strategy.

        Parameters
        ----------
        tree_arity : int
            Arity for a tree strategy that does not include one.

        Returns
        -------
        str
            ``"auto"``, ``"ring"``, ``"tree:k"`` or ``"linear"``.
        """
        if self.kind == "tree":
            return f"tree:{self.arity or tree_arity}"
        return str(self)

    def __repr__(self) -> str:
        return f"Strategy({str(self)!r})"


def strategy_for(collective: str, text: str, argument: str) -> Strategy:
    """Return the strategy that `text` names; a ConfigError names the configuration's field."""
    try:
        strategy = Strategy(text)
    except ConfigError as error:
        raise ConfigError(f"{argument}: {error}") from None
    if strategy.kind not in ALLOWED[collective]:
        allowed = ", ".join(ALLOWED[collective])
        raise ConfigError(f"{argument}={text!r}: expected for {collective} one of {allowed}")
    return strategy
