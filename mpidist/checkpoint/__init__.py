"""Checkpoints: saved by all ranks, in files that need no pickle."""
