"""Made-up results, and quick measurements on simulated ranks."""

import pytest

from mpidist import run_simulated
from mpidist.bench import Refusal, Results, Row, Settings, measure

SIZES = [1 << k for k in range(3, 24, 2)]


def row(name, nbytes, time_us, memory="private", **more):
    fields = {"backend": "mpi", "ranks": 2, "dtype": "float32", "op": "sum", "in_place": False}
    fields |= {"algbw_gbs": 1.0, "busbw_gbs": 1.0, "ratio": 2.0, "correct": True}
    return Row("allreduce", name, bytes=nbytes, time_us=time_us, memory=memory, **fields | more)


def line(name, alpha, beta, **more):
    return [row(name, n, alpha + beta * n, **more) for n in SIZES]


def runs():
    versions = {"mpidist": "1", "numpy": "2"}
    first = Results({"ranks": 2, "date": "x", "versions": versions}, [])
    second = Results({"ranks": 4, "date": "y", "versions": {**versions, "numpy": "3"}}, [])
    first.rows = [row("a", 8, 10.0), row("b", 8, 10.0), row("c", 8, 10.0), row("d", 8, 10.0)]
    second.rows = [row("a", 8, 5.0), row("b", 8, 20.0), row("c", 8, 10.5)]
    second.rows += [row("d", 8, 10.0, memory="symmetric")]
    return first, second


def step(work, name, ms, **figures):
    return Row(work, name, 2, 1000.0 * ms, figures=figures)


def example():
    call = {"bytes": 8, "dtype": "float32", "op": "sum", "backend": "mpi"}
    bandwidths = {"algbw_gbs": 1.0, "busbw_gbs": 2.0}
    rows = [
        Row("allreduce", name, 2, t * n, 1 / t, n < 900, **call | bandwidths | {"bytes": n})
        for n in (8, 1024)
        for name, t in (("mpi4py", 1.0), ("ring", 2.5))
    ]
    refused = [Refusal("allgather", "neighbor_exchange", 8, "an even number <of> ranks")]
    return Results(
        {"ranks": 2, "host": "h", "date": "d", "versions": {"mpidist": "1"}}, rows, refused
    )


QUICK = {"iterations": 1, "budget": 0.05}


def bench(size, collectives, **settings):
    settings = Settings(**{"sizes": (0, 1000), **QUICK, **settings})
    every = run_simulated(size, lambda comm: measure(comm, collectives, settings))
    assert every[0].rows == every[-1].rows  # all ranks know the same
    return every[0]


def check_rows(comm, rows, names):
    """Check the rows of a race: names, ratios to the first, and the same on every rank."""
    assert [row.candidate for row in rows] == names
    assert all(row.time_us > 0 for row in rows)
    assert rows[0].ratio == 1
    assert rows[1].ratio == pytest.approx(rows[0].time_us / rows[1].time_us)
    told = comm.allgather_object([row.to_json() for row in rows])
    assert all(other == told[0] for other in told)
