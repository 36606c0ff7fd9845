"""Many ranks at once: an array in place of a rank, with which a generator runs once for all.

A generator computes with its rank, and asks about it in ``if``, ``range`` or an index.  Arithmetic
is done on the whole array.  Where the answer to a question is not the same for all, they are split
by it, and the generator begins again for each part, since it cannot be copied half-way::

    rank + 1                   0 1 2 3 4  -->  1 2 3 4 5
    if rank % 2                0 1 2 3 4  -->  0 2 4  and  1 3
    range(rank)                0 1 2 3 4  -->  0  and  1  and  2  and  3  and  4

What an array cannot do (``rank.bit_length()``, a dict's key) is an error, never another result; the
generator then runs for every rank by itself.

Where all ranks do the same, turned by so many places, one number stands for all: a :class:`Turn`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import fields
from functools import lru_cache
from importlib import import_module
from operator import index as plain
from typing import TYPE_CHECKING, Any


class _Numpy:
    """Numpy, imported at its first use: a monitor of a rank, and what asks for help, has none."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(import_module("numpy"), name)
        setattr(self, name, found)  # an import is slow, also one of what is there already
        return found


if TYPE_CHECKING:
    import numpy as np
else:
    np = _Numpy()

_LARGE = 1 << 40
_LONG = 2048  # numbers: below, three operations of numpy take longer than one
_LONELY = 6  # splits in a row that set one element apart
_FEW = 200  # elements that are then done one by one


class Split(BaseException):
    """The answer to a question is not the same for all ranks: `parts` are their indices by answer.

    It is no Exception, so that no generator catches it by mistake.
    """

    def __init__(self, parts: Sequence[np.ndarray]):
        super().__init__()
        self.parts = parts


class Unfit(Exception):
    """A schedule without a fast proof; the Python machine proves it, or says what is wrong."""


class Ranks:
    """The numbers `values` that many ranks have where a generator has one number."""

    __slots__ = ("bound", "values")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, values: np.ndarray, bound: int | None = None):
        self.values = values
        self.bound = int(np.abs(values).max()) if bound is None else bound  # of their magnitude

    def __bool__(self) -> bool:
        """Return the truth of all values; raise Split if they differ."""
        true = self.values.astype(bool)
        if true.all():
            return True
        if not true.any():
            return False
        raise Split([np.flatnonzero(true), np.flatnonzero(~true)])

    def __index__(self) -> int:
        """Return the one value; raise Split if they differ."""
        raise Split(by_value(self.values))

    def __neg__(self) -> Ranks:
        return Ranks(-self.values, self.bound)


class Turn:
    """A number of each k of `count` ranks on a circle: of all ranks, one run of a generator.

    It is ``(base + offset + stride * k) % (stride * count) + plus``, where `base` and `plus` may be
    Ranks.  What is not the same for all k, after a turn, is an error: ``if rank == 3``.
    """

    __slots__ = ("base", "count", "offset", "plus", "stride")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, base: Any, offset: int, stride: int, count: int, plus: Any = 0):
        self.base, self.offset, self.stride, self.count = base, offset, stride, count
        self.plus = plus

    def __add__(self, other: Any) -> Turn:
        stride = self.stride
        if stride > 1 and type(self.base) is int and (self.base + self.offset) % stride == 0:
            # The first rank of a node and the number of one of its ranks are another rank.
            low, high = _ends(_whole(other))
            if low >= 0 and high < stride and type(self.plus) is int and self.plus == 0:
                return Turn(self.base + other, self.offset, stride, self.count)
        plus = self.plus + (other if type(other) is int else _whole(other))
        return Turn(self.base, self.offset, self.stride, self.count, plus)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        if type(other) is int:
            return Turn(self.base, self.offset, self.stride, self.count, self.plus - other)
        if type(other) is Turn:
            mine, others = self.base + self.offset, other.base + other.offset
            alike = (self.stride, self.count) == (other.stride, other.count)
            whole = type(mine) is int and type(others) is int and mine == others
            if alike and self.stride == 1 and self.plus == 0 and other.plus == 0 and not whole:
                return Apart(mine - others, self.count)
            # In one node, which comes to the end of the circle as a whole.
            if not alike or (mine // self.stride == others // self.stride) != 1:
                raise Unfit("two numbers that both depend on the rank")
            return mine - others + self.plus - other.plus
        return Turn(self.base, self.offset, self.stride, self.count, self.plus - _whole(other))

    def __mul__(self, other: int) -> Turn:
        n = plain(other)
        if n < 1:
            raise Unfit("a rank times a number below 1")
        return Turn(self.base * n, self.offset * n, self.stride * n, self.count, self.plus * n)

    __rmul__ = __mul__

    def __mod__(self, n: int) -> Any:
        stride, plus, circle = self.stride, self.plus, self.stride * self.count
        if n == circle:
            if type(plus) is int:
                return Turn(self.base, (self.offset + plus) % n, stride, self.count)
            return Turn(self.base + plus, self.offset, stride, self.count)
        if stride % n == 0:
            return (self.base + self.offset + plus) % n
        if 0 <= self < n:
            return self
        raise Unfit("a remainder that is not the same for all ranks")

    def __floordiv__(self, n: int) -> Any:
        if self.stride % n == 0 and self.plus == 0:
            return Turn((self.base + self.offset) // n, 0, self.stride // n, self.count)
        if 0 <= self < n:
            return 0
        raise Unfit("a quotient that is not the same for all ranks")

    def _compared(self, other: Any, holds: Callable[[int, int], bool]) -> bool:
        low = high = self.plus
        first = last = other
        if type(low) is not int or type(first) is not int:
            (low, high), (first, last) = _ends(low), _ends(_whole(other))
        answer = holds(low, last)
        if holds(high + self.stride * self.count - 1, first) != answer:
            raise Unfit("a question with another answer on each rank")
        return answer

    def __lt__(self, other: Any) -> bool:
        return self._compared(other, operator.lt)

    def __le__(self, other: Any) -> bool:
        return self._compared(other, operator.le)

    def __gt__(self, other: Any) -> bool:
        return self._compared(other, operator.gt)

    def __ge__(self, other: Any) -> bool:
        return self._compared(other, operator.ge)

    def __eq__(self, other: object) -> Any:
        if type(other) is not Turn:
            return self._compared(other, operator.ge) and self._compared(other, operator.le)
        if (self.stride, self.count, self.plus) != (other.stride, other.count, other.plus):
            raise Unfit("a question with another answer on each rank")
        apart = self.base + self.offset - other.base - other.offset
        return apart % (self.stride * self.count) == 0

    def __ne__(self, other: object) -> Any:
        return (self == other) == 0

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __index__(self) -> int:
        raise Unfit("a number that is not the same for all ranks")


def identity(number: Any) -> Hashable:
    """Return a key of a number: of whole turns the same for equal ones, else of this object."""
    if type(number) is Turn and type(number.base) is int and type(number.plus) is int:
        return number.base, number.offset, number.stride, number.count, number.plus
    return id(number)


class Apart:
    """The difference of two turns of `count` ranks, which all of them know modulo `count` only."""

    __slots__ = ("count", "value")

    def __init__(self, value: Any, count: int):
        self.value, self.count = value, count

    def __add__(self, other: Any) -> Apart:
        return Apart(self.value + _whole(other), self.count)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Apart:
        return Apart(self.value - _whole(other), self.count)

    def __mod__(self, n: int) -> Any:
        if n != self.count:
            raise Unfit("a difference that is not the same for all ranks")
        return self.value % n

    def __eq__(self, other: object) -> Any:
        raise Unfit("a difference that is not the same for all ranks")

    def __bool__(self) -> bool:
        raise Unfit("a difference that is not the same for all ranks")

    __hash__ = None  # type: ignore[assignment]


ONE = (int, Ranks, Turn)
"""What stands for one number in a schedule."""


def _whole(other: Any) -> Any:
    """Return a number that a Turn can be combined with; raise Unfit for another Turn."""
    if type(other) is int or type(other) is Ranks:
        return other
    if isinstance(other, Turn):
        raise Unfit("two numbers that both depend on the rank")
    return plain(other)


def _ends(number: Any) -> tuple[int, int]:
    """Return the least and the greatest of some numbers."""
    if type(number) is Ranks:
        return int(number.values.min()), int(number.values.max())
    return number, number


class Span(Sequence[Any]):
    """The numbers from `first` on, `length` of them; of many ranks each has its own first one."""

    __slots__ = ("first", "length")

    def __init__(self, first: Any, length: int):
        self.first, self.length = first, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple([self.first + i for i in range(self.length)[index]])
        if isinstance(index, int) and not -self.length <= index < self.length:
            raise IndexError(index)  # which ends an iteration
        if isinstance(index, Turn) and not 0 <= index < self.length:
            raise IndexError(index)
        return self.first + index


def by_value(values: np.ndarray) -> list[np.ndarray]:
    """Return the indices of each different value, in ascending order of the values."""
    order = np.argsort(values, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(values[order])) + 1)


def number(values: np.ndarray, bound: int | None = None) -> Any:
    """Return Ranks with these values, or a plain number if they are all the same."""
    first = values.item(0)
    alike = first == values.item(-1) == values.item(len(values) // 2)
    if alike and (values == first).all():
        return first
    return Ranks(values, bound)


def _operand(other: Any) -> tuple[Any, int] | None:
    """Return an operand for numpy and its bound; None for one that is no whole number."""
    if type(other) is Ranks:
        return other.values, other.bound
    if type(other) is int:
        return other, abs(other)
    return (other, abs(int(other))) if isinstance(other, (int, np.integer)) else None


_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_ARITHMETIC = ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift")


# Numbers of 64 bits wrap around where Python's grow, so every array carries a bound of its numbers.
# It is computed from the bounds of the operands: to look at all numbers would take too long.
_BOUNDS: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "sub": operator.add,
    "mul": operator.mul,
    "mod": lambda left, right: right,
    "floordiv": lambda left, right: left,
    "rshift": lambda left, right: left,
    "lshift": lambda left, right: left << min(right, 64),
    **dict.fromkeys(("and", "or", "xor"), lambda left, right: 1 << max(left, right).bit_length()),
    **dict.fromkeys(_COMPARISONS, lambda left, right: 1),
}


def _mod(left: Any, right: Any) -> Any:
    """Return ``left % right``; of a long array by one number in a third of numpy's own time."""
    if type(right) is not int or right < 1 or len(left) < _LONG:
        return left % right
    whole = left // right
    whole *= right
    return np.subtract(left, whole, out=whole)


def _operator(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    function = _mod if name == "mod" else getattr(operator, f"__{name}__")
    limit = _BOUNDS[name]
    compares, shifts = name in _COMPARISONS, name in ("lshift", "rshift")
    distinct = name in ("add", "sub", "xor")  # with one number different values stay different

    def of(left: Any, right: Any) -> Any:
        # The usual operands first: this is most of what a schedule does.
        if type(left) is Ranks and not shifts:
            kind = type(right)
            one, bound = right, _LARGE
            if kind is int:
                bound = limit(left.bound, abs(right))
            elif kind is Ranks:
                one, bound = right.values, limit(left.bound, right.bound)
            if bound < _LARGE:
                found = function(left.values, one)
                if compares:
                    return _answers(found)
                return Ranks(found, bound) if distinct and kind is int else number(found, bound)
        first, second = _operand(left), _operand(right)
        if first is None or second is None:
            return NotImplemented
        bound = limit(first[1], second[1])
        if bound >= _LARGE or (shifts and np.min(second[0]) < 0):
            raise OverflowError(f"{name} of numbers of 64 bits")
        found = function(first[0], second[0])
        return _answers(found) if compares else number(found, bound)

    if name in ("add", "mul", "and", "or", "xor"):
        return of, of
    return of, lambda self, other: of(other, self)


def _answers(found: np.ndarray) -> Any:
    """Return the answers to a comparison as :func:`number` does, 0 and 1."""
    true = np.count_nonzero(found)
    if true in (0, len(found)):
        return int(true > 0)
    return Ranks(found.astype(np.int64), 1)  # numpy adds two of its bools to a bool


for _name in (*_ARITHMETIC, *_COMPARISONS):
    _apply, _reflected = _operator(_name)
    setattr(Ranks, f"__{_name}__", _apply)
    if _name in _ARITHMETIC:
        setattr(Ranks, f"__r{_name}__", _reflected)


def cases(
    function: Callable[..., Any], *variables: np.ndarray, limit: int | None = None
) -> list[tuple[np.ndarray, Any]]:
    """Return ``function(*variables)`` for many values of its arguments, in few calls.

    The arrays `variables` are of one length.  Each (indices, result) is of the elements that have
    this result, whose numbers may be Ranks in the order of the indices.  An error with numbers, not
    Ranks, as the arguments is raised; and OverflowError if there are more results than `limit`.
    """
    # With each part, how often in a row the split that led to it has set one element apart.
    todo = [(np.arange(len(variables[0])), 0)]
    done: list[tuple[np.ndarray, Any]] = []
    with np.errstate(all="raise"):
        while todo:
            if limit is not None and len(todo) + len(done) > limit:
                raise OverflowError(f"{len(todo) + len(done)} cases")
            part, lonely = todo.pop()
            try:
                done.append((part, function(*(number(values[part]) for values in variables))))
            except Split as split:
                # They all differ, it seems: one by one is half the work.
                if lonely >= _LONELY and len(part) <= _FEW:
                    todo += [(part[i : i + 1], 0) for i in range(len(part))]
                    continue
                alone = any(len(indices) == 1 for indices in split.parts)
                todo += [(part[indices], (lonely + 1) * alone) for indices in split.parts]
            except Exception:
                if len(part) == 1:
                    raise
                todo += [(part[i : i + 1], 0) for i in range(len(part))]
    return done


def choose(condition: Any, yes: Any, no: Any) -> Any:
    """Return `yes` if the condition holds, else `no`; of many ranks each has its own answer."""
    if not isinstance(condition, Ranks):
        return yes if condition else no
    values = (n.values if isinstance(n, Ranks) else n for n in (yes, no))
    return number(np.where(condition.values, *values))


def span(first: int, stop: int) -> range | tuple[int, ...]:
    """Return the numbers from `first` up to `stop`; of many ranks, those of each."""
    if isinstance(first, (Ranks, Turn)) or isinstance(stop, (Ranks, Turn)):
        several: Any = Span(first, max(plain(stop - first), 0))
        return several
    return range(first, stop)


def pick(numbers: tuple[int, ...], index: int) -> int:
    """Return the number of an index, ``numbers[index]``; of many ranks each has its own index."""
    if isinstance(index, Ranks):
        values, bound = _array(numbers)
        return number(values[index.values], bound)
    return numbers[index]


def picker(numbers: Sequence[int]) -> Callable[[int], int]:
    """Return ``f(index)``, which is as :func:`pick` but also takes `numbers` of many ranks."""
    if isinstance(numbers, Span):
        return numbers.__getitem__
    rows: list[np.ndarray] = []

    def find(index: int) -> int:
        if isinstance(index, Turn) and isinstance(numbers, range):
            if not 0 <= index < len(numbers):
                raise IndexError("an index beyond the numbers")
            return numbers.start + index * numbers.step
        if not isinstance(index, Ranks):
            return numbers[index]
        if not rows:
            several = (n.values if isinstance(n, Ranks) else n for n in numbers)
            rows.append(np.array(np.broadcast_arrays(*several, index.values)[:-1]))
        return number(rows[0][index.values, np.arange(len(index.values))])

    return find


def without(steps: Sequence[Any], gone: Sequence[int]) -> tuple[Any, ...]:
    """Return the steps for which `gone` is not true; of many ranks each has its own answers."""
    if not any(isinstance(each, Ranks) for each in gone):
        return tuple([step for step, each in zip(steps, gone) if not each])
    several = (each.values if isinstance(each, Ranks) else each for each in gone)
    out = np.array(np.broadcast_arrays(*several)).astype(bool)
    left = plain(number(len(steps) - out.sum(axis=0)))
    # Rank by rank the indices of what is left; where they differ, there are steps of one kind.
    indices = np.argsort(out, axis=0, kind="stable")[:left]
    return tuple([_merged(steps, number(row)) for row in indices])


def _merged(steps: Sequence[Any], index: int) -> Any:
    """Return the step of an index; of many ranks, one step with the numbers of each one's step."""
    if not isinstance(index, Ranks):
        return steps[index]
    first = int(index.values.min())
    among, index = steps[first : int(index.values.max()) + 1], index - first
    kind = type(among[0])
    if any(type(step) is not kind for step in among):
        raise TypeError("steps of several kinds")
    columns = [[getattr(step, field.name) for step in among] for field in fields(kind)]
    return kind(*(_field(column, index) for column in columns))


def _field(values: Sequence[Any], index: int) -> Any:
    if all(value is values[0] for value in values):
        return values[0]
    if isinstance(values[0], (tuple, range, Span)):
        return tuple([_field(row, index) for row in zip(*values, strict=True)])
    return picker(values)(index)


@lru_cache(maxsize=64)
def _array(numbers: tuple[int, ...]) -> tuple[np.ndarray, int]:
    values = np.array(numbers, np.int64)
    return values, int(np.abs(values).max())
