"""Batch normalisation with the statistics of the batches of all ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from ..communicator.communicator import Communicator, check_communicator
from ..device import tensors
from ..errors import InvalidArgument


class _Normalise(torch.autograd.Function):
    """Normalisation by mean and variance over all ranks: a collective in forward and backward.

    Forward combines the ranks' counts, means and sums of squared deviations (Chan et al., 1979), so
    large means do not cancel digits of the variance.  Both collectives give the same bits on all
    ranks.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, eps: float, comm: Communicator) -> Any:
        flat = x.transpose(0, 1).reshape(x.shape[1], -1).double()
        count, channels = flat.shape[1], flat.shape[0]
        mean = flat.mean(1) if count else flat.new_zeros(channels)
        squares = (flat - mean[:, None]).square().sum(1)
        # In one allgather: a rank's row has its means, squares and count.
        mine = torch.cat([mean, squares, mean.new_tensor([count])]).cpu()
        every = torch.from_numpy(comm.allgather(tensors.as_array(mine)[None])).to(x.device)
        counts, means = every[:, -1:], every[:, :channels]
        total = counts.sum()
        if total == 0:
            raise InvalidArgument(
                f"rank {comm.rank}: SyncBatchNorm: x has shape {tuple(x.shape)}, empty on every "
                "rank: expected at least one value for each channel"
            )
        mean = (counts * means).sum(0) / total
        squares = (every[:, channels:-1] + counts * (means - mean).square()).sum(0)
        scale = (squares / total + eps).rsqrt()
        shape = (1, channels, *[1] * (x.dim() - 2))
        ctx.save_for_backward(x, weight, mean, scale, total)
        ctx.comm, ctx.shape = comm, shape
        out = (x - mean.view(shape).to(x.dtype)) * scale.view(shape).to(x.dtype)
        if weight is not None:
            out = out * weight.view(shape) + bias.view(shape)
        # The unbiased variance, for the running statistics as PyTorch has them.
        found = mean, squares / (total - 1).clamp(min=1)
        ctx.mark_non_differentiable(*found)
        return (out.to(x.dtype), *found)

    @staticmethod
    def backward(ctx: Any, grad: Any, *_: Any) -> Any:
        x, weight, mean, scale, total = ctx.saved_tensors
        shape, channels = ctx.shape, len(mean)
        centred = x - mean.view(shape).to(x.dtype)
        others = [d for d in range(x.dim()) if d != 1]
        # With c = x - mean, s = 1 / sqrt(var + eps), and mean() over the batches of all ranks:
        #
        #     dx = s * weight * (grad - mean(grad) - c * s**2 * mean(grad * c))
        sums = torch.stack([grad.double().sum(others), (grad * centred).double().sum(others)])
        found_x = None
        if ctx.needs_input_grad[0]:
            flat = tensors.as_array(sums.flatten().cpu())
            means = torch.from_numpy(ctx.comm.allreduce(flat)).to(x.device) / total
            first, second = means[:channels], means[channels:] * scale.square()
            found_x = (
                grad - first.view(shape).to(x.dtype) - centred * second.view(shape).to(x.dtype)
            )
            factor = scale if weight is None else scale * weight
            found_x = found_x * factor.view(shape).to(x.dtype)
        # Of this rank's batch only: a DDP averages them like other gradients.
        found_weight = (sums[1] * scale).to(weight.dtype) if ctx.needs_input_grad[1] else None
        found_bias = sums[0].to(weight.dtype) if ctx.needs_input_grad[2] else None
        return found_x, found_weight, found_bias, None, None


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation over the batches of all ranks of a communicator.

    In training mode mean and variance are those of all ranks' batches together, which may have
    different sizes.  In evaluation mode it normalises by the running statistics, as
    :class:`torch.nn.BatchNorm2d` does, without communication.

    Parameters
    ----------
    num_features : int
        Number of channels: the second dimension of an input.
    comm : Communicator
        The ranks.  All of them call forward, and backward, of each layer in the same order.
    eps, momentum, affine, track_running_stats, device, dtype
        As in :class:`torch.nn.BatchNorm2d`.
    """

    def __init__(
        self,
        num_features: int,
        comm: Communicator,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
    ):
        check_communicator(comm)
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self.comm: Communicator | None = comm

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module, comm: Communicator) -> torch.nn.Module:
        """Replace every layer of batch normalisation in a module by this class, in place.

        Return the module, or the new layer if the module is itself such a layer.  New layers have
        the parameters and buffers of the replaced ones.
        """
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            affine, tracks = module.affine, module.track_running_stats
            new = cls(module.num_features, comm, module.eps, module.momentum, affine, tracks)
            for place in ("_parameters", "_buffers"):
                getattr(new, place).update(getattr(module, place))
            return new.train(module.training)
        for name, child in module.named_children():
            setattr(module, name, cls.convert_sync_batchnorm(child, comm))
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        memo[id(self.comm)] = self.comm  # a copy has the same ranks
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "comm": None}

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the normalised input, (n, channels, …); collective in training."""
        if input.dim() < 2 or input.shape[1] != self.num_features:
            where = "" if self.comm is None else f"rank {self.comm.rank}: "
            raise InvalidArgument(
                f"{where}SyncBatchNorm: input has shape {tuple(input.shape)}: expected "
                f"(n, {self.num_features}, …)"
            )
        if not self.training:
            return torch.nn.functional.batch_norm(
                input,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                self.running_mean is None,
                0.0,
                self.eps,
            )
        if self.comm is None:
            raise InvalidArgument(
                "SyncBatchNorm was loaded from a file or pickled, which leaves out the "
                "communicator: set the attribute comm of the layer"
            )
        out, mean, var = _Normalise.apply(input, self.weight, self.bias, self.eps, self.comm)
        if self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            share = self.momentum
            if share is None:  # the mean over all batches
                share = 1.0 / float(self.num_batches_tracked)
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
                self.running_var.lerp_(var.to(self.running_var.dtype), share)
        return out
