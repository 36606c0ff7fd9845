"""The Trainer of transformers: mpidist run -n 2 examples/torch_trainer.py"""

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import mpidist.torch  # registers the backend

dist.init_process_group("mpidist")  # the Trainer uses the group that is there
torch.manual_seed(0)
size = {"vocab_size": 16, "n_positions": 8, "n_embd": 16, "n_layer": 1}
keep = {"attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}
tokens = {"bos_token_id": None, "eos_token_id": None}
model = GPT2LMHeadModel(GPT2Config(**size, n_head=2, **keep, **tokens))
rows = [(torch.arange(8) + start) % 16 for start in range(16)]
data = [{"input_ids": row, "labels": row} for row in rows]

arguments = TrainingArguments(
    use_cpu=True,  # without it each rank trains alone where there is no GPU
    per_device_train_batch_size=8,
    num_train_epochs=40,
    optim="sgd",
    learning_rate=1.0,
    logging_steps=10,  # prints the loss
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=data)
seconds = trainer.train().metrics["train_runtime"]
loss = trainer.evaluate(data)["eval_loss"]
if dist.get_rank() == 0:
    ranks = dist.get_world_size()
    print(f"{ranks} ranks: loss {loss:.3f}, {seconds:.1f} s")
dist.destroy_process_group()
