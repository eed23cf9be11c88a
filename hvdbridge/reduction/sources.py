"""Where gradients come from: one source per way in which a backend's own users collect them.

``FRONT_ENDS[name]`` makes the source, and returns ``(source, model, optimizers)`` as the backend's own users know them.
``ranks`` are those of the synchronizer's group, None for all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.nn import Module, Parameter

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from hvdbridge.reduction.aggregator import Aggregator
    from hvdbridge.reduction.source import Options, Source


Attached = tuple["Source", Module, list["Optimizer"]]


def attach_ddp(
    model: Module,
    optimizers: list[Optimizer],
    params: Mapping[str, Parameter],
    aggregator: Aggregator,
    ranks: list[int] | None,
    options: Options,
) -> Attached:
    """DistributedDataParallel, with our communication hook where its own mean is not enough; what DDP sends itself
    goes through the default process group, or one over ``ranks``."""
    from datetime import timedelta
    from inspect import signature

    import torch.distributed as dist

    from hvdbridge.policies.dense import bucket_mb, plain_mean
    from hvdbridge.policy.bucket import DDP_MB, FIRST_BUCKET_BYTES
    from hvdbridge.reduction.ddp import TORCHS, DdpSource, DistributedDataParallel
    from hvdbridge.reduction.source import SIZES

    limit = timedelta(seconds=aggregator.communicator.timeout_seconds)
    own_group = None if ranks is None else dist.new_group(ranks, limit, use_local_synchronization=True)
    known = signature(TORCHS).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # renamed in torch 2.13
    given: dict[str, Any] = {name: False}  # we send them, but within join()
    if "init_sync" in known:  # older torch copies from rank 0 once more
        given["init_sync"] = False
    # None: a small first bucket. A list of sizes makes one, too. Where buckets of the mean have a size that the user
    # said, they are those of a DDP of that size, and so are their sums' bits.
    given["bucket_cap_mb"] = None if options.bucket_mb == DDP_MB else options.bucket_mb
    if options.whole:
        given["bucket_cap_mb"] = 1 + sum(p.numel() * p.element_size() for p in params.values()) / 2**20
    elif (
        SIZES
        and not options.static_graph
        and options.bucket_mb != DDP_MB
        and not (options.said and bucket_mb(aggregator.policy) == DDP_MB)
    ):
        given["bucket_cap_mb_list"] = [min(FIRST_BUCKET_BYTES / 2**20, options.bucket_mb), options.bucket_mb]
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel) if options.wrapper is None else options.wrapper
    with ddp_ignores(model, options.ignored):
        DistributedDataParallel.__init__(
            wrapped,
            model,
            aggregator.communicator.watch,
            process_group=own_group,
            find_unused_parameters=options.find_unused_parameters and not options.static_graph,  # join() goes by it
            static_graph=options.static_graph,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            **given,
        )
    plain = plain_mean(aggregator.policy) and not aggregator.weighted and not aggregator.scheduler.checks
    source = DdpSource(wrapped, params, aggregator, options, plain, own_group)
    if options.broadcast_buffers:
        source.watch_buffers(model)
    return source, wrapped, optimizers


@contextmanager
def ddp_ignores(model: Module, names: Collection[str]) -> Iterator[None]:
    """Within, DDP is constructed without the parameters and buffers of these names."""
    key, attributes = "_ddp_params_and_buffers_to_ignore", vars(model)
    before = attributes.get(key)
    # It puts a dot before the names of the outermost module's own parameters, and not of its buffers
    attributes[key] = [*names, *(f".{name}" for name in names)]
    try:
        yield
    finally:
        if before is None:
            del attributes[key]
        else:
            attributes[key] = before


def attach_horovod(
    model: Module,
    optimizers: list[Optimizer],
    params: Mapping[str, Parameter],
    aggregator: Aggregator,
    ranks: list[int] | None,
    options: Options,
) -> Attached:
    """Each optimizer becomes an ``hvd.DistributedOptimizer``, but those that shard their state, which it cannot make;
    the model stays as it is."""
    from hvdbridge.reduction.horovod_optimizer import HorovodSource, wrap_optimizer
    from hvdbridge.reduction.replicate import shards_state

    names = {parameter: name for name, parameter in params.items()}
    wrapped = [each if shards_state(each) else wrap_optimizer(each, names) for each in optimizers]
    source = HorovodSource(params, aggregator, options, wrapped)
    source.watch_forwards(model, options)
    return source, model, wrapped


def attach_hooks(
    model: Module,
    optimizers: list[Optimizer],
    params: Mapping[str, Parameter],
    aggregator: Aggregator,
    ranks: list[int] | None,
    options: Options,
) -> Attached:
    """Our own reducer on untouched objects."""
    from hvdbridge.reduction.hooks import HookSource

    source = HookSource(params, aggregator, options)
    source.watch_forwards(model, options)
    return source, model, optimizers


FRONT_ENDS = {"ddp": attach_ddp, "hooks": attach_hooks, "horovod": attach_horovod}
"""By what a backend declares, see :class:`hvdbridge.backends.registry.Backend`."""
