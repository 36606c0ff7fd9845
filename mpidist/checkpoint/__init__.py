"""Checkpoints: written by all ranks, as JSON and safetensors files, without pickle."""
