"""Segments: every algorithm pipelined over pieces of its blocks, in windows of any width."""

import pytest

import mpidist  # noqa: F401  (registers the algorithms)
from mpidist.schedule import algorithms, find, prove
from mpidist.selection.segmentation import Segmentation


@pytest.mark.parametrize("algorithm", algorithms(), ids=lambda a: a.label.replace(" ", "-"))
@pytest.mark.parametrize(("segments", "window"), [(2, None), (3, 1), (3, 2), (5, 2), (4, 9)])
def test_every_algorithm_in_segments(algorithm, segments, window):
    for size in (1, 2, 3, 4, 6, 7, 15):
        if algorithm.unsupported(size):
            continue
        root = size // 2 if algorithm.contract.rooted else 0
        whole = prove(algorithm.collective, algorithm, size, root)
        proof = prove(algorithm.collective, algorithm, size, root, segments=segments, window=window)
        assert proof.block_count == segments * whole.block_count
        assert proof.messages == segments * whole.messages
        assert proof.blocks_moved == segments * whole.blocks_moved
        assert proof.rounds == segments * whole.rounds
        assert (proof.ordered, proof.identical) == (whole.ordered, whole.identical)


@pytest.mark.parametrize("segments", [1, 2, 8])
def test_segments_follow_each_other_along_a_chain(segments):
    """A segment moves on while the next one comes."""
    alone = prove("broadcast", "chain", 6, segments=segments, window=1)
    assert alone.depth <= 5 + (segments - 1) * 2
    assert prove("broadcast", "chain", 6, segments=segments).depth == 5


def test_how_blocks_are_cut():
    tree, ring = (find("allreduce", name).algorithm for name in ("binomial", "ring"))
    lanes = find("allreduce", "hierarchical").algorithm
    cut = Segmentation(window=4)
    assert cut.of(tree, 2, 1, 1, 4 << 20) == (1, 4), "nobody passes it on"
    assert cut.of(tree, 2, 1, 1, 16 << 20) == (4, 4)
    assert Segmentation(1 << 20).of(tree, 2, 1, 1, 4 << 20) == (4, 4), "as the user asks"
    assert cut.of(tree, 4, 1, 1, 4 << 20) == (4, 4)
    assert cut.of(tree, 4, 1, 1, (4 << 20) + 1) == (5, 4)
    assert cut.of(ring, 4, 1, 4, 4 << 20) == (1, 4), "a block per rank stays whole"
    assert cut.of(ring, 4, 1, 4, 3 << 30) == (3, 4), "but for what is too long for a message"
    assert cut.of(lanes, 4, 2, 4, 4 << 20) == (16, 8), "nodes work while the links are busy"
    assert cut.of(lanes, 4, 2, 2, 512 << 10) == (4, 8), "with at least four"
    assert cut.of(lanes, 4, 2, 4, 128 << 10) == (1, 8), "if these are not too short"
    assert cut.of(lanes, 4, 1, 4, 4 << 20) == (1, 4), "but not on one node"
    assert Segmentation(64 << 10, 1).of(lanes, 4, 2, 4, 4 << 20) == (64, 2)
    mpich = Segmentation(library="MPICH 5.0.2")
    assert mpich.of(lanes, 4, 2, 4, 4 << 20) == (16, 3), "which has more to do for each"
    parts = find("allreduce", "hierarchical/direct/recursive_doubling").algorithm
    assert mpich.of(parts, 4, 2, 2, 512 << 10) == (4, 3), "whatever its parts are"
    for other in (find("reduce", "hierarchical"), find("allreduce", "hierarchical_leaders")):
        assert mpich.of(other.algorithm, 4, 2, 4, 4 << 20) == (16, 8)
    assert cut.of(tree, 4, 1, 1, 1 << 40) == (255, 4)
    assert cut.of(tree, 4, 1, 1, 0) == (1, 4)
