"""``hvd.SyncBatchNorm``: batch normalization over the batches of all ranks, on CPUs and GPUs."""

from __future__ import annotations

from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from hvdbridge.torch import basics
from hvdbridge.training import sync_batchnorm


class SyncBatchNorm(sync_batchnorm.SyncBatchNorm):
    """Drop-in replacement of ``BatchNorm1d/2d/3d``, with the arguments of ``torch.nn.BatchNorm2d``.

    The input has shape ``[N, C, ...]`` and a floating-point dtype; ``N`` may differ between ranks.

    Raises:
        ValueError: in ``forward``: the input has fewer than two dimensions, or ``hvd.init()`` was not called.
    """

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        return _BatchNorm.forward(self, input) if basics.size() == 1 else super().forward(input)
