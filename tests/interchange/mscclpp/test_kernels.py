"""MSCCL++ plans: what is proved, each fault that is found, and words that are not needed."""

import copy
from pathlib import Path

import pytest

from mpidist.errors import ScheduleError
from mpidist.interchange.mscclpp.kernels import _synchronisations, needless_words, prove_plan
from mpidist.interchange.mscclpp.plan import read_plan
from tests.support.mscclpp import NOP, Gpu, allgather, allreduce, alltoall, plan, written

PLANS = {
    "allreduce": allreduce,
    "allgather": allgather,
    "allgather-port": lambda size: allgather(size, "port"),
    "alltoall": alltoall,
    "alltoall-barrier": lambda size: alltoall(size, "barrier"),
    "alltoall-halves": lambda size: alltoall(size, use_double_scratch_buffer=True),
}


@pytest.fixture
def proved(tmp_path):
    """A function: it proves a plan from its file."""

    def prove(content):
        return prove_plan(read_plan(written(tmp_path, content)))

    return prove


@pytest.fixture
def fails(proved):
    """A function: it checks that a plan has a counter-example with these texts."""

    def check(content, *texts):
        with pytest.raises(ScheduleError) as caught:
            proved(content)
        for text in texts:
            assert text in str(caught.value)
        return caught.value

    return check


def operations(content, gpu=0, block=0):
    """Return the list of operations of a thread block, to be changed."""
    return content["gpus"][gpu]["threadblocks"][block]["ops"]


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("size", (2, 4))
def test_plans_are_proved_and_need_all_their_words(name, size, tmp_path):
    """A signal and its wait left out, a semaphore, a barrier, a flush: all are faults."""
    found = read_plan(written(tmp_path, PLANS[name](size)))
    proof = prove_plan(found)
    assert (proof.size, proof.block_count) == (size, size)
    syncs = list(_synchronisations(found))
    assert len(syncs) >= size * (size - 1)
    texts = needless_words(found)
    if name == "alltoall-halves":  # who comes to a launch has left the one before the last
        assert len(texts) == size * (size - 1)
        assert all("rlxsignal" in text for text in texts)
    else:
        assert texts == []


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("one", ("signal", "wait", "rlxsignal", "rlxwait", "sem_release"))
def test_half_a_pair_left_out_has_a_counter_example(name, one, proved):
    """Who waits for it waits for ever, or its word is left for a later launch."""
    content = PLANS[name](2)
    ops = operations(content, gpu=1)
    at = [k for k, op in enumerate(ops) if op["name"] == one]
    for k in at:
        changed = copy.deepcopy(content)
        del operations(changed, gpu=1)[k]
        with pytest.raises(ScheduleError):
            proved(changed)


def test_a_missing_wait_leaves_a_word(fails):
    content = allreduce(2)
    operations(content, gpu=1)[:] = [
        op for op in operations(content, gpu=1) if op["name"] != "rlxwait"
    ]
    # The next launch's signal is taken for this one's: found as a race, or at the end.
    assert fails(content, "GPU 1, thread block 0")


def test_a_deadlock_names_who_waits(fails):
    """Each GPU waits before it signals."""
    content = allgather(2)
    for gpu in range(2):
        ops = operations(content, gpu)
        ops[1], ops[2] = ops[2], NOP
        ops.insert(3, {**ops[1], "name": "signal"})
    error = fails(
        content,
        "deadlock",
        "GPU 0, thread block 0, operation 1 (wait) of launch 1 waits for GPU 1 on memory channel",
        "GPU 1, thread block 0, operation 1 (wait) of launch 1",
    )
    assert error.rank is None and "chunk" not in str(error)


def test_a_race_over_two_launches_names_both_operations(fails, proved):
    """Scratch memory is emptied while the next launch of another GPU fills it."""
    content = alltoall(2)
    for gpu in range(2):
        del operations(content, gpu)[:3]  # GPUs no longer tell that they have begun
    fails(
        content,
        "thread block 0, operation 0 (put) of launch 2: race: writes GPU",
        "thread block 1, operation 3 (copy) of launch 1 reads too",
        "'scratch'",
    )
    # With halves that take turns, the word of a launch between them is enough.
    content["use_double_scratch_buffer"] = True
    proved(content)


def test_an_input_is_written_again_while_it_is_read(fails):
    """The GPU that reads another one's input must tell it when it has done so."""
    gpus = []
    for rank in range(2):
        g = Gpu(rank, 2)
        ops = [
            *(g.words("signal"), g.words("wait"), NOP),
            g.move("copy", [(rank, "i", 0)], [(rank, "o", rank)]),
            g.move("get", [(1 - rank, "i", 0)], [(rank, "o", 1 - rank)]),
        ]
        gpus.append(g.content((1, 2, 0), [ops]))
    fails(
        plan("allgather", False, gpus),
        "the caller of GPU",
        "before launch 2: race: writes its own 'input'",
        "thread block 0, operations 3, 4 (copy, get) of launch 1 reads too",
    )


def test_a_port_reads_until_it_is_flushed(fails):
    content = allgather(2, "port")
    for gpu in range(2):
        ops = operations(content, gpu)
        ops[:] = [op for op in ops if op["name"] != "flush"]
    fails(
        content,
        "before launch 2: race: writes its own 'input'",
        "port channel 0, of thread block 0",
    )


def test_a_port_puts_and_signals_in_one(proved, fails):
    content = allgather(2, "port")
    for gpu in range(2):
        ops = operations(content, gpu)
        (put,) = [k for k, op in enumerate(ops) if op["name"] == "put"]
        assert ops[put + 2]["name"] == "signal"
        ops[put]["name"] = "pws"
        del ops[put + 2]
    proved(content)
    for gpu in range(2):
        ops = operations(content, gpu)
        next(op for op in ops if op["name"] == "pws")["name"] = "pwsf"
        ops[:] = [op for op in ops if op["name"] != "flush"]
    proved(content)
    next(op for op in operations(content) if op["name"] == "pwsf")["name"] = "pws"
    fails(content, "the caller of GPU 0 before launch 2: race")


@pytest.mark.parametrize("gpu", (0, 1))
def test_a_signal_needs_a_nop_after_the_put(gpu, fails):
    """Another thread may signal before those that put have ended."""
    content = allgather(2)
    ops = operations(content, gpu)
    at = next(k for k, op in enumerate(ops) if op["name"] == "put")
    del ops[at + 1]
    fails(content, "race", "(put, signal)")


def test_a_signal_needs_a_nop_after_a_wait(fails):
    content = allgather(2)
    operations(content)[1:3] = operations(content)[2:0:-1]
    fails(content, "operation 2 (signal) of launch 1: signals after a wait of operation 1")


def test_relaxed_words_order_nothing_of_their_launch(fails):
    content = allreduce(2)
    for gpu in range(2):
        for op in operations(content, gpu):
            if op["name"] == "signal":
                op["name"] = "rlxsignal"
    fails(content, "race")


def test_a_wrong_result_is_named(fails):
    content = alltoall(2)
    copies = [op for op in operations(content, 1, 1) if op["name"] == "copy"]
    copies[0]["src_buff"][0]["index"] = 0
    fails(content, "plan.json: GPU 1, chunk 1: ends with chunk 0 of GPU 1 where chunk 1 of GPU 1")
    twice = allreduce(2)
    (fold,) = [op for op in operations(twice) if op["name"] == "rres"]
    fold["src_buff"].append(fold["src_buff"][1])
    fails(twice, "operation 3 (rres) of launch 1: counts the contribution of GPU 1 twice")
    less = allreduce(2)
    (fold,) = [op for op in operations(less, 1) if op["name"] == "rres"]
    fold.update(name="put", src_buff=fold["src_buff"][:1], dst_buff=fold["dst_buff"][1:])
    fails(less, "json: GPU 0, chunk 1: ends with a value that lacks GPU 0, which GPU 1 stored")
    none = allreduce(12)
    for gpu in none["gpus"]:
        gpu["threadblocks"] = []
    fails(
        none, "GPU 0, chunk 0: ends with a value that lacks GPUs 1, 2, 3, 4, 5, 6, 7, 8 and 3 more"
    )


def test_an_output_that_nobody_writes_is_named(fails):
    content = alltoall(2)
    ops = operations(content, 0, 1)
    ops[:] = [op for op in ops if op["name"] != "copy"]
    fails(content, "the caller of GPU 0 after launch 1: reads 'out' where nothing was written")


def test_two_thread_blocks_on_one_channel_are_refused(fails):
    content = alltoall(2)
    operations(content, 0, 1).append(operations(content)[-4])
    assert operations(content, 0, 1)[-1]["name"] == "signal"
    fails(content, "signals on memory channel 0, as another thread block of its GPU does")


def test_needless_words_are_named(tmp_path):
    """A second round of signals and waits, and a barrier after a semaphore, add nothing."""
    content = allreduce(2)
    for gpu in range(2):
        ops = operations(content, gpu)
        signal, wait = (op for op in ops if op["name"] in ("signal", "wait"))
        ops += [signal, wait, NOP]
    found = needless_words(read_plan(written(tmp_path, content)))
    where = "GPU {}, thread block 0, operation {} ({})"
    for signal, wait in ((5, 6), (8, 9)):
        one, other = where.format(0, signal, "signal"), where.format(1, wait, "wait")
        assert f"{one} and {other}" in found
    assert len(found) == 4

    both = alltoall(2)
    for gpu in range(2):
        for block in range(2):
            barrier = {"name": "barrier", "barrier_id": 1, "num_threadblocks": 2}
            operations(both, gpu, block).append(barrier)
    found = needless_words(read_plan(written(tmp_path, both)))
    assert len(found) == 2 and all(text.count("(barrier)") == 2 for text in found)


def test_local_sums_and_sums_that_are_sent(proved):
    """``res`` of a copy in scratch memory, ``re`` of a sum of its own, and ``rre``."""
    gpus = []
    for rank in range(2):
        g, other = Gpu(rank, 2), 1 - rank
        ops = [
            *(g.words("rlxsignal"), g.words("rlxwait"), NOP),
            g.move("put", [(rank, "i", other)], [(other, "s", 0)]),
            *(NOP, g.words("signal"), g.words("wait"), NOP),
            g.move("re", [(rank, "i", rank), (rank, "s", 0)], [(rank, "s", 1)]),
            g.move(
                "res",
                [(rank, "i", rank), (rank, "s", 0)],
                [(rank, "o", rank), (other, "o", rank)],
            ),
            *(NOP, g.words("signal"), g.words("wait"), NOP),
        ]
        gpus.append(g.content((2, 2, 2), [ops]))
    proved(plan("allreduce", False, gpus))

    gpus = []
    for rank in range(2):
        g, other = Gpu(rank, 2), 1 - rank
        ops = [
            *(g.words("signal"), g.words("wait"), NOP),
            g.move("rre", [(rank, "i", rank), (other, "i", rank)], [(rank, "o", 0)]),
            *(NOP, g.words("signal"), g.words("wait"), NOP),
        ]
        gpus.append(g.content((2, 1, 0), [ops]))
    proved(plan("reducescatter", False, gpus))


def test_adjacent_operations_of_a_thread_block_need_a_nop(fails, proved):
    content = alltoall(2)
    ops = operations(content, 0, 1)
    assert [op["name"] for op in ops] == ["copy", "sem_acquire", "nop", "copy"]
    ops.insert(3, {**ops[3], "dst_buff": [{"type": "s", "index": 0, "size": 1}]})
    ops[4] = {**ops[4], "src_buff": [{"type": "s", "index": 0, "size": 1}]}
    fails(content, "operations 3, 4 (copy, copy) of launch 1: reads 'scratch' where nothing was")
    ops.insert(4, NOP)
    proved(content)


def test_the_example_of_the_docs_needs_all_its_words():
    found = read_plan(Path(__file__).parents[3] / "examples/pair.json")
    assert prove_plan(found).messages == 8 and needless_words(found) == []
