"""Training by transformers, Accelerate and Lightning over the backend "mpidist": the examples.

Each step of an example uses all samples, half of them on each rank, so that one process and a plain
loop are the same training.
"""

import os
import runpy
from pathlib import Path

import pytest

from tests.support.training_kits import NEEDS_TORCH, torch

pytestmark = [
    pytest.mark.skipif(torch is None, reason=NEEDS_TORCH),
    pytest.mark.filterwarnings("ignore"),
]
if torch is not None:
    import torch.distributed as dist

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RANKS, ROWS, STEPS = 2, 64, 50


@pytest.fixture
def run(comm, tmp_path, monkeypatch):
    """Return a function that runs an example on this rank, and returns its variables."""
    if comm.size != RANKS:  # importing the libraries takes seconds
        pytest.skip(f"needs exactly {RANKS} ranks")
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)

    def example(library, name):
        needed(library)
        return runpy.run_path(str(EXAMPLES / name))

    yield example
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()  # Lightning changes MASTER_PORT, by which the next group would meet
    os.environ.update(before)


def needed(library):
    return pytest.importorskip(library, reason=f"needs {library}, of the extra integrations")


def line():
    """Return the weights of the examples' regression after a loop in one process."""
    torch.manual_seed(0)
    model, x = torch.nn.Linear(4, 1), torch.randn(ROWS, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    return model.state_dict()


def same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)


def test_accelerate(run):
    found = run("accelerate", "torch_accelerate.py")
    assert isinstance(found["model"], torch.nn.parallel.DistributedDataParallel)
    assert found["accelerator"].num_processes == RANKS and len(found["loader"]) == 1
    same(found["model"].module.state_dict(), line())


@pytest.mark.long
def test_lightning(run):
    found = run("lightning", "torch_lightning.py")
    assert found["trainer"].world_size == RANKS and found["trainer"].global_step == STEPS
    same(found["model"].line.state_dict(), line())


def test_lightning_makes_the_group(run):
    """By the strategy's argument; validation gives it tensors of the inference mode."""
    lightning = needed("lightning")
    from lightning.pytorch.strategies import DDPStrategy

    import mpidist.torch  # noqa: F401

    class Mean(lightning.LightningModule):
        def validation_step(self, x, _):
            self.log("mean", x.mean(), sync_dist=True)
            self.every = self.all_gather(x.sum())
            self.inference = torch.is_inference_mode_enabled()

    strategy = DDPStrategy(process_group_backend="mpidist")
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(accelerator="cpu", strategy=strategy, devices=RANKS, **quiet)
    model = Mean()
    x = torch.arange(float(ROWS))
    trainer.validate(model, torch.utils.data.DataLoader(x, batch_size=ROWS // RANKS))
    assert dist.get_backend() == "mpidist"
    assert trainer.callback_metrics["mean"] == x.mean() and model.inference
    assert model.every.sum() == x.sum() and len(model.every) == RANKS


def test_trainer(run):
    """A rate that falls to zero, clipped gradients, and the sum of losses divided by all words.

    These are the Trainer's defaults; the words include each row's first, which nothing predicts.
    """
    found = run("transformers", "torch_trainer.py")
    from transformers import GPT2LMHeadModel

    trainer, arguments, data = found["trainer"], found["arguments"], found["data"]
    steps = int(arguments.num_train_epochs)
    assert trainer.state.global_step == steps and arguments.world_size == RANKS
    torch.manual_seed(0)
    model = GPT2LMHeadModel(found["model"].config)
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.learning_rate)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    x = torch.stack([row["input_ids"] for row in data])

    def loss(model):
        return model(input_ids=x, labels=x, num_items_in_batch=x.numel()).loss

    for _ in range(steps):
        optimizer.zero_grad()
        loss(model).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), arguments.max_grad_norm)
        optimizer.step()
        rate.step()
    same(found["model"].state_dict(), model.state_dict())
    assert found["loss"] == pytest.approx(loss(model).item(), rel=1e-5)
