"""A Trainer of Lightning over MPI: mpidist run -n 2 examples/torch_lightning.py"""

import os

import lightning
import torch
import torch.distributed as dist

import mpidist.torch  # noqa: F401  registers the backend


class Regression(lightning.LightningModule):
    """A line through random points."""

    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(4, 1)

    def training_step(self, x, _):
        """Return the loss of this rank's part."""
        loss = (self.line(x) - x.sum(1, keepdim=True)).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


dist.init_process_group("mpidist")  # the Trainer uses the group that is there
torch.manual_seed(0)
model, x = Regression(), torch.randn(64, 4)
local = int(os.environ["LOCAL_WORLD_SIZE"])  # the ranks of this node
trainer = lightning.Trainer(
    accelerator="cpu",
    strategy="ddp",
    devices=local,
    num_nodes=dist.get_world_size() // local,
    max_epochs=50,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, torch.utils.data.DataLoader(x, batch_size=32, shuffle=True))
loss = trainer.callback_metrics["loss"]
if trainer.is_global_zero:
    print(f"{dist.get_world_size()} ranks: loss below 0.01: {bool(loss < 0.01)}")
dist.destroy_process_group()
