"""States of the stages of a pipeline: saved by stage, and dealt anew to other numbers."""

import numpy as np
import pytest

from mpidist import Checkpoint, Pipeline, run_simulated
from mpidist.errors import CheckpointError, InvalidArgument
from mpidist.nn import Linear, ReLU, Sequential
from mpidist.parallel import DDP
from mpidist.topology import Grid
from tests.support.training_kits import KITS, torch


def layers_of(kit, seed):
    """Twelve layers, of which every second has parameters."""
    if kit.name == "torch":
        torch.manual_seed(seed)
        return [torch.nn.Tanh() if k % 2 else torch.nn.Linear(6, 6) for k in range(12)]
    source = np.random.default_rng(seed)
    return [ReLU() if k % 2 else Linear(6, 6, seed=source) for k in range(12)]


def staged(comm, kit, layers, chunks=1, **options):
    """A pipeline of the layers, one after another, with as many chunks on each rank."""
    count = comm.size * chunks
    kind = torch.nn.Sequential if kit.name == "torch" else Sequential
    cuts = [len(layers) * k // count for k in range(count + 1)]
    stages = [kind(*layers[a:b]) for a, b in zip(cuts, cuts[1:])]
    mine = [stages[comm.rank + k * comm.size] for k in range(chunks)]
    if options.pop("names", False):  # which makes of it something else than layers in a row
        mine = [type("Own", (kind,), {})(*stage.layers) for stage in mine]
    schedule = "interleaved" if chunks > 1 else "1f1b"
    return Pipeline(mine if chunks > 1 else mine[0], comm, comm.size, schedule, **options)


def bits_of(comm, kit, layers, pipe):
    """The parameters of all layers, each from the rank that holds it."""
    held = {id(p) for m in pipe._numbered().values() for p in m.parameters()}
    mine = {}
    for k, layer in enumerate(layers):
        values = [np.array(kit.values(layer)[i]).tobytes() for i in range(2 - 2 * (k % 2))]
        if any(id(p) in held for p in layer.parameters()):
            mine[k] = values
    return {k: v for each in comm.allgather_object(mine) for k, v in each.items()}


def write_pipeline(comm, kit, folder):
    layers = layers_of(kit, comm.rank)
    pipe = staged(comm, kit, layers)
    optimizer = {"moments": np.full(3, comm.rank)}
    Checkpoint(folder, comm).save(1, pipe=pipe, per_rank={"optimizer": optimizer})
    return bits_of(comm, kit, layers, pipe)


def read_pipeline(comm, kit, folder, chunks=1):
    layers = layers_of(kit, 99)
    pipe = staged(comm, kit, layers, chunks)
    Checkpoint(folder, comm).load(pipe=pipe, skip=["optimizer"])
    return bits_of(comm, kit, layers, pipe)


def read_as_something_else(comm, kit, folder, stages):
    """What is not layers in a row cannot be dealt anew: it says what was saved, and is here."""
    layers = layers_of(kit, 99)
    pipe, checkpoint = staged(comm, kit, layers, names=True), Checkpoint(folder, comm)
    said = rf"rank {comm.rank}: .*\b{stages} stages .*\blayers\b"
    with pytest.raises(InvalidArgument, match=said):
        checkpoint.load(pipe=pipe, skip=["optimizer"])
    shorter = staged(comm, kit, layers[:-1])
    with pytest.raises(InvalidArgument, match=said):
        checkpoint.load(pipe=shorter, skip=["optimizer"])
    with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: .*state .*Pipeline"):
        pipe.load_state_dict({})
    said = rf"optimizer .*per rank, .*\b{stages} ranks.*\b{comm.size}\b"
    with pytest.raises(CheckpointError, match=said):
        checkpoint.load(pipe=shorter)


@pytest.mark.ranks(3, 4)
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kit", KITS)
def test_pipeline_is_saved_by_stage(comm, kit, folder):
    """Each rank has stages of its own, of equal shapes."""
    wanted = write_pipeline(comm, kit, folder)
    assert len(wanted) == 6
    assert read_pipeline(comm, kit, folder) == wanted
    assert read_pipeline(comm, kit, folder, chunks=2) == wanted
    found = Checkpoint(folder, comm).load()
    assert (found["optimizer"]["moments"] == comm.rank).all()
    assert len(found["pipe"]["by_stage"]) == comm.size
    layers, others = layers_of(kit, comm.rank), layers_of(kit, 99)
    own = staged(comm, kit, layers).state_dict()
    staged(comm, kit, others).load_state_dict(own)
    first = 12 * comm.rank // comm.size
    first += first % 2  # a layer with parameters
    values = [kit.values(part[first]) for part in (layers, others)]
    np.testing.assert_array_equal(*(np.array(each[0]) for each in values))
    said = rf"rank {comm.rank}: .* of {comm.size}, without \["
    with pytest.raises(InvalidArgument, match=said):
        staged(comm, kit, others, chunks=2).load_state_dict(own)


@pytest.mark.ranks(4)
@pytest.mark.mpi(min_size=4)
def test_replicas_of_stages_are_saved_once(comm, folder):
    """On a grid each stage is saved once; it loads into stages without a DDP as well."""
    if comm.size % 2:
        pytest.skip("needs an even number of ranks")
    kit = KITS[0].values[0]
    grid = Grid(comm, pipe=2)
    stage = Sequential(*layers_of(kit, grid.pipe_index)[:6])
    model = DDP(stage, grid.data, overlap="none")
    pipe = Pipeline(model, grid.pipe, 2)
    Checkpoint(folder, grid).save(1, pipe=pipe)
    bare = Sequential(*layers_of(kit, 99)[:6])
    other = Pipeline(bare, grid.pipe, 2)
    for again in (other, pipe):
        Checkpoint(folder, grid).load(pipe=again)
    for mine, saved in zip(bare.parameters(), stage.parameters(), strict=True):
        np.testing.assert_array_equal(mine.data, saved.data)
    stage.parameters()[0].data[0, 0] += grid.data_index
    with pytest.raises(CheckpointError, match=r"pipe/by_stage/\d/state/module/0\.weight .*rank"):
        Checkpoint(folder, grid).save(2, pipe=pipe)


@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("before, after, chunks", ((3, 2, 1), (2, 3, 2), (4, 2, 2)))
def test_pipeline_on_other_numbers_of_stages_has_the_same_bits(
    kit, before, after, chunks, tmp_path
):
    """The layers are dealt anew: the whole model has the bits that it had."""
    saved = run_simulated(before, lambda comm: write_pipeline(comm, kit, tmp_path))
    found = run_simulated(after, lambda comm: read_pipeline(comm, kit, tmp_path, chunks))
    assert len({repr(sorted(bits.items())) for bits in (*saved, *found)}) == 1


def test_pipeline_that_cannot_be_dealt_anew_is_refused(tmp_path):
    kit = KITS[0].values[0]
    run_simulated(3, lambda comm: write_pipeline(comm, kit, tmp_path))
    run_simulated(2, lambda comm: read_as_something_else(comm, kit, tmp_path, 3))
