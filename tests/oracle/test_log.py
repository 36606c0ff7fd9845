"""What a process has recorded outlives its end."""

import numpy as np

from mpidist.oracle.log import Imprint, Part, Step, Writer, read_logs


def part(value):
    return Part(np.full(3, value), value**2, 1, value)


def test_logs_of_all_processes_are_read_in_their_order(tmp_path):
    for rank in (1, 0):
        writer = Writer(tmp_path, rank)
        writer.facts(loader=True)
        writer.step(Step(1, stepped=True))
    logs = read_logs(tmp_path)
    assert list(logs) == [0, 1]
    assert logs[1].facts == {"loader": True}
    assert logs[1].step(1).stepped
    assert logs[1].step(2) is None


def test_log_that_was_cut_off_has_its_whole_steps(tmp_path):
    writer = Writer(tmp_path, 0)
    writer.step(Step(1))
    size = writer.path.stat().st_size
    writer.step(Step(2, ids=[np.arange(5, dtype=np.uint64)]))
    writer.path.write_bytes(writer.path.read_bytes()[: size + 20])
    assert [step.number for step in read_logs(tmp_path)[0].steps] == [1]


def test_microbatches_of_a_step_add_up():
    step = Step(1)
    for value in (1.0, 2.0):
        step.put("forward", Imprint("loss", "loss", parts={0: part(value)}))
    assert step.tensors["forward"]["loss"].parts[0].value == 3.0
    assert step.tensors["forward"]["loss"].parts[0].rows == 2
