"""Steps of a kernel: run in their order, by compiled code or by Python, and resumed.

By the code of this machine, and by that which other 64-bit processors get.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from mpidist.backends import flight
from mpidist.backends.board import HISTORY, PRINTS
from mpidist.backends.program import store
from mpidist.backends.recorder import Recorder
from mpidist.shared_memory import compiled
from mpidist.shared_memory.compiled import ARRIVE, CALL, CHECK, COPY, MEET, SUM
from mpidist.shared_memory.conditional import ConditionalAction, TargetedAction
from mpidist.shared_memory.steps import Steps, WordAddresses, announcing

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not compiled.runs_steps(), reason="needs a C compiler")
MARK, ME, OTHER = 1234, 0, 8


@pytest.fixture(scope="module")
def portable(tmp_path_factory):
    """The compiled module without code for x86-64."""
    if not (shutil.which("cc") and (ROOT / "setup.py").exists()):
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("portable")
    build = [f"--build-lib={folder}", f"--build-temp={folder / 'objects'}"]
    environ = {**os.environ, "CFLAGS": "-DMPIDIST_PORTABLE -Werror"}
    command = [sys.executable, "setup.py", "build_ext", "--force", *build]
    subprocess.run(command, cwd=ROOT, env=environ, check=True, capture_output=True, timeout=200)
    (path,) = folder.glob("**/_functions*")
    spec = importlib.util.spec_from_file_location("_functions", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=["of this machine", "portable"], autouse=True)
def functions(request, monkeypatch):
    """Have steps run by one compiled module or the other."""
    if request.param == "portable":
        module = request.getfixturevalue("portable")
        assert module.runs_steps() and not module.width()
        monkeypatch.setattr(compiled, "_compiled", module)
        monkeypatch.setattr(compiled, "vector_width", module.width)


def kinds(steps):
    return [kind for kind, _ in steps._steps]


def words_of(two=16):
    """Words of two ranks, and how this one sees them, without any patience."""
    memory = memoryview(np.zeros(two, np.int64))
    return memory, WordAddresses(memory, ME, [OTHER], (3, 2))


def never(sequence):
    raise AssertionError("nothing was to be waited for")


@pytest.mark.skipif(not compiled.vector_width(), reason="needs a C compiler for x86-64")
@pytest.mark.parametrize("functions", ["of this machine"], indirect=True)
def test_compiled_actions():
    x, y, out, seen = np.arange(5.0), np.ones(5), np.zeros(5), []
    steps = Steps()
    steps.act([store(out, x), lambda: seen.append(out.copy()), lambda: seen.append(out.copy())])
    steps.act([compiled.one_pass([x, y], [out]), compiled.stream(y, x)])
    assert kinds(steps) == [COPY, CALL, SUM, COPY]
    run = steps.bind()
    for factor in (1, 3):
        x[:] = np.arange(5.0) * factor
        y[:] = 1
        run(7)
        assert (seen[-2] == x).all() and (seen[-1] == x).all()
        assert (out == x + 1).all() and (y == x).all()
    assert len(seen) == 4


@pytest.mark.parametrize(
    "source",
    [np.arange(10.0)[::2], np.arange(5), np.float64(3), np.zeros(1)],
    ids=["strided", "another dtype", "a number", "another length"],
)
def test_uncopyable_dtypes_stay_in_python(source):
    out, steps = np.zeros(5), Steps()
    steps.act([store(out, source)])
    assert kinds(steps) == [CALL]
    steps.bind()(1)
    assert (out == source).all()


def test_copies_may_overlap_and_be_empty():
    x = np.arange(100)
    steps = Steps()
    steps.act([store(x[1:], x[:-1]), store(x[:0], x[:0])])
    assert kinds(steps) == [COPY, COPY]
    steps.bind()(1)
    assert (x[1:] == np.arange(99)).all()


def test_an_error_of_pythons_comes_through():
    def fails():
        raise OSError("so it goes")

    steps, out = Steps(), np.zeros(1)
    steps.act([fails, store(out, np.ones(1))])
    with pytest.raises(OSError, match="so it goes"):
        steps.bind()(1)
    assert out == 0


@pytest.mark.parametrize("number", [5, 6, 7])  # of ranks on one core, the last goes on at once
def test_arrival(number):
    memory, words = words_of()
    late, out = [], np.zeros(1)
    steps = Steps()
    steps.arrive(words, MARK, late.append)
    steps.act([store(out, np.ones(1))])
    assert kinds(steps) == [ARRIVE, COPY]
    run, at = steps.bind(), PRINTS + 5 % HISTORY
    memory[OTHER], memory[OTHER + at] = number, MARK
    run(5)
    assert (memory[ME], memory[ME + at]) == (5, MARK) and not late and out == 1


@pytest.mark.parametrize(("sequence", "mark"), [(4, MARK), (5, MARK + 1), (6, MARK + 1), (8, MARK)])
def test_what_python_must_judge(sequence, mark):
    memory, words = words_of()
    late, out = [], np.zeros(1)
    steps = Steps()
    steps.arrive(words, MARK, late.append)
    steps.act([store(out, np.ones(1))])
    memory[OTHER], memory[OTHER + PRINTS + 5 % HISTORY] = sequence, mark
    steps.bind()(5)
    assert late == [5] and out == 1


def test_barriers_count():
    memory, words = words_of()
    steps = Steps()
    steps.meet(words, never)
    steps.meet(words, never)
    assert kinds(steps) == [MEET, MEET]
    run = steps.bind()
    memory[OTHER] = 4
    run(1)
    run(2)
    assert memory[ME] == 4


def test_resumed_barrier():
    memory, words = words_of()
    waited, out = [], np.zeros(1)
    steps = Steps()
    steps.meet(words, waited.append)
    steps.act([store(out, np.ones(1))])
    steps.bind()(9)
    assert waited == [9] and memory[ME] == 1 and out == 1


def test_argument_checks():
    with pytest.raises(TypeError, match="integer"):
        compiled.function("run")(b"program", 1, 0)
    with pytest.raises(TypeError, match="are needed"):
        compiled.function("run")(0, 1)
    with pytest.raises(TypeError, match="integer"):
        compiled.function("copy")(None)


def test_words_as_expected_leave_an_action_out():
    memory, _ = words_of()
    memory[3], memory[5] = 30, 50
    done, out = [], np.zeros(1)
    conditional, steps = (
        ConditionalAction(memory, [3, 5], [30, 50], lambda: done.append(1)),
        Steps(),
    )
    steps.act([conditional, store(out, np.ones(1))])
    assert kinds(steps) == [CHECK, COPY]
    run = steps.bind()
    run(1)
    assert not done and out == 1
    memory[5] = 51
    run(2)
    assert len(done) == 1
    conditional.set_expected([30, 51])
    run(3)
    assert len(done) == 1
    conditional.invalidate()
    run(4)
    assert len(done) == 2


def test_a_target_that_moves():
    """Copied to by compiled code, or done by Python where it is no copy; found if it moved."""
    memory, _ = words_of()
    x, targets, looks = np.arange(3.0), [np.zeros(3), np.zeros(3), []], []

    def find(targeted):
        looks.append(memory[0])
        targeted.set_expected([memory[0]])
        target = targets[memory[0]]
        return [store(target, x)] if len(target) == 3 else [lambda: target.append(1)]

    steps = Steps()
    steps.act([TargetedAction(memory, [0], find)])
    run = steps.bind()
    for where in (0, 0, 1, 2, 2, 0):
        memory[0] = where
        run(1)
    assert looks == [0, 1, 2, 0] and len(targets[2]) == 2
    assert (targets[0] == x).all() and (targets[1] == x).all()


def test_record(tmp_path):
    """Both arrivals and announcements are recorded, and how far an operation has come."""
    recorder = Recorder(tmp_path / "flights" / "job", 0, 2)
    track = recorder.track([0, 1], 0)
    memory, _ = words_of()
    words, late = WordAddresses(memory, ME, [OTHER], (3, 2), track), []
    steps = Steps()
    steps.arrive(words, MARK, late.append)
    run, announce = steps.bind(words), announcing(memory, ME, track)
    memory[OTHER], memory[OTHER + PRINTS + 1] = 5, MARK
    run(5)
    assert not late and list(track.state[1:4]) == [5, 5, 5]
    announce(6, MARK + 1)
    at = PRINTS + 6 % HISTORY
    assert (memory[ME], memory[ME + at]) == (6, MARK + 1) and list(track.state[1:4]) == [6, 5, 5]
    steps = Steps()
    steps.arrive(words, MARK, lambda sequence: late.append(list(track.state[1:4])))
    steps.bind()(7)  # nobody comes; and that is not the end of the operation
    assert late == [[7, 5, 5]] and list(track.state[1:4]) == [7, 5, 5]
    record = flight.read(recorder.path)
    seen = [(each.number, each.sequence, each.fingerprint) for each in record.operations]
    assert seen == [(1, 5, MARK), (2, 6, MARK + 1), (3, 7, MARK)] and record.torn == 0
    assert all(abs(each.time - time.monotonic_ns()) < 60e9 for each in record.operations)


def test_record_of_many_threads(tmp_path):
    """Communicators in threads of their own write at the same time: what two overwrite is torn."""
    recorder = Recorder(tmp_path / "flights" / "job", 0, 1)
    memory, words = memoryview(np.zeros(64, np.int64)), []
    tracks = [recorder.track([0], 0) for _ in range(4)]
    for k, track in enumerate(tracks):
        steps = Steps()
        steps.arrive(WordAddresses(memory, 16 * k, (), (3, 2), track), MARK + k, never)
        words.append(steps.bind())

    def work(run):
        for sequence in range(1, 5001):
            run(sequence)

    threads = [threading.Thread(target=work, args=(run,)) for run in words]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    record = flight.read(recorder.path)
    assert {each.begun for each in record.tracks} == {5000} and record.count <= 20000
    assert 1024 <= len(record.operations) + record.torn <= 1028 and record.torn < 100
    for track in record.tracks:
        numbers = list(record.of(track))
        assert numbers == sorted(numbers) and numbers[-1] == 5000  # no other thread's
        assert {each.fingerprint for each in record.of(track).values()} <= {MARK + track.serial - 1}
