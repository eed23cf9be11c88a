"""Which parameters of a flat vector have only finite elements, and new values in which the others keep old ones."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from hvdbridge.kernels.fused import on_flat
from hvdbridge.policy.bucket import Layout


class Finite:
    """For each parameter of ``layout`` whether all its elements in ``flat`` are finite. The host waits for no device.

    >>> layout = Layout({"weight": (2,), "bias": (1,)})
    >>> finite = Finite(torch.tensor([1.0, 2.0, math.inf]), layout)
    >>> finite.keep(torch.ones(3), torch.zeros(3), layout)
    tensor([1., 1., 0.])
    """

    def __init__(self, flat: Tensor, layout: Layout) -> None:
        self._flat, self._layout = flat, layout
        self._spread: dict[Layout, Tensor] = {}

    @cached_property
    def known(self) -> bool:
        """True if the host knows that all parameters are finite."""
        # One pass suffices if the sum is finite, since its terms then are. A sum of finite terms may overflow.
        wide = torch.promote_types(self._flat.dtype, torch.float32)
        return Layout.readable(self._flat) and math.isfinite(self._flat.sum(dtype=wide).item())

    @cached_property
    def flags(self) -> Tensor:
        """Whether each parameter is finite, and after that whether all are: bool ``[parameters + 1]``."""
        if kernels := on_flat(self._flat):
            flags: Tensor | None = kernels.finite(self._flat, self._layout.bounds(self._flat.device)[1])
            if flags is not None:
                return flags.view(torch.bool)
        finite = self._layout.finite(self._flat)
        return torch.cat([finite, finite.all().view(1)])

    def keep(self, new: Tensor, old: Tensor, part: Layout, out: Tensor | None = None) -> Tensor:
        """Return ``new`` with the elements of ``old`` where a parameter is not finite.

        Args:
            new, old: flat tensors of one type, in the order of ``part``.
            part: the layout, or a part of it.
            out: memory for the result, maybe that of ``old``. Default: new memory, or ``new`` itself.
        """
        if self.known:
            return new if out is None else out.copy_(new)
        if kernels := on_flat(new, old):
            memory = torch.empty_like(new) if out is None else out
            if kernels.keep(new, old, part.bounds(new.device)[1], self._of(part), memory) is not None:
                return memory
        if part not in self._spread:
            self._spread[part] = part.spread(self._of(part)[:-1])
        kept = torch.where(self._spread[part], new, old)
        return kept if out is None else out.copy_(kept)

    def _of(self, part: Layout) -> Tensor:
        """Return :attr:`flags` of the parameters of ``part``, and after that whether all of the layout are finite."""

        def indices() -> Tensor:
            index = {name: i for i, name in enumerate(self._layout.names)}
            numbers = [*(index[name] for name in part.names), len(index)]
            return torch.tensor(numbers, dtype=torch.int64, device=self._flat.device)

        if part is self._layout:
            return self.flags
        return self.flags[part.derive(("indices in", self._layout, self._flat.device), indices)]
