"""MSCCL++'s execution plans: one-sided programs of GPUs, read and proved."""
