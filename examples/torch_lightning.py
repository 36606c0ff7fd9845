"""A Trainer of Lightning: mpidist run -n 2 examples/torch_lightning.py"""

import os
import time

import lightning
import torch
import torch.distributed as dist

import mpidist.torch  # registers the backend


class Regression(lightning.LightningModule):
    """A line through random points."""

    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(4, 1)

    def training_step(self, x, _):
        """Return the loss of this rank's part."""
        loss = (self.line(x) - x.sum(1, keepdim=True)).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self):
        """Print the progress, on one rank."""
        if (self.current_epoch + 1) % 10 == 0:
            loss = self.trainer.callback_metrics["loss"]
            self.print(f"epoch {self.current_epoch + 1}: loss {loss:.1e}")

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
loader = torch.utils.data.DataLoader(x, batch_size=32, shuffle=True)
begin = time.perf_counter()
trainer.fit(model, loader)
seconds = time.perf_counter() - begin
if trainer.is_global_zero:
    ranks, loss = dist.get_world_size(), trainer.callback_metrics["loss"]
    print(f"{ranks} ranks: loss {loss:.1e}, {seconds:.1f} s")
dist.destroy_process_group()
