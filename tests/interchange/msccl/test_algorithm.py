"""MSCCL files as algorithms: proved as they claim, registered, and run on simulated ranks."""

import re
import threading

import numpy as np
import pytest

import mpidist
from mpidist.errors import InvalidArgument, MpidistError, ScheduleError, Unsupported
from mpidist.interchange.msccl.algorithm import import_msccl
from mpidist.schedule import prove
from mpidist.schedule.registry import describe, unregister
from tests.support.msccl import GOLDEN, all_pairs, one_block, xml


@pytest.fixture
def imported(tmp_path):
    made = []

    def imported(text, name="small.xml"):
        # Ranks that are threads share the folder: none may read what another is writing.
        path = tmp_path / name
        written = tmp_path / f"{name}.{threading.get_ident()}"
        written.write_text(text, encoding="utf-8")
        found = import_msccl(written.replace(path))
        made.append(found.algorithm)
        return found

    yield imported
    for algorithm in made:
        unregister(algorithm.collective, algorithm.name)


def two_hops():
    """Return an alltoall of 4 GPUs, two by two: through scratch, where chunks wait for others."""
    gpus = []
    for r in range(4):
        near, far = r ^ 1, r ^ 2
        first = [f"s i{near}", f"s i{near ^ 2}", "r s0", "r s1 told"]
        second = [f"s i{far}", "s s1 after1.3", f"r o{far}", f"r o{far ^ 1}"]
        local = [f"cpy i{r} o{r}", f"cpy s0 o{near} after1.3"]
        gpus.append([(-1, -1, 0, local), (near, near, 0, first), (far, far, 1, second)])
    return xml("alltoall", 4, gpus, scratch=2)


def run(algorithm, size, counts):
    """Compare a call's results on simulated ranks with those of another algorithm, bit for bit."""

    def work(comm):
        for count in counts:
            x = (np.arange(count) + 100 * comm.rank).astype(np.int64)
            call = getattr(comm, algorithm.collective)
            assert np.array_equal(call(x, algorithm=algorithm.name), call(x)), count
        return True

    assert mpidist.run_simulated(size, work) == [True] * size


def test_import_offers_the_golden_file_under_its_name(imported):
    algorithm, proof = imported(GOLDEN, "pair.xml")
    assert algorithm.label == "allreduce pair.xml" and not algorithm.equal_blocks
    assert (proof.rounds, proof.messages, proof.identical) == (2, 4, True)
    told = describe(algorithm)
    assert (told["rounds"], told["bytes_per_rank"]) == ("2", "1 n")
    assert told["summary"] == "MSCCL's pair (LL), 4 messages." and told["requires"] == "2 ranks"
    run(algorithm, 2, (0, 1, 7, 1000))


@pytest.mark.mpi(min_size=2)
def test_an_imported_algorithm_serves_calls(comm, imported):
    algorithm, _ = imported(all_pairs(comm.size))
    x = np.arange(11.0) + comm.rank
    expected = comm.allreduce(x, algorithm="ring")
    for call in (comm.allreduce, lambda *a, **k: comm.iallreduce(*a, **k).wait()):
        assert np.allclose(call(x, algorithm=algorithm.name), expected)
    assert np.allclose(comm.allreduce(x, out=x, algorithm=algorithm.name), expected)


def test_import_refuses_other_numbers_of_ranks(imported):
    imported(GOLDEN, "pair.xml")
    with pytest.raises(Unsupported, match=r"pair\.xml: 3 ranks: expected 2 ranks"):
        prove("allreduce", "pair.xml", 3)


@pytest.mark.parametrize("inplace", [False, True])
def test_import_of_all_pairs_needs_no_copies(imported, inplace):
    algorithm, proof = imported(all_pairs(4, inplace))
    assert (proof.rounds, proof.messages, algorithm.equal_blocks) == (2, 24, False)
    run(algorithm, 4, (1, 10, 64))


@pytest.mark.parametrize("inplace", [False, True])
def test_import_finds_each_dependency_that_is_left_out(imported, inplace):
    text = all_pairs(3, inplace)
    places = [m.span() for m in re.finditer(r'depid="[0-9]+" deps="[0-9]+"', text)]
    assert len(places) == 12
    for start, end in places:
        with pytest.raises(ScheduleError, match=r"small\.xml, lines \d+, \d+: these steps use"):
            imported(f'{text[:start]}depid="-1" deps="-1"{text[end:]}')


def test_import_of_scratch_that_stays_needs_equal_blocks(imported):
    algorithm, proof = imported(two_hops())
    assert algorithm.equal_blocks and proof.messages == 16
    run(algorithm, 4, (4, 64))


def test_equal_blocks_refuse_a_count_that_they_do_not_divide(imported):
    # Both chunks go through scratch, in each other's place.
    steps = ["cpy i0 s1 n1", "cpy i1 s0", "s s0 n2", "r s2 n2"]
    back = ["cpy s3 o0", "cpy s2 o1"]
    gpus = one_block(2, lambda r: [*steps, *back])
    with pytest.raises(ScheduleError, match="ends with a value that lacks"):
        imported(xml("allreduce", 2, gpus, scratch=4))  # it moves only
    text = xml("allgather", 4, one_block(2, lambda r: _swapped(r)), sizes=(2, 4), scratch=4)
    algorithm, _ = imported(text)
    assert algorithm.equal_blocks
    run(algorithm, 2, (2, 8))
    told = "needs a number of elements that 4 divides"

    def work(comm):
        with pytest.raises(Unsupported, match=told):
            comm.allgather(np.ones(3), algorithm=algorithm.name)
        return True

    assert mpidist.run_simulated(2, work) == [True, True]


def _swapped(rank):
    own, other = 2 * rank, 2 - 2 * rank
    copies = [f"cpy i0 o{own} n2", "cpy i0 s1", "cpy i1 s0"]
    return [*copies, "s s0 n2", "r s2 n2", f"cpy s3 o{other}", f"cpy s2 o{other + 1}"]


def test_import_proves_each_claim_of_a_file(imported):
    # In place the own part is where it belongs; out of place nobody has copied it.
    gpus = one_block(2, lambda r: ["s i0", f"r o{1 - r}"])
    imported(xml("allgather", 2, gpus, sizes=(1, 2), inplace=1, outofplace=0))
    with pytest.raises(ScheduleError, match=r"small\.xml: .*tmp"):
        imported(xml("allgather", 2, gpus, sizes=(1, 2), inplace=1, outofplace=1))


def test_import_refuses_to_write_an_input_that_is_kept(imported):
    text = GOLDEN.replace('outofplace="0"', 'outofplace="1"')
    with pytest.raises(ScheduleError, match="line 6: writes 'i', the input"):
        imported(text)


def test_import_keeps_the_operand_of_rrs_where_it_is_read_later(imported):
    gpus = [
        [(1, -1, 0, ["s i0"]), (2, 2, 1, ["s i0", "r o0"])],
        [(2, 0, 0, ["rrs i0 told"]), (-1, 2, 1, ["rrc i0 o0 after0.0"])],
        [(1, 0, 1, ["rrs i0 told"]), (0, 1, 0, ["rrcs i0 o0 after0.0"])],
    ]
    gpus[0][1] = (2, -1, 1, ["s i0"])
    gpus[0].append((-1, 2, 0, ["r o0"]))
    algorithm, proof = imported(xml("allreduce", 1, gpus))
    assert algorithm.equal_blocks and proof.reductions == 4
    run(algorithm, 3, (5,))


def test_import_of_a_wrong_sum_is_a_counterexample(imported):
    with pytest.raises(ScheduleError, match=r"small\.xml: rank 0, .*lacks rank 0"):
        imported(
            GOLDEN.replace(
                'type="rrcs" srcbuf="i" srcoff="0"', 'type="rcs" srcbuf="i" srcoff="0"', 1
            )
        )


def test_import_refuses_the_name_of_another_file(imported, tmp_path):
    imported(GOLDEN, "pair.xml")
    imported(GOLDEN, "pair.xml")  # again is the same
    (tmp_path / "b").mkdir()
    other = tmp_path / "b" / "pair.xml"
    other.write_text(GOLDEN, encoding="utf-8")
    with pytest.raises(
        InvalidArgument, match="an allreduce algorithm 'pair.xml': expected another"
    ):
        import_msccl(other)
    with pytest.raises(InvalidArgument, match="'ring': expected another name"):
        import_msccl(other, name="ring")
    with pytest.raises(MpidistError, match="auto"):
        import_msccl(other, name="auto")
    found = import_msccl(other, name="mine")
    unregister("allreduce", found.algorithm.name)


def test_import_says_where_sums_differ_between_ranks(imported):
    # Each GPU adds what comes, in another order.
    def blocks(r):
        peers = [p for p in range(3) if p != r]
        local = ["cpy i0 o0", "nop after2.1", "re s0 o0 after1.1", "re s1 o0"]
        each = [(p, p, 0, ["s i0", f"r s{k} told"]) for k, p in enumerate(peers)]
        return [(-1, -1, 0, local), *each]

    algorithm, proof = imported(xml("allreduce", 1, [blocks(r) for r in range(3)], scratch=2))
    assert not proof.identical
    assert "Sums may differ in the last bit between ranks." in algorithm.summary
