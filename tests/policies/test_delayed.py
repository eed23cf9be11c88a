"""Delayed: the inner policy's updates, one step late."""

from __future__ import annotations

import io
import math

import pytest
import torch
from torch import Tensor

from hvdbridge.errors import ConfigurationError
from hvdbridge.execution.simulation import Simulation
from hvdbridge.policies import from_spec
from hvdbridge.policy.base import Early
from hvdbridge.policy.bucket import Bucket, Layout

SHAPES = {"w": (6, 5), "b": (5,), "empty": (0,), "s": ()}
Grads = dict[str, Tensor]


def gradients(size: int, seed: int, dtype: torch.dtype = torch.float32) -> list[Grads]:
    generator = torch.Generator().manual_seed(seed)
    return [{n: torch.randn(s, generator=generator).to(dtype) for n, s in SHAPES.items()} for _ in range(size)]


def equal(a: Grads, b: Grads) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    "inner", ["mean", "sum", "ef(bf16)", "warmup(steps=2, then=ef(fp16))", "partition(1d=mean, rest=bf16)"]
)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_each_update_is_that_of_the_step_before(inner: str, size: int) -> None:
    late, prompt = (
        Simulation(spec, SHAPES, size, buckets=[["s", "w"], ["b", "empty"]]) for spec in (f"delayed({inner})", inner)
    )
    want = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(5):
        weights = [float(1 + rank) for rank in range(size)] if step % 2 else None
        grads = gradients(size, step)
        for mine in late.step(grads, weights):
            assert equal(mine, want)
        want = prompt.step(grads, weights)[0]
    assert late.bytes_sent == prompt.bytes_sent
    last = late.flush()
    assert last is not None
    assert all(equal(mine, want) for mine in last)
    assert late.flush() is None
    assert not any(u.any() for u in late.step(gradients(size, 9))[0].values()), "after a flush it begins anew"


def test_nothing_is_held_at_first_and_zeros_count_as_nothing() -> None:
    simulation = Simulation("delayed", SHAPES, 2)
    assert simulation.flush() is None
    simulation.step([{}, {}])
    assert simulation.flush() is None
    assert Simulation("mean", SHAPES, 2).flush() is None


def test_flush_reaches_through_wrappers() -> None:
    grads = gradients(2, 0)
    want = Simulation("mean", SHAPES, 2).step(grads)[0]
    for spec in ("clip(delayed, norm=1e6)", "fp16(delayed)", "warmup(steps=0, then=delayed)"):
        simulation = Simulation(spec, SHAPES, 2)
        simulation.step(grads)
        held = simulation.flush()
        assert held is not None
        for name in SHAPES:
            tolerance = 2.0**-9 if spec.startswith("fp16") else 0.0  # 2^-11 of values below 4
            assert torch.allclose(held[0][name], want[name], rtol=0, atol=tolerance)
        assert simulation.flush() is None
    simulation = Simulation("partition(1d=delayed, rest=mean)", SHAPES, 2)
    simulation.step(grads)
    held = simulation.flush()
    assert held is not None
    assert set(held[1]) == {"b", "empty"}
    assert torch.equal(held[1]["b"], want["b"])


def test_a_skipped_step_holds_what_is_held() -> None:
    simulation = Simulation("delayed", SHAPES, 2)
    want = Simulation("mean", SHAPES, 2).step(gradients(2, 0))[0]
    simulation.step(gradients(2, 0))
    assert not any(u.any() for u in simulation.step(gradients(2, 1), [0, 0])[0].values())
    assert equal(simulation.step(gradients(2, 2))[0], want)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_non_finite_gradient_comes_once_one_step_late(value: float) -> None:
    late, prompt = Simulation("delayed(ef(bf16))", SHAPES, 2), Simulation("ef(bf16)", SHAPES, 2)
    want: list[Grads] = []
    for step in range(5):
        grads = gradients(2, step)
        if step == 2:
            grads[1]["b"][0] = value
        updates = late.step(grads)
        if want:
            for name in SHAPES:
                assert torch.equal(updates[0][name].nan_to_num(), want[0][name].nan_to_num())
                assert updates[1][name].isfinite().all() == (step != 3 or name != "b")
        want = prompt.step(grads)
        inner = late.stores[1].portable()["inner"]["residual"]
        assert equal(inner, prompt.stores[1].portable()["residual"]), "and the inner policy's state is unharmed"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_what_is_held_has_the_parameters_type(dtype: torch.dtype) -> None:
    params = {"a": torch.zeros(3, dtype=dtype), "b": torch.zeros(2)}
    for spec in ("delayed(ef(bf16))", "clip(delayed, norm=1e6)"):
        simulation = Simulation(spec, params, 2)
        grads = [{name: torch.full_like(p, 0.1 * (rank + 1)) for name, p in params.items()} for rank in range(2)]
        simulation.step(grads)
        updates = simulation.step(grads)
        held = simulation.stores[0].portable()
        held = held.get("held") or held["inner"]["held"]
        for tensors in (updates[0], held):
            assert {name: t.dtype for name, t in tensors.items()} == {"a": dtype, "b": torch.float32}
        assert updates[0]["a"].double().allclose(torch.tensor(0.15).double(), rtol=0.01)


def test_a_checkpoint_holds_it() -> None:
    one, other = Simulation("delayed(ef(bf16))", SHAPES, 2), Simulation("delayed(ef(bf16))", SHAPES, 2)
    for step in range(3):
        one.step(gradients(2, step))
    file = io.BytesIO()
    torch.save([store.portable() for store in one.stores], file)
    file.seek(0)
    other.step([{}, {}])
    for rank, store in enumerate(other.stores):
        store.load(torch.load(io.BytesIO(file.getvalue()), weights_only=True), rank, 2)
    other.steps = one.steps
    for step in range(3, 6):
        assert equal(one.step(gradients(2, step))[0], other.step(gradients(2, step))[1])


def test_what_is_held_follows_the_loss_scale() -> None:
    simulation = Simulation("delayed", SHAPES, 1)
    grads = gradients(1, 0)
    simulation.step(grads)
    simulation.stores[0].rescale(4.0)
    assert torch.equal(simulation.step(grads)[0]["w"], grads[0]["w"] * 4)


def test_the_callers_buffer_is_its_own_after_the_early_update() -> None:
    policy = from_spec("delayed")
    bucket = Bucket(torch.ones(2), Layout({"w": (2,)}))
    flow = policy.aggregate(bucket, policy.init({"w": torch.zeros(2)}))
    early = next(flow)
    assert isinstance(early, Early)
    assert early.update.tolist() == [0.0, 0.0]
    bucket.buffer.fill_(5.0)
    request = next(flow)
    assert request.tensor.tolist() == [1.0, 1.0]  # type: ignore[union-attr]
    with pytest.raises(StopIteration) as end:
        flow.send(request.tensor)  # type: ignore[union-attr]
    assert end.value.value.state["held"]["w"].tolist() == [1.0, 1.0]


def test_it_is_late_once() -> None:
    for spec in ("delayed(delayed)", "delayed(clip(warmup(delayed)))"):
        with pytest.raises(ConfigurationError, match="Delayed cannot wrap Delayed"):
            from_spec(spec)


def test_it_is_not_additive() -> None:
    with pytest.raises(ConfigurationError, match="cannot wrap Delayed"):
        from_spec("ef(delayed)")
