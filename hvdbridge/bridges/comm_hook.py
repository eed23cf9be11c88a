"""A policy as a communication hook of a DistributedDataParallel that somebody else has made.

Rules:

1. Nothing is started before the first bucket comes: whoever sits on DDP (Lightning, Accelerate) starts
   ``torch.distributed`` himself, and later than the hook is named. hvdbridge then joins what runs.
2. Without a model parameters are named by their position in it, which the first step tells: its buckets are held
   until the last is there. State then fits models that register the same parameters in the same order.
3. DDP calls hooks in bucket order; the end of a step is the end of backward, or the next step's first bucket where
   DDP calls hooks outside of it (``join()``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from hvdbridge import runtime
from hvdbridge.aggregator import Aggregator, Piece
from hvdbridge.agreement import agree, describe, open_group, trainable
from hvdbridge.bucket import Layout
from hvdbridge.communicators.base import Communicator
from hvdbridge.driver import open_driver
from hvdbridge.errors import ConfigurationError, StepError, Unsupported
from hvdbridge.policies import from_spec, label
from hvdbridge.policy import Policy
from hvdbridge.sources.base import at_end_of_backward, inside_backward


class CommHookState:
    """What :func:`to_comm_hook` gives as ``state``: the policy's state, and the controls of a synchronizer.

    Attributes:
        policy: the policy.
        weight: this rank's weight of the next step; all ranks set one, or none does.
    """

    def __init__(self, policy: Policy, model: Module | None, weighted: bool | None = None, seed: int = 0) -> None:
        self.policy = policy
        self.weight: float | None = None
        self._weighted, self._seed = weighted, seed
        self._model = model
        self._aggregator: Aggregator | None = None
        self._control: Communicator | None = None
        self._communicator: Communicator | None = None
        self._names: dict[Tensor, str] = {}
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self._held: list[tuple[Any, torch.futures.Future[Tensor]]] = []
        self._running = False
        self._saved: Mapping[str, Any] | None = None
        self._loss_scale = 1.0

    @property
    def loss_scale(self) -> float:
        """GradScaler's scale: residuals are rescaled when it changes. Set it before backward."""
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        if not value > 0 or value == float("inf"):
            raise ConfigurationError(f"loss_scale={value} must be positive and finite")
        self._loss_scale = float(value)
        if self._aggregator is not None:
            self._aggregator.loss_scale = self._loss_scale

    @property
    def skipped(self) -> bool:
        """Whether the weights of the last step added up to zero: gradients are zeros."""
        return self._aggregator is not None and self._aggregator.skipped

    def stats(self) -> dict[str, float]:
        """Figures of the last step: ``step``, ``collectives``, ``bytes_sent``, ``communication_seconds``."""
        aggregator = self._opened()
        traffic = aggregator.last_traffic
        return {
            "step": aggregator.step,
            "collectives": traffic.collectives,
            "bytes_sent": traffic.bytes_sent,
            "communication_seconds": traffic.seconds,
        }

    def state_dict(self, gather: bool = False) -> dict[str, Any]:
        """The policy's state in the form of ``GradientSynchronizer.state_dict``, which reads it if names are the same.

        Raises:
            StepError: no step has been made.
        """
        aggregator = self._opened()
        assert self._control is not None
        local = {
            "policy": label(self.policy), "step": aggregator.step, "loss_scale": aggregator.loss_scale,
            "state": aggregator.store.portable(),
        }  # fmt: skip
        if not gather:
            return local
        ranks = self._control.all_gather_object(local["state"])
        return local | {"ranks": ranks} if self._control.rank == 0 else {}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take up what :meth:`state_dict` gave; before the first step it is kept until that begins.

        Raises:
            ConfigurationError: the state is of another policy, other parameters or shapes.
        """
        spec = label(self.policy)
        if saved.get("policy") != spec:
            raise ConfigurationError(f"the state is one of policy {saved.get('policy')!r}, this is {spec!r}")
        if self._aggregator is None:
            self._saved = saved
            return
        assert self._control is not None
        ranks = saved.get("ranks") or [saved["state"]]
        rank = self._control.rank if "ranks" in saved else 0
        self._aggregator.store.load(ranks, rank, self._control.size if "ranks" in saved else 1)
        self._aggregator.step = int(saved["step"])
        self._aggregator.loss_scale = self._aggregator._held_scale = self._loss_scale = float(saved["loss_scale"])

    def close(self) -> None:
        """Free the channels. Harmless when repeated; ``hb.shutdown`` does it, too."""
        if self._aggregator is None or self._control is None or self._communicator is None:
            return
        driver = self._aggregator.driver
        runtime.forget_at_shutdown(self.close)
        failed = driver.failure is not None
        driver.close()
        if not failed:  # else a rank may be gone, and freeing what it shares may wait for it
            self._control.close()
            self._communicator.close()
        self._control = self._communicator = None

    def _opened(self) -> Aggregator:
        if self._aggregator is None:
            raise StepError("the communication hook has seen no step yet, so there is nothing to tell")
        return self._aggregator

    # -- buckets --------------------------------------------------------------------------------------------------

    def bucket(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """The hook."""
        if bucket.index() == 0:
            if inside_backward():
                at_end_of_backward(self._finish)
            elif self._running:
                self._finish()
            self._running = True
            if self._model is not None:
                self._open_by_model(self._model)
            if self._aggregator is not None:
                self._begin(self._aggregator)
        buffer = bucket.buffer()
        if buffer.layout != torch.strided:
            raise Unsupported(
                f"rank {runtime.rank() if runtime.is_initialized() else '?'}: sparse gradients are taken by no policy. "
                "Use sparse=False in the Embedding."
            )
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
        if self._aggregator is not None:
            self._submit(self._aggregator, bucket.parameters(), buffer, future, bucket.is_last())
            return future
        self._held.append(((bucket.parameters(), buffer), future))
        if bucket.is_last():
            self._open_by_position()
        return future

    def _begin(self, aggregator: Aggregator) -> None:
        aggregator.weight = None if self.weight is None else float(self.weight)
        aggregator.begin()

    def _submit(
        self, aggregator: Aggregator, parameters: list[Tensor], buffer: Tensor, future: torch.futures.Future[Tensor],
        last: bool,
    ) -> None:  # fmt: skip
        def deliver(update: Tensor | None) -> None:
            if update is not None and update.storage_offset():  # DDP takes views at offsets of the storage, not of it
                update = update.clone()
            future.set_result(buffer if update is None else update)

        aggregator.submit(Piece(self._layout(parameters), buffer, deliver), last)

    def _layout(self, parameters: list[Tensor]) -> Layout:
        key = tuple(map(id, parameters))
        if key not in self._layouts:
            unknown = [list(p.shape) for p in parameters if p not in self._names]
            if unknown:
                raise ConfigurationError(
                    f"rank {runtime.rank()}: DDP's bucket has parameters of shapes {unknown} that the hook does not "
                    "know. Give to_comm_hook the model that DDP wraps; one hook serves one model."
                )
            self._layouts[key] = Layout({self._names[p]: p.shape for p in parameters})
        return self._layouts[key]

    def _finish(self) -> None:
        try:
            if self._aggregator is not None:
                self._aggregator.end()
        finally:
            self._running = False

    # -- the start ------------------------------------------------------------------------------------------------

    def _open_by_model(self, model: Module) -> None:
        if self._aggregator is None:
            bare = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
            self._open(trainable(bare), model)

    def _open_by_position(self) -> None:
        """The first step's buckets are DDP's from last to first, each in registered order."""
        inverse = [parameters for (parameters, _), _ in reversed(self._held)]
        params = {f"parameter.{i}": p for i, p in enumerate(p for parameters in inverse for p in parameters)}
        self._open(params, None)
        aggregator = self._opened()
        self._begin(aggregator)
        held, self._held = self._held, []
        for i, ((parameters, buffer), future) in enumerate(held):
            self._submit(aggregator, parameters, buffer, future, i == len(held) - 1)

    def _open(self, params: Mapping[str, Tensor], model: Module | None) -> None:
        if not runtime.is_initialized():
            if not dist.is_initialized():
                raise ConfigurationError("a communication hook needs torch.distributed: DDP has not started it")
            runtime.init("torch", rank=dist.get_rank(), size=dist.get_world_size())
        session = runtime.current()
        group = None
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            ranks = dist.get_process_group_ranks(model.process_group)
            group = None if len(ranks) == session.world.size else ranks
        self._communicator, self._control, ranks_or_none = open_group(session.communicator, group)
        lines = describe(torch.nn.Module(), params, {"policy": label(self.policy), "weighted": self._weighted})
        agree(self._control, lines)
        device = next(iter(params.values())).device
        driver = open_driver(self._communicator, device, session.check(ranks_or_none))
        session.monitor.on_failure(driver.fail)
        runtime.at_shutdown(self.close)
        self._names = {p: name for name, p in params.items()}
        self._aggregator = Aggregator(
            self.policy, params, self._communicator, self._control, driver, self._seed, self._weighted
        )
        self._aggregator.loss_scale = self._aggregator._held_scale = self._loss_scale
        if self._saved is not None:
            saved, self._saved = self._saved, None
            self.load_state_dict(saved)


def to_comm_hook(
    policy: str | Policy, model: Module | None = None, weighted: bool | None = None, seed: int = 0
) -> tuple[CommHookState, Any]:
    """``(state, hook)`` for ``DistributedDataParallel.register_comm_hook(state, hook)``, and for all that call it.

    hvdbridge need not be initialized: it joins ``torch.distributed`` when the first bucket comes.

    Args:
        policy: a spec string or a policy.
        model: the module that DDP wraps, or the DDP: parameters have their names in it, and DDP's process group is
            the one that aggregates. None: names by position, and all ranks.
        weighted: True: exchange ``state.weight`` in every step; False: never; None: the first step decides.
        seed: of the randomness that all ranks share.

    Raises:
        SpecError: the policy does not parse.

    >>> state, hook = to_comm_hook("ef(bf16)")
    >>> state.weight is None
    True
    """
    state = CommHookState(from_spec(policy), model, weighted, seed)

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations and names with its own
        return state.bucket(bucket)

    return state, hook
