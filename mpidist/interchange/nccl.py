"""The table of NCCL's example tuner plugin (``plugins/tuner/example``): a rule a line, with commas.

Both bounds of bytes are inclusive, -1 is any, and the first line that matches counts.  Whatever the
plugin does not know it takes for an allreduce, by ring, with protocol simple, without a word.  That
of NCCL 2.30 asks for one channel wherever no line that matches has a number of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import InvalidArgument
from .library_rules import LibraryCollective, LibraryRule, check_rules

COLLECTIVES = {
    "allreduce": LibraryCollective(
        "allreduce",
        {
            "tree": "double_binary_tree",
            "ring": "ring",
            "collnet_direct": None,
            "collnet_chain": None,
            "nvls": None,
            "nvls_tree": None,
        },
    ),
    "allgather": LibraryCollective("allgather", {"ring": "ring", "nvls": None, "pat": None}),
    "reduce_scatter": LibraryCollective(
        "reducescatter", {"ring": "ring", "nvls": None, "pat": None}
    ),
}
PROTOCOLS = ("ll", "ll128", "simple")
_LONGEST = 254  # characters of a line; the plugin would read the rest of a longer one as another


def export_nccl(
    rules: Sequence[LibraryRule],
    protocol: str,
    nodes: int = -1,
    channels: int = -1,
    about: Sequence[str] = (),
) -> str:
    """Return rules as a table for NCCL's example tuner plugin.

    Parameters
    ----------
    rules : sequence of LibraryRule
        Rules that do not overlap.  Where there is none, NCCL chooses.
    protocol : {"ll", "ll128", "simple"}
        Protocol of every rule: the cost model knows none.
    nodes, channels : int
        Number of nodes on which the rules hold, -1 for any; of channels, -1 for the plugin's.
    about : sequence of str
        Lines on the machine, the model and the date.

    Raises
    ------
    InvalidArgument
        If NCCL has no such collective, algorithm or protocol, or a number is none.
    """
    check_rules(rules, COLLECTIVES, "NCCL")
    if protocol not in PROTOCOLS:
        raise InvalidArgument(f"protocol={protocol!r}: expected {', '.join(PROTOCOLS)}")
    for name, value in (("nodes", nodes), ("channels", channels)):
        if value != -1 and value < 1:
            raise InvalidArgument(f"{name}={value}: expected a number >= 1, or -1 for any")
    lines = [
        *(f"# {line}" for line in about),
        "# NCCL_TUNER_PLUGIN=libnccl-tuner-example.so NCCL_TUNER_CONFIG_FILE=FILE",
        "# NCCL 2.30's plugin asks for 1 channel where these are -1, and in all other calls",
        "# collective,least bytes,most bytes,algorithm,protocol,channels,nodes,ranks",
    ]
    for rule in rules:
        lines.append(f"# {rule}")
        row = (COLLECTIVES[rule.collective].name, rule.first, rule.last, rule.algorithm, protocol)
        lines.append(",".join(map(str, (*row, channels, nodes, rule.ranks))))
    # A comment is cut into lines too, and its rest would be a rule.
    return "".join(f"{line[:_LONGEST]}\n" for line in lines)
