"""Checkpoints: written by all ranks, as JSON and raw arrays, without pickle."""
