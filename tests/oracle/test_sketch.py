"""Sketches are linear, estimate norms, and do not depend on how a tensor is divided."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.oracle.sketch import ERROR, SUMS, fingerprint, row_ids, sketch, sketch_rows


def norm(sums):
    return float(np.linalg.norm(sums))


@given(st.lists(st.integers(0, 200_000), max_size=4), st.integers(1, 200_000))
def test_sketch_of_parts_adds_up_to_that_of_the_whole(cuts, size):
    x = np.random.default_rng(size).normal(size=size).astype(np.float32)
    edges = [0, *sorted(min(cut, size) for cut in cuts), size]
    parts = [sketch("w", x[a:b], a) for a, b in zip(edges, edges[1:], strict=False)]
    sums, squares = sketch("w", x)
    assert norm(sum(part for part, _ in parts) - sums) <= 1e-6 * squares**0.5
    assert sum(found for _, found in parts) == pytest.approx(squares, rel=1e-4)


def test_sketch_of_a_difference_is_the_difference_of_sketches():
    a, b = np.random.default_rng(1).normal(size=(2, 1000))
    assert np.allclose(sketch("w", a)[0] - sketch("w", b)[0], sketch("w", a - b)[0], atol=1e-12)


@pytest.mark.parametrize("where", ["everywhere", "one column", "one row"])
def test_sketch_estimates_a_norm_within_its_error(where):
    random, found = np.random.default_rng(2), []
    for k in range(200):
        x = np.zeros((62, 64))
        place = {"everywhere": np.s_[:], "one column": np.s_[:, 3], "one row": np.s_[5]}[where]
        x[place] = random.normal(size=x[place].shape)
        sums, squares = sketch(f"tensor{k}", x)
        found.append(norm(sums) / squares**0.5)
    assert np.mean(found) == pytest.approx(1, abs=0.05)
    assert np.std(found) < 1.3 * ERROR


def test_sketch_of_another_name_has_other_signs():
    x = np.ones(1000)
    assert not np.allclose(sketch("a", x)[0], sketch("b", x)[0])


def test_sketch_of_complex_numbers_is_that_of_both_parts():
    x = np.arange(10) + 1j
    assert np.allclose(sketch("w", x)[0], sketch("w", x.view(float))[0])
    assert np.allclose(sketch("w", x[:4])[0] + sketch("w", x[4:], 4)[0], sketch("w", x)[0])


def test_rows_in_another_order_have_the_same_sketch():
    x = np.random.default_rng(3).normal(size=(40, 100)).astype(np.float32)
    order = np.random.default_rng(4).permutation(40)
    sums, squares = sketch_rows("out", x, row_ids([x]))
    turned, also = sketch_rows("out", x[order], row_ids([x[order]]))
    assert sums.shape == (40, SUMS)
    assert np.allclose(turned.sum(0), sums.sum(0), rtol=0, atol=1e-12)
    assert also.sum() == pytest.approx(squares.sum())


def test_rows_that_are_swapped_have_another_sketch():
    x = np.random.default_rng(5).normal(size=(40, 100))
    ids = row_ids([x])
    swapped = x.copy()
    swapped[[0, 1]] = x[[1, 0]]
    apart = sketch_rows("out", x, ids)[0].sum(0) - sketch_rows("out", swapped, ids)[0].sum(0)
    assert norm(apart) == pytest.approx(norm(x - swapped), rel=0.6)


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32", "float64"])
def test_row_ids_differ_in_any_element_and_array(dtype):
    x = np.zeros((5, 9), dtype)
    x[1, 0] = x[2, 8] = x[3, 4] = 1
    assert len(set(row_ids([x]).tolist())) == 4  # rows 0 and 4 are equal
    assert (row_ids([x]) != row_ids([x, x])).all()


@given(st.binary(min_size=1, max_size=100), st.integers(0, 99))
def test_fingerprint_of_other_bytes_is_another_one(content, place):
    one = np.frombuffer(content, np.uint8)
    other = one.copy()
    other[place % len(other)] ^= 1
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one) == fingerprint(one.copy())
