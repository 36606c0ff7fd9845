"""The models of the benchmark, made small."""

import pytest

from mpidist.bench.training import CHECK, CHECKED, COMMIT, COMMITTED, OUR_DDP
from tests.support.bench_kits import check_rows
from tests.support.training_kits import NEEDS_TORCH, torch


@pytest.mark.long
@pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)
def test_model_steps_of_each_model(comm, monkeypatch):
    from mpidist.bench import models
    from mpidist.bench.training import model_steps
    from mpidist.commands.bench.ddp import MODEL_NAMES

    assert tuple(models.MODELS) == MODEL_NAMES
    small = {
        "gpt2": lambda: (models.Language(True, 20, 64, 1), language),
        "bert": lambda: (models.Language(False, 20, 64, 1), classifier),
        "lstm": lambda: (models.Recurrent(20, 8), language),
        "moe": lambda: (models.Experts(4, 8, 4), experts),
    }
    words = torch.arange(6).reshape(2, 3) + comm.rank

    def language(model):
        return torch.nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten())

    def classifier(model):
        return torch.nn.functional.cross_entropy(model(words), words[:, 0] % 2)

    def experts(model):
        return model(torch.ones(3, 4)).pow(2).mean()

    names = [OUR_DDP, "no communication"]
    if comm.size > 1:
        names += ["torch DDP over mpidist, views"]
        names += ["torch DDP over gloo, views", "torch DDP over gloo"]
    for name, make in small.items():
        monkeypatch.setitem(models.MODELS, name, make)
        more = name == "gpt2"
        rows, stats = model_steps(comm, 2, name, checked=more, elastic=more)
        ours = [CHECKED, CHECK, COMMITTED, COMMIT] * more
        check_rows(comm, rows, [*names[:2], *ours, *names[2:]])
        assert rows[0].work.startswith(f"step, {name} of ") and stats.steps >= 5
    net, loss = models.resnet18()
    assert sum(p.numel() for p in net.parameters()) == 11_173_962 and loss(net).isfinite()
