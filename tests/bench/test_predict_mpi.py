"""Predicted beside measured times."""

import pytest

from mpidist import Unsupported
from mpidist.bench.predict import predict
from mpidist.bench.results import Results


@pytest.mark.one_node
@pytest.mark.mpi(min_size=2)
def test_predict_has_a_prediction_for_each_way_to_serve_a_call(comm):
    tuned = comm.split(0)
    if tuned.backend.crowded:
        with pytest.raises(Unsupported, match=rf"{comm.size} ranks share cores"):
            predict(tuned, ["allreduce"], [8], 0.0)
        return
    found = predict(tuned, ["allreduce", "scatter"], [8, 1 << 16], 0.0)
    rows = {(row.work, row.candidate, row.memory, row.bytes): row for row in found.rows}
    for nbytes in (8, 1 << 16):
        names = {(work, name, memory) for work, name, memory, n in rows if n == nbytes}
        for name in ("ring", "recursive_doubling", "native", "staged", "slots"):
            assert ("allreduce", name, "private") in names
        for name in ("symmetric", "in_place"):
            assert ("allreduce", name, "symmetric") in names
        assert ("scatter", "binomial", "private") in names
    able = [one.name for one in tuned.explain("scatter", 8)[1] if one.can]
    assert (("scatter", "published", "private", 8) in rows) == ("published" in able)
    for row in found.rows:
        predicted, error = row.figures["predicted_us"], row.figures["error"]
        assert predicted > 0 and row.time_us > 0
        assert error == pytest.approx(predicted / row.time_us - 1)
    kinds = [note.partition(":")[0] for note in found.notes]
    shared = ["shared memory", "schedules in shared memory"]
    assert kinds == ["messages", *shared, "native", "choices", "noise"]
    again = Results.from_json(found.to_json())
    assert [row.figures for row in again.rows] == [row.figures for row in found.rows]
    assert comm.allgather_object([row.time_us for row in found.rows]) == (
        [[row.time_us for row in found.rows]] * comm.size
    )


def test_predict_refuses_one_rank(comm):
    if comm.size == 1:
        with pytest.raises(Unsupported, match="1 rank: expected two or more"):
            predict(comm, ["allreduce"], [8], 0.0)
