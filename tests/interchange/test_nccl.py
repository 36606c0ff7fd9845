"""The table of NCCL's example tuner plugin, read as the plugin reads it."""

import pytest

from mpidist.errors import InvalidArgument
from mpidist.interchange.library_rules import PREDICTED, LibraryRule
from mpidist.interchange.nccl import export_nccl

COLLECTIVES = ("broadcast", "reduce", "allgather", "reducescatter", "allreduce")
ALGORITHMS = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")


def rule(first, last, algorithm, ranks=16, collective="allreduce"):
    return LibraryRule(collective, ranks, first, last, algorithm, PREDICTED, (1.25, 1.5))


RULES = [rule(8, 65535, "tree"), rule(65536, 1 << 33, "ring"), rule(8, 99, "ring", 4)]
TEXT = """\
# made here
# NCCL_TUNER_PLUGIN=libnccl-tuner-example.so NCCL_TUNER_CONFIG_FILE=FILE
# NCCL 2.30's plugin asks for 1 channel where these are -1, and in all other calls
# collective,least bytes,most bytes,algorithm,protocol,channels,nodes,ranks
# allreduce on 16 ranks, 8 to 64K: tree, predicted: 1.25 to 1.50 times as fast as the next by the model
allreduce,8,65535,tree,simple,-1,2,16
# allreduce on 16 ranks, 64K to 8G: ring, predicted: 1.25 to 1.50 times as fast as the next by the model
allreduce,65536,8589934592,ring,simple,-1,2,16
# allreduce on 4 ranks, 8 to 99: ring, predicted: 1.25 to 1.50 times as fast as the next by the model
allreduce,8,99,ring,simple,-1,2,4
"""  # noqa: E501


def read(text):
    """Return the rows of a table: what the plugin does not know it takes for something else."""
    rows = []
    for line in text.splitlines(keepends=True):
        assert len(line) <= 255, "the plugin reads the rest as a line of its own"
        if line[0] in "#\n":
            continue
        name, first, last, algorithm, protocol, channels, nodes, ranks = line.strip().split(",")
        assert name in COLLECTIVES and algorithm in ALGORITHMS
        assert protocol in ("ll", "ll128", "simple")
        numbers = tuple(map(int, (first, last, channels, nodes, ranks)))
        rows.append((name, *numbers[:2], algorithm, protocol, *numbers[2:]))
    return rows


def chosen(rows, nbytes, ranks, nodes=2):
    for _, first, last, algorithm, _, _, at, of in rows:
        if first <= nbytes <= last and at in (-1, nodes) and of in (-1, ranks):
            return algorithm
    return None


def test_table():
    assert export_nccl(RULES, "simple", 2, about=["made here"]) == TEXT


def test_rules_hold_on_their_ranks_and_bytes_alone():
    rows = read(export_nccl(RULES, "ll128", 2))
    expected = {
        **{(7, 16): None, (8, 16): "tree", (65535, 16): "tree", (65536, 16): "ring"},
        **{(1 << 33, 16): "ring", ((1 << 33) + 1, 16): None, (99, 4): "ring", (8, 8): None},
    }
    assert {at: chosen(rows, *at) for at in expected} == expected
    assert {row[4] for row in rows} == {"ll128"} and chosen(rows, 8, 16, nodes=1) is None
    assert read(export_nccl(RULES[:1], "ll")) == [("allreduce", 8, 65535, "tree", "ll", -1, -1, 16)]


def test_a_long_comment_is_cut():
    """Its rest would be a rule."""
    read(export_nccl(RULES, "simple", about=["x" * 300]))


def test_what_the_plugin_would_take_for_something_else_is_refused():
    with pytest.raises(InvalidArgument, match="broadcast: NCCL has no choice"):
        export_nccl([rule(8, 9, "ring", collective="broadcast")], "simple")
    with pytest.raises(InvalidArgument, match="'rabenseifner'"):
        export_nccl([rule(8, 9, "rabenseifner")], "simple")
    with pytest.raises(InvalidArgument, match="protocol='LL': expected ll, ll128, simple"):
        export_nccl(RULES, "LL")
    with pytest.raises(InvalidArgument, match="nodes=0"):
        export_nccl(RULES, "simple", 0)
    with pytest.raises(InvalidArgument, match="channels=-2"):
        export_nccl(RULES, "simple", channels=-2)
