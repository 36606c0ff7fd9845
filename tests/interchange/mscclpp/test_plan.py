"""MSCCL++'s plans are read, or refused with GPU, thread block and operation."""

import pytest

from mpidist.errors import InvalidArgument, MpidistError, Unsupported
from mpidist.interchange.mscclpp.plan import NOT_MODELLED, End, Op, Place, read_plan
from tests.support.mscclpp import allgather, allreduce, alltoall, written


@pytest.fixture
def refused(tmp_path):
    """A function: it checks that a plan is refused with an error of a type and these texts."""

    def check(content, error, *texts):
        with pytest.raises(error) as caught:
            read_plan(written(tmp_path, content))
        for text in ("plan.json", *texts):
            assert text in str(caught.value)

    return check


def test_a_plan_is_read_with_places_and_ends_of_channels(tmp_path):
    found = read_plan(written(tmp_path, allreduce(4)))
    assert (found.name, found.collective, found.inplace) == ("allreduce_4", "allreduce", True)
    assert (found.chunks, found.scratch, found.double_scratch) == (4, 0, False)
    assert [len(blocks) for blocks in found.gpus] == [1, 1, 1, 1]
    signal, _, nop, fold, *_ = found.gpus[2][0]
    ends = tuple(End("memory", peer, 0, own) for own, peer in enumerate((0, 1, 3)))
    assert signal == Op(0, "rlxsignal", ends=ends) and nop == Op(2, "nop")
    everywhere = tuple(Place(gpu, "i", 2, 1) for gpu in (2, 0, 1, 3))
    assert fold == Op(3, "rres", everywhere, everywhere)
    assert len(list(found.operations())) == 4 * 8


def test_channels_of_two_gpus_are_paired_by_number(tmp_path):
    content = allgather(2)
    for gpu in content["gpus"]:
        gpu["channels"][0]["connected_to"] *= 2
        gpu["threadblocks"][0]["channels"][0]["channel_ids"] = [1]
    found = read_plan(written(tmp_path, content))
    assert found.gpus[0][0][1].ends == (End("memory", 1, 1, 1),)
    assert found.gpus[1][0][2].ends == (End("memory", 0, 1, 1),)


@pytest.mark.parametrize("name", NOT_MODELLED)
def test_what_is_not_modelled_is_refused_by_name(name, refused):
    content = allreduce(2)
    content["gpus"][1]["threadblocks"][0]["ops"][3] = {"name": name, "anything": []}
    where = f"GPU 1, thread block 0, operation 3 ({name})"
    refused(content, Unsupported, where, NOT_MODELLED[name])


@pytest.mark.parametrize("name", ("fence", None, 3, "x" * 99))
def test_an_unknown_operation_is_refused_by_name(name, refused):
    content = allreduce(2)
    content["gpus"][1]["threadblocks"][0]["ops"][2] = {"name": name}
    shown = repr(name)[:40]
    refused(content, InvalidArgument, f"thread block 0, operation 2: {shown}: expected one of copy")


def changed(content, *path):
    """Return a plan in which the value at the path, the last of the words, is another one."""
    *keys, last, value = path
    at = content
    for key in keys:
        at = at[key]
    at[last] = value
    return content


FIRST = ("gpus", 0, "threadblocks", 0, "ops")


@pytest.mark.parametrize(
    "path, text",
    [
        ((*FIRST, 3, "src_buff", 1, "buffer_id", 9), "(rres): src_buff: remote buffer 9: expected"),
        ((*FIRST, 3, "src_buff", 1, "index", 2), "1 chunks from 2 on: the input of GPU 1 has 2"),
        ((*FIRST, 3, "src_buff", 0, "size", 2), "(rres): unequal sizes"),
        ((*FIRST, 3, "src_buff", 0, "size", 0), "0 chunks from 0 on"),
        ((*FIRST, 3, "src_buff", 0, "type", "x"), "src_buff[0].type is 'x'"),
        ((*FIRST, 3, "src_buff", []), "0 in src_buff and 2 in dst_buff are not those of a rres"),
        ((*FIRST, 3, "name", "rre"), "2 in dst_buff are not those of a rre"),
        ((*FIRST, 3, "name", "res"), "(res): src_buff: expected a local buffer"),
        ((*FIRST, 3, "channel_type", "port"), "(rres): channel_type 'port': expected memory"),
        ((*FIRST, 3, "reduce_op", "prod"), "(rres): reduce_op is 'prod'"),
        (
            (*FIRST, 3, "reduce_op", "max"),
            "GPU 1, thread block 0, operation 3 (rres): reduce_op 'sum': expected 'max', as of "
            "GPU 0, thread block 0, operation 3 (rres)",
        ),
        (("protocol", "ll" * 99), f"protocol '{'ll' * 20}': expected Simple or LL"),
        (("protocol", ""), "protocol '': expected Simple or LL"),
        (
            ("gpus", 0, "remote_buffers", 0, "access_channel_types", []),
            "GPU 0, remote buffer 0: access_channel_types []: expected memory or port",
        ),
        (
            ("gpus", 1, "remote_buffers", 2, "access_channel_types", ["port"]),
            "GPU 1, thread block 0: remote buffer 2 by memory channels: expected its "
            "access_channel_types, port",
        ),
        ((*FIRST, 3, "other", 1), "(rres): other is unknown"),
        ((*FIRST, 0, "channel_ids", [1]), "(rlxsignal): channel 1: expected one of 1, from 0"),
        ((*FIRST, 0, "channel_ids", []), "(rlxsignal): ids []: expected different ones"),
        ((*FIRST, 0, "channel_ids", [0, 0]), "(rlxsignal): ids [0, 0]"),
        ((*FIRST, 0, "channel_type", "none"), "(rlxsignal): channel_type 'none'"),
        ((*FIRST, 0, {"name": "sem_acquire", "semaphore_ids": [2]}), "(sem_acquire): semaphore 2"),
        (
            (*FIRST, 0, {"name": "barrier", "barrier_id": 0, "num_threadblocks": 2}),
            "operation 0 (barrier): 2 thread blocks, but 1 come to barrier 0",
        ),
        (("gpus", 0, "threadblocks", 0, "id", 1), "GPU 0, thread block 0: id 1: expected 0"),
        (("gpus", 1, "id", 0), "GPU 1: id 0: expected 1"),
        (("gpus", 0, "channels", 0, "connected_to", [2]), "GPU 0: a channel to GPU 2"),
        (("gpus", 0, "remote_buffers", 0, "rank", 2), "(rres): src_buff: a buffer of GPU 2"),
        (("gpus", 1, "input_chunks", 4), "GPU 1: input_chunks 4 and output_chunks 2 are not those"),
        (("gpus", 1, "scratch_chunks", 1 << 20), "GPU 1: chunks"),
        (("gpus", []), "no gpus"),
        (("gpus", 0, "threadblocks", 0, {"id": 0}), "gpus[0].threadblocks[0].ops is missing"),
        (("inplace", 1), "inplace is 1: expected true or false"),
        (("more", 1), "more is unknown"),
        (("inplace", False), "(rres): writes the input, in a plan that is not in place"),
    ],
)
def test_wrong_values_are_refused_with_their_place(path, text, refused):
    refused(changed(allreduce(2), *path), InvalidArgument, text)


@pytest.mark.parametrize(
    "path, text",
    [
        (("collective", "sendrecv"), "collective 'sendrecv': expected allreduce"),
        (("protocol", "LL"), "protocol 'LL': packets (LL) are not modelled: expected Simple"),
        (("reuse_resources", True), "reuse_resources is not modelled"),
        (
            ("gpus", 0, "channels", 0, "channel_type", "switch"),
            "'switch' channels are not modelled",
        ),
        (("gpus", 0, "semaphores", 1, "init_value", 1), "semaphore 1: init_value 1"),
        ((*FIRST, 3, "tbg_info", {"tb_id": 0, "tbg_size": 2}), "thread block groups are not"),
        ((*FIRST, 3, "src_buff", 0, "switch_channel_id", 0), "switch channels are not modelled"),
        (
            ("gpus", 0, "threadblocks", 0, "channels", 0, "channel_type", "x" * 99),
            f"GPU 0, thread block 0: '{'x' * 40}' channels are not modelled: expected memory or",
        ),
        (
            ("gpus", 0, "threadblocks", 0, "remote_buffer_refs", 0, "access_channel_type", "none"),
            "GPU 0, thread block 0: 'none' channels are not modelled: expected memory or port",
        ),
        (
            ("gpus", 0, "remote_buffers", 2, "access_channel_types", ["port", "nonsense"]),
            "GPU 0, remote buffer 2: 'nonsense' channels are not modelled: expected memory or port",
        ),
    ],
)
def test_values_that_are_not_modelled_are_refused_by_name(path, text, refused):
    refused(changed(allreduce(2), *path), Unsupported, text)


def test_port_channels_are_those_of_the_targets(refused):
    content = allgather(4, "port")
    put = next(op for op in content["gpus"][0]["threadblocks"][0]["ops"] if op["name"] == "put")
    put["channel_ids"] = [0, 2, 1]
    refused(content, InvalidArgument, "operation 4 (put): channel_ids are not those to the GPUs")
    put["channel_type"] = "memory"
    put["name"] = "pws"
    refused(content, InvalidArgument, "operation 4 (pws): channel_type 'memory': expected port")


def test_a_copy_within_a_gpu_is_by_no_channel(refused):
    content = alltoall(2)
    copy, *_ = content["gpus"][0]["threadblocks"][1]["ops"]
    copy["channel_type"] = "nonsense"
    refused(content, InvalidArgument, "(copy): channel_type 'nonsense': expected none")


def test_what_is_no_plan_is_refused(tmp_path):
    for text, found in (("{", "is not JSON"), ("[]", "expected an object"), ("{}", "is missing")):
        path = tmp_path / "plan.json"
        path.write_text(text)
        with pytest.raises(InvalidArgument, match=found):
            read_plan(path)
    with pytest.raises(InvalidArgument, match="No such file"):
        read_plan(tmp_path / "none.json")


def test_a_plan_for_a_huge_proof_is_refused(tmp_path):
    content = alltoall(2)
    for gpu in content["gpus"]:
        gpu["input_chunks"] = gpu["output_chunks"] = gpu["scratch_chunks"] = 1 << 15
        copy, *_ = gpu["threadblocks"][1]["ops"]
        for ref in (*copy["src_buff"], *copy["dst_buff"]):
            ref.update(index=0, size=1 << 15)
        gpu["threadblocks"][1]["ops"] = [copy] * 9
    with pytest.raises(Unsupported, match="more than 262144 chunks and words"):
        read_plan(written(tmp_path, content))


def test_a_plan_of_too_many_thread_blocks_is_refused(refused):
    content = allreduce(2)
    blocks = content["gpus"][0]["threadblocks"]
    blocks += [{"id": t, "ops": [], "channels": []} for t in range(1, 4097)]
    refused(content, Unsupported, "4098 thread blocks: expected up to 4096")
    barrier = {"name": "barrier", "barrier_id": 0, "num_threadblocks": 1 << 18}
    blocks[1:] = [{"id": 1, "ops": [barrier], "channels": []}]
    refused(content, Unsupported, "GPU 0, thread block 1, operation 0 (barrier): more than 262144")


def test_a_plan_of_too_many_gpus_or_chunks_is_refused(refused):
    content = allreduce(2)
    one = {**content["gpus"][0], "threadblocks": [], "input_chunks": 1, "output_chunks": 1}
    content["gpus"] = [{**one, "id": g} for g in range(1025)]
    refused(content, Unsupported, "1025 GPUs: expected up to 1024")
    content["gpus"] = [{**one, "id": g, "input_chunks": 1 << 15} for g in range(9)]
    for gpu in content["gpus"]:
        gpu["output_chunks"] = 1 << 15
    refused(content, Unsupported, "GPU 4: more than 262144 chunks and words in all")


def test_every_value_of_a_plan_may_be_of_another_type(tmp_path):
    """Whatever stands in the file, the error is one of the package."""
    content = alltoall(2)

    def values(at):
        for key in list(at) if isinstance(at, dict) else range(min(len(at), 5)):
            old = at[key]
            for new in (None, -1, 1 << 70, "x", [], {}):
                at[key] = new
                yield
            at[key] = old
            if isinstance(old, (dict, list)) and old is not content["gpus"][1]:
                yield from values(old)

    refusals = 0
    for _ in values(content):
        try:
            read_plan(written(tmp_path, content))
        except MpidistError as error:
            assert "plan.json" in str(error)
            refusals += 1
    assert refusals > 500
