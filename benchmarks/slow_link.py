"""Run ``mpidist`` on emulated nodes that are joined by a slow link.

``python benchmarks/slow_link.py bench allreduce --bytes 64K-16M`` runs ``mpidist bench …`` on 2
nodes of 2 ranks, 1 Gbit/s and 100 µs.  It needs root and /dev/net/tun, as minicluster.py does.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)
from tests.support.minicluster import Cluster, Refused  # noqa: E402


def main() -> int:
    """Run the command; its exit status, 2 where nodes cannot be emulated, 124 past the limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=4, help="on all nodes together")
    parser.add_argument("--rate", type=float, default=1e9, help="bits a second of each node")
    parser.add_argument("--delay", type=float, default=100e-6, help="seconds, one way")
    parser.add_argument("--python", default=sys.executable, help="the Python whose MPI is used")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds until it is ended")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="arguments of mpidist")
    options = parser.parse_args()
    try:
        with Cluster(options.nodes, options.rate, options.delay) as cluster:
            finished = cluster.mpiexec(
                options.ranks,
                "-m",
                "mpidist",
                *options.command,
                python=options.python,
                limit=options.limit,
                PYTHONPATH=str(ROOT),
            )
    except Refused as why:
        sys.stderr.write(f"this machine cannot emulate nodes: {why}\n")
        return 2
    sys.stdout.write(finished.output)
    return 124 if finished.status is None else finished.status


if __name__ == "__main__":
    sys.exit(main())
