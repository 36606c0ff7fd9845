"""What is different for tensors on a GPU: whether they are, their stream, memory of others."""

from __future__ import annotations

from typing import Any

import torch

DEVICE = "cuda"  # the current one


def is_there(x: Any) -> bool:
    """Tell whether a tensor is on a GPU."""
    return x.is_cuda


def stream_of(x: Any) -> int:
    """Give the stream that PyTorch queues work of this thread on now."""
    return torch.cuda.current_stream(x.device).cuda_stream


def tensor_on(array: Any, x: Any) -> Any:
    """Give a tensor of `x`'s dtype on the memory of another library's array of bytes."""
    return torch.from_dlpack(array).view(x.dtype)
