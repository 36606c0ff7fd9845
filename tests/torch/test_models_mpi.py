"""Models with random weights, data parallel: the backend "mpidist" beside gloo and one process.

Each is trained for some steps by one process on the whole batch, which every rank is, and in
parallel on a part of it: by DistributedDataParallel over both backends, and by mpidist's wrapper.
In float64, since AdamW enlarges the rounding of gradients that are nearly zero.
"""

import copy
from datetime import timedelta

import pytest

from mpidist import Pipeline, partition
from mpidist.parallel import DDP
from tests.support.training_kits import NEEDS_TORCH, torch

pytestmark = [
    pytest.mark.skipif(torch is None, reason=NEEDS_TORCH),
    pytest.mark.filterwarnings("ignore"),
]
if torch is not None:
    import torch.distributed as dist
    from torch import nn

    import mpidist.torch
    from mpidist.bench import models as ours

STEPS, EACH, WORDS, LENGTH = 3, 2, 32, 6
RANKS = 4  # on which models of transformers are trained: its import takes seconds
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
NEEDS_TRANSFORMERS = "needs transformers, of the extra integrations"


@pytest.fixture(scope="module")
def gloo():
    """A group of gloo with all ranks, beside the default group of "mpidist"."""
    dist.init_process_group("mpidist", timeout=timedelta(seconds=40))
    yield dist.new_group(backend="gloo")
    dist.destroy_process_group()


# -- models: a net, the data of all ranks and steps, and a loss -----------------------------------


def words(samples):
    made = torch.Generator().manual_seed(5)
    return torch.randint(WORDS, (STEPS, samples, LENGTH + 1), generator=made)


def pictures(samples, size):
    made = torch.Generator().manual_seed(5)
    return torch.randn(STEPS, samples, 3, size, size, generator=made, dtype=torch.float64)


def scores(output):
    """Return the scores that a model of transformers, or of ours, has returned."""
    return getattr(output, "logits", output)


def next_words(model, x):
    found = scores(model(x[:, :-1]))
    return nn.functional.cross_entropy(found.flatten(0, 1), x[:, 1:].flatten())


def classes(model, x):
    """Return the loss of a classifier; the class says whether a sum is odd."""
    return nn.functional.cross_entropy(scores(model(x)), x.flatten(1).sum(1).long() % 2)


def gpt2(samples):
    from transformers import GPT2Config, GPT2LMHeadModel

    size = {"n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, **size, **drop)), words(samples), next_words


def bert(samples):
    from transformers import BertConfig, BertForSequenceClassification

    drop = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    config = BertConfig(vocab_size=WORDS, **SMALL, **drop)
    return BertForSequenceClassification(config), words(samples), classes


def vit(samples):
    from transformers import ViTConfig, ViTForImageClassification

    drop = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    config = ViTConfig(**SMALL, **drop, image_size=8, patch_size=4)
    return ViTForImageClassification(config), pictures(samples, 8), classes


def resnet(samples):
    """A residual network; its batch norms see the samples of one rank."""
    layers = [ours.Residual(4, 4, 1), ours.Residual(4, 8, 2)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)]
    net = nn.Sequential(*ours.convolution(3, 4, 3, 1), nn.ReLU(), *layers, *head)
    return net, pictures(samples, 6), classes


def lstm(samples):
    return ours.Recurrent(WORDS, 16), words(samples), next_words


def mixture(samples):
    """A mixture of experts, of which a step uses some on no rank, or on one only."""
    made = torch.Generator().manual_seed(5)
    x = torch.randn(STEPS, samples, 4, generator=made, dtype=torch.float64)
    return ours.Experts(4, 8, 4), x, lambda model, x: nn.functional.mse_loss(model(x), x.flip(1))


# -- training -------------------------------------------------------------------------------------


def train(model, loss, batches):
    """Train; return the losses, the last one of evaluation, and parameters and buffers by name.

    DistributedDataParallel makes the ranks' buffers equal when the next forward begins.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for x in batches:
        optimizer.zero_grad()
        found = loss(model, x)
        found.backward()
        optimizer.step()
        losses.append(found.item())
    with torch.no_grad():
        losses.append(loss(model.eval(), batches[0]).item())
    net = getattr(model, "module", model)
    return losses, {name: value.clone() for name, value in net.state_dict().items()}


def made(model, samples):
    """Return the net in float64, the data and the loss of a model: the same on each rank."""
    torch.manual_seed(3)
    net, data, loss = model(samples)
    return net.double(), data, loss


def same(found, wanted, tolerance):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def in_parallel(comm, gloo, net, loss, data, **options):
    """Return what `train` returns: over "mpidist", over gloo, and with mpidist's wrapper."""
    mine = data[:, EACH * comm.rank : EACH * (comm.rank + 1)]
    ended = []
    for group in (None, gloo):
        model = nn.parallel.DistributedDataParallel(
            copy.deepcopy(net), process_group=group, **options
        )
        ended.append(train(model, loss, mine))
    model = DDP(copy.deepcopy(net), comm, **options)
    ended.append(train(model, loss, mine))
    model.close()
    return ended


def as_over_gloo(comm, ended):
    """Sums of two are the same bits in any order; those of more differ by rounding."""
    (losses, state), (over_gloo, reference), (wrapped, ours) = ended
    tolerance = 0 if comm.size <= 2 else 1e-9
    assert losses == pytest.approx(over_gloo, rel=tolerance, abs=tolerance)
    assert wrapped == pytest.approx(over_gloo, rel=tolerance, abs=tolerance)
    same(state, reference, tolerance)
    same(ours, reference, tolerance)


def as_one_process(comm, ended, wanted):
    losses, state = wanted
    for found, parameters in ended:
        same(parameters, state, 1e-9)
        mean = comm.allreduce(torch.tensor(found, dtype=torch.float64).numpy(), op="mean")
        assert mean == pytest.approx(losses, rel=1e-9)


@pytest.mark.parametrize("model", [gpt2, bert, vit, lstm, mixture], ids=lambda m: m.__name__)
def test_model(comm, gloo, model):
    if model in (gpt2, bert, vit):
        if comm.size != RANKS:
            pytest.skip(f"needs exactly {RANKS} ranks")
        pytest.importorskip("transformers", reason=NEEDS_TRANSFORMERS)
    net, data, loss = made(model, EACH * comm.size)
    options = {"find_unused_parameters": True} if model is mixture else {}
    ended = in_parallel(comm, gloo, net, loss, data, **options)
    as_over_gloo(comm, ended)
    as_one_process(comm, ended, train(copy.deepcopy(net), loss, data))


def test_batch_norm(comm, gloo):
    """Each rank's own means and variances; the running ones are those of rank 0."""
    net, data, loss = made(resnet, EACH * comm.size)
    as_over_gloo(comm, in_parallel(comm, gloo, net, loss, data))


def test_batch_norm_over_all_ranks(comm, gloo):
    """Means and variances of the whole batch, as one process has them."""
    net, data, loss = made(resnet, EACH * comm.size)
    synced = mpidist.torch.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(net), comm)
    ended = in_parallel(comm, gloo, synced, loss, data)
    as_over_gloo(comm, ended)
    as_one_process(comm, ended, train(net, loss, data))


# -- stages ---------------------------------------------------------------------------------------


def masked_bert(samples):
    """BERT with the head that is tied to its words, and a mask for each sample."""
    from transformers import BertConfig, BertForMaskedLM

    drop = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    size = {**SMALL, "num_hidden_layers": RANKS - 1, "hidden_size": 8, "vocab_size": WORDS}
    ids = words(samples)[0]
    mask = (torch.arange(LENGTH + 1) < torch.arange(samples).unsqueeze(1) % 3 + LENGTH - 1).long()
    batch = {"attention_mask": mask, "input_ids": ids}
    return BertForMaskedLM(BertConfig(**size, **drop)), batch, ids.roll(1, 1)


def deep_vit(samples):
    from transformers import ViTConfig, ViTForImageClassification

    drop = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    size = {**SMALL, "num_hidden_layers": RANKS - 1, "hidden_size": 8}
    config = ViTConfig(**size, **drop, image_size=8, patch_size=4)
    batch = {"pixel_values": pictures(samples, 8)[0]}
    return ViTForImageClassification(config), batch, torch.arange(samples) % 2


def part_of(batch, k):
    return {name: x[EACH * k : EACH * (k + 1)] for name, x in batch.items()}


@pytest.mark.parametrize("model", [masked_bert, deep_vit], ids=lambda m: m.__name__)
def test_stages(comm, model):
    """Traced and cut, trained with GPipe and on with 1F1B, as by one process."""
    if comm.size != RANKS:
        pytest.skip(f"needs exactly {RANKS} ranks")
    pytest.importorskip("transformers", reason=NEEDS_TRANSFORMERS)
    net, batch, labels = made(model, EACH * RANKS)
    alone = copy.deepcopy(net)
    parts = partition(net, RANKS, example=part_of(batch, 0), verbose=False)
    stage, last = parts[comm.rank], comm.rank == RANKS - 1
    if model is masked_bert:
        assert parts.tied == {"bert.embeddings.word_embeddings.weight": (0, RANKS - 1)}
    assert set().union(*[part.state_dict() for part in parts]) == set(net.state_dict())

    def loss_of(output, target):
        return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())

    loss_of.reduction = "mean"
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (stage, alone)]
    for schedule in ("gpipe", "1f1b"):
        pipe = Pipeline(stage, comm, RANKS, schedule)
        for _ in range(2):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = pipe.step(batch, labels, loss_of if last else None)
            wanted = loss_of(alone(**batch).logits, labels)
            wanted.backward()
            assert loss == pytest.approx(wanted.item(), rel=1e-10)
            for optimizer in optimizers:
                optimizer.step()
        pipe.close()
    state = alone.state_dict()
    same(stage.state_dict(), {name: state[name] for name in stage.state_dict()}, 1e-10)
