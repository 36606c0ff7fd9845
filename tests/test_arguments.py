"""One wording for each check of an argument."""

import numpy as np
import pytest

from mpidist.arguments import function, one_of, true_or_false, whole
from mpidist.errors import ConfigError, InvalidArgument


def test_whole_any_integer():
    found = whole("n", np.int64(3), 3)
    assert found == 3 and type(found) is int


@pytest.mark.parametrize("value", [1, -5, 2.0, True, "3", None, np.float64(3)])
def test_whole_refused(value):
    with pytest.raises(ConfigError) as caught:
        whole("n", value, 2, "rank 1: ", ", or None", ConfigError)
    assert str(caught.value) == f"rank 1: n={value!r}: expected a whole number >= 2, or None"


def test_one_of():
    one_of("how", "b", ("a", "b"))
    one_of("flag", False, (True, False))
    with pytest.raises(InvalidArgument, match=r"^rank 2: how='c': expected one of 'a', 'b'$"):
        one_of("how", "c", ("a", "b"), "rank 2: ")


@pytest.mark.parametrize("value", [1, 0.0, np.zeros(2), ["a"], None])
def test_one_of_another_type(value):
    """Equal to a choice, or not to be compared with it."""
    with pytest.raises(InvalidArgument, match=r"expected one of True, False"):
        one_of("flag", value, (True, False))


def test_true_or_false():
    true_or_false("flag", False)
    with pytest.raises(InvalidArgument, match=r"^rank 0: flag=0: expected True or False$"):
        true_or_false("flag", 0, "rank 0: ")


def test_function():
    function("fn", len)
    with pytest.raises(InvalidArgument, match=r"^fn=3: expected a function of a bucket$"):
        function("fn", 3, "a bucket")
    with pytest.raises(InvalidArgument, match=r"^fn=3: expected a function$"):
        function("fn", 3)
