"""SyncBatchNorm: batch normalization over the union of all ranks' batches, on any backend and on CPUs.

Rules:

1. Statistics are those of the union. Every rank gathers the counts, means and squared deviations in float64, and merges
   them in rank order (Chan, Golub and LeVeque 1979). So unequal and empty batches are exact.
2. A rank of ``sync.weight`` 0 is not part of the union. Set the weight before the forward.
3. Backward weights the ranks' losses as the synchronizer does, ``sum(w L) / sum(w)``. So weighted gradients equal
   those of one process on the union.
4. The module computes in float32 or wider. The output has the input's dtype, as in torch.
5. In evaluation mode nothing is sent, so one rank may evaluate alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from hvdbridge.backends.communicator import Communicator
from hvdbridge.policy.collectives import AllGather, AllReduce
from hvdbridge.training import runtime

if TYPE_CHECKING:
    from hvdbridge.training.synchronizer import GradientSynchronizer


class SyncBatchNorm(_BatchNorm):
    """Replacement of ``BatchNorm1d/2d/3d`` for floating-point input ``[N, C, ...]``; see :meth:`convert`."""

    # The synchronizer sets both. Without one the statistics are those of all ranks, with equal weights.
    communicator: Communicator | None = None
    synchronizer: GradientSynchronizer | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("communicator", "synchronizer")}

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm needs [N, C, ...], got {list(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        weight = None if self.synchronizer is None else self.synchronizer.weight
        communicator = self.communicator or runtime.current().channel("sync_batchnorm")
        output, mean, variance, count = _Normalize.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps, 1.0 if weight is None else weight, communicator
        )
        if self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            unbiased = variance * (count / (count - 1).clamp(min=1))
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
        return output  # type: ignore[no-any-return]

    @classmethod
    def convert(cls, module: torch.nn.Module) -> torch.nn.Module:
        """Return ``module`` with every BatchNorm replaced; the parameters and buffers are shared with the original."""
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            sync = cls(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats)
            for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked", "training"):
                setattr(sync, name, getattr(module, name))
            return sync
        for name, child in module.named_children():
            setattr(module, name, cls.convert(child))
        return module


class _Normalize(torch.autograd.Function):
    """Normalize ``x`` ``[N, C, ...]`` with the union's statistics.

    Returns the output, and mean ``[C]``, biased variance ``[C]`` and count ``[]`` of the union in float64.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float, weight: float, comm: Communicator
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        channels = x.shape[1]
        flat = x.detach().transpose(0, 1).reshape(channels, -1).double()
        local_count = flat.shape[1] if weight > 0 else 0
        local_mean = flat.mean(1) if local_count else flat.new_zeros(channels)
        local_squares = (flat - local_mean[:, None]).square().sum(1) if local_count else flat.new_zeros(channels)
        rows = comm.execute(AllGather(torch.cat([local_mean, local_squares, local_mean.new_full((1,), local_count)])))
        counts = rows[:, -1:]
        means, all_squares = rows[:, :channels], rows[:, channels:-1]
        count = counts.sum()
        total = count.clamp(min=1)
        mean = (counts * means).sum(0) / total
        variance = (all_squares + counts * (means - mean).square()).sum(0) / total
        inverse = (variance + eps).rsqrt()
        shape = [1, channels] + [1] * (x.dim() - 2)
        ctx.save_for_backward(x, mean, inverse, gamma, total)
        ctx.weight, ctx.comm, ctx.shape = weight, comm, shape
        output = _normalized(x, mean, inverse, shape)
        if gamma is not None:
            output = output * gamma.view(shape)
        if beta is not None:
            output = output + beta.view(shape)
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, mean, inverse, gamma, total = ctx.saved_tensors
        normalized = _normalized(x, mean, inverse, ctx.shape)
        dy = dy.to(normalized.dtype)
        axes = [0, *range(2, dy.dim())]
        d_beta, d_gamma = dy.sum(axes), (dy * normalized).sum(axes)
        local_sums = torch.cat([d_beta.double(), d_gamma.double(), inverse.new_ones(1)]) * ctx.weight
        sums = ctx.comm.execute(AllReduce(local_sums))
        fraction = ctx.weight / sums[-1] if ctx.weight > 0 else sums.new_zeros(())
        channels = dy.shape[1]
        scale = (1.0 / fraction if ctx.weight > 0 else fraction) / (sums[-1].clamp(min=1e-300) * total)
        mean_dy = (sums[:channels] * scale).to(dy.dtype).view(ctx.shape)
        mean_dyx = (sums[channels:-1] * scale).to(dy.dtype).view(ctx.shape)
        factor = inverse.to(dy.dtype).view(ctx.shape)
        if gamma is not None:
            factor = factor * gamma.view(ctx.shape)
        dx = (dy - mean_dy - normalized * mean_dyx) * factor if ctx.weight > 0 else torch.zeros_like(dy)
        affine = (None, None) if gamma is None else (d_gamma.to(gamma.dtype), d_beta.to(gamma.dtype))
        return dx.to(x.dtype), *affine, None, None, None


def _normalized(x: Tensor, mean: Tensor, inverse: Tensor, shape: list[int]) -> Tensor:
    """Return ``x`` with mean 0 and variance 1, in float32 or wider: half types would round the mean."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) - mean.to(wide).view(shape)) * inverse.to(wide).view(shape)
