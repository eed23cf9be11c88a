"""Layer lists, dry runs, the network's model and the plan: what can be known without a job."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from hvdbridge.errors import BackendUnavailable, ConfigurationError
from hvdbridge.policies import bytes_per_step, from_spec
from hvdbridge.policy.base import Policy
from hvdbridge.policy.dry_run import Asked, Ended, dry_run
from hvdbridge.reduction.source import default_bucket_mb
from hvdbridge.startup.world import World, usable_cores
from hvdbridge.tools import main, plan
from hvdbridge.tools.bench import checks, command, models
from hvdbridge.tools.bench.cost import (
    MAX_DRY_RUN_RANKS,
    Computation,
    Planner,
    Prediction,
    measure_computation,
    step_kinds,
)
from hvdbridge.tools.bench.measure import Row
from hvdbridge.tools.bench.reference import WAYS, native
from hvdbridge.tools.bench.report import measured, plot_measured, predicted, recommend, save, show
from hvdbridge.tools.bench.transport import AlphaBeta, Load, Network

pytestmark = pytest.mark.slow

SPECS = [
    "mean", "bf16", "int8", "int4", "qsgd", "natural", "topk:ratio=0.1", "oktopk:ratio=0.1", "randomk:ratio=0.1",
    "onebit", "efsign", "sign:momentum=0.9", "powersgd:rank=2", "adasum", "median", "geometric_median",
    "dp:norm=1.0,noise=0.1", "delayed(int8)", "hierarchical(int8)", "clip(mean)", "local_sgd:every=4",
]  # fmt: skip
PARAMS = {"a": (48, 40), "b": (40,), "c": (30, 16)}


@pytest.mark.parametrize("spec", SPECS)
def test_a_dry_run_with_values_asks_for_what_one_without_asks_for(spec: str) -> None:
    policy = from_spec(spec)
    without, real = (
        [
            (event.bucket, event.request.signature(), event.size) if isinstance(event, Asked) else event.numel
            for event in dry_run(policy, PARAMS, 4, step=7, bucket_mb=0.005, local_size=2, device=device)
        ]
        for device in ("meta", "cpu")
    )
    assert without == real
    assert sum(event for event in real if isinstance(event, int)) >= 2440


@pytest.mark.parametrize("text", ["resnet50", "small:3"])
def test_every_parameter_of_a_layer_list_has_a_gradient_of_its_own_in_every_step(text: str) -> None:
    model, loss = models.model(text, samples=1)
    if text == "resnet50":
        model = models.LayerList(models.resnet50(side=32))
    seen = []
    for _ in range(2):
        model.zero_grad()
        loss(model).backward()
        seen.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(seen[0]) == len(list(model.parameters()))
    for p, one, other in zip(model.parameters(), *seen, strict=True):
        assert one.shape == p.shape
        assert one.isfinite().all()
        assert one.count_nonzero() > 0.99 * one.numel()
        assert not torch.equal(one, other)
        if p.dim() > 1 and min(p.flatten(1).shape) > 4:
            assert torch.linalg.matrix_rank(one.flatten(1)[:8, :8]) > 4


def test_a_models_file_has_a_policy(capsys: pytest.CaptureFixture[str]) -> None:
    """It is imported where ours are not enough, once; a slip of the pen is one after that, too."""
    path = Path(__file__).parents[1] / "own_policy.py"
    checks.check_policies(["mean", "own_of_tests:share=0.5"], ["small", f"{path}:make"])
    with pytest.raises(ConfigurationError, match="Did you mean 'own_of_tests'"):
        checks.check_policies(["own_of_test"], [f"{path}:make"])
    words = ["plan", "--gbits", "1", "--ranks", "2", "--model", f"{path}:make", "--policies"]
    assert main([*words, "own_of_tests", "mean"]) == 0
    assert "own_of_tests" in capsys.readouterr().out
    assert main([*words, "own_of_test"]) == 2
    printed = capsys.readouterr()
    assert "Did you mean 'own_of_tests'" in printed.err
    assert "arithmetic of" not in printed.err


def own() -> tuple[torch.nn.Module, models.Loss]:
    return torch.nn.Linear(3, 2), lambda module: module(torch.ones(4, 3)).sum()


def test_a_model_of_ones_own() -> None:
    module, loss = models.model(f"{__name__}:own")
    loss(module).backward()
    assert module.weight.grad is not None


@pytest.mark.parametrize("local_size", [4, 2])
def test_a_backend_is_left_out_where_all_ranks_know_it(local_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On another machine it may be installed, and its ranks would wait for this one's."""

    class Absent:
        def running(self) -> None:
            return None

        def check(self, world: World) -> None:
            raise BackendUnavailable("not here")

    monkeypatch.setattr(command, "starter", lambda name: Absent)
    world = World(rank=0, size=4, local_rank=0, local_size=local_size, launcher="torchrun")
    monkeypatch.setattr(command.launchers, "detect", lambda: world)
    if local_size == 4:
        assert command._missing("horovod") == "not here"
    else:
        with pytest.raises(BackendUnavailable):
            command._missing("horovod")


@pytest.mark.parametrize(("text", "error"), [("resnet5", "Did you mean 'resnet50'"), ("os:nowhere", "os:nowhere: ")])
def test_a_model_that_is_none(text: str, error: str) -> None:
    with pytest.raises(ConfigurationError, match=error):
        models.model(text)


def test_a_model_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "of_a_file.py"
    path.write_text("import torch\ndef make(): return torch.nn.Linear(3, 2), lambda net: net(torch.ones(3)).sum()")
    module, loss = models.model(f"{path}:make")
    loss(module).backward()
    assert module.weight.grad is not None


def test_native_ways_belong_to_backends() -> None:
    assert {native(backend)[0] for backend in ("torch", "horovod", "mpi")} == {"ddp", "horovod", "mpi"}
    with pytest.raises(ConfigurationError, match="mpi-loop runs on the mpi backend, not on torch"):
        native("torch", "mpi-loop")
    with pytest.raises(ConfigurationError, match="unknown native way"):
        native("torch", "dpd")
    assert all(native(owner, name) == (name, make) for name, (owner, make) in WAYS.items())


# The network --------------------------------------------------------------------------------------


def test_ring_and_tree_take_turns() -> None:
    """Latency decides for few bytes, bandwidth for many: 2 log2 N (a + B/b) against 2 (N-1) a + 2 (N-1)/N B/b."""
    net, n = Network.given(latency=1e-3, bandwidth=1e6), 16
    few, many = (Load("AllReduce", "world", whole * 2 * (n - 1) / n, n) for whole in (10.0, 1e7))
    assert net.seconds(few) == pytest.approx(8 * 1e-3 + 2 * 10 / 1e6)
    assert net.seconds(many) == pytest.approx(30 * 1e-3 + 1e7 * 2 * 15 / 16 / 1e6)


def test_ranks_of_a_node_share_its_network_where_everybody_talks_to_everybody() -> None:
    net = Network.given(0.0, 1e6)
    assert net.seconds(Load("AllToAll", "world", 1e6, 8), local_size=4) == pytest.approx(4.0)
    assert net.seconds(Load("AllReduce", "world", 1e6, 8), local_size=4) == pytest.approx(1.0)
    for kind in ("AllToAll", "AllReduce", "ReduceScatter", "AllGather"):  # all lanes at once
        assert net.seconds(Load(kind, "cross", 1e6, 2), local_size=4) == pytest.approx(4.0)
    lanes = replace(net, cross={"": AlphaBeta(0.0, 1e5)}, local_size=4)  # measured so
    assert lanes.seconds(Load("AllReduce", "cross", 1e6, 2), local_size=4) == pytest.approx(10.0)
    assert lanes.seconds(Load("AllReduce", "cross", 1e6, 2), local_size=8) == pytest.approx(20.0)
    assert lanes.seconds(Load("AllToAll", "world", 1e6, 8), local_size=4) == pytest.approx(1.0)


def test_inside_a_node_its_own_line_counts() -> None:
    net = Network.given(0.0, 1e6, local=(0.0, 1e9))
    assert net.seconds(Load("AllReduce", "node", 1e6, 2)) == pytest.approx(1e-3)
    assert net.seconds(Load("AllReduce", "world", 1e6, 4), local_size=4) == pytest.approx(1e-3)  # nobody elsewhere
    assert net.seconds(Load("AllReduce", "world", 1e6, 8), local_size=4) == pytest.approx(1.0)
    assert net.seconds(Load("AllReduce", "world", 1e6, 1)) == 0.0
    assert Network.from_dict(json.loads(json.dumps(asdict(net)))) == net


# The plan -----------------------------------------------------------------------------------------


def planner(network: Network, **more: float) -> Planner:
    return Planner({f"w{i}": (1000,) for i in range(4)}, 1.0, 4.0, network, bucket_mb=4000 / 2**20, **more)


IDLE = Computation({(2, False): 0.0}, {(2, False): 0.0})


@pytest.mark.parametrize(
    ("seconds_per_bucket", "step"),
    [
        (0.5, 5.5),  # hidden but for the last bucket's
        (1.0, 6.0),  # just so
        (2.0, 10.0),  # forward, the first bucket's backward, and then the network without a pause
    ],
)
def test_backward_hides_what_it_can(seconds_per_bucket: float, step: float) -> None:
    """Four buckets of 4,000 bytes, each a second of backward; two ranks send each once."""
    found = planner(Network.given(0.0, 4000 / seconds_per_bucket)).predict("mean", from_spec("mean"), 2, IDLE)
    assert found.step == pytest.approx(step)
    assert found.bytes_sent == 16_000
    assert found.communication == pytest.approx(4 * seconds_per_bucket)


@pytest.mark.parametrize(
    ("seconds_per_bucket", "step"),
    [
        (0.5, 5.0),  # four buckets behind backward are there before the next step ends
        (1.25, 5.0),
        (2.0, 8.0),  # the next step's first waits for them
    ],
)
@pytest.mark.parametrize("spec", ["delayed(mean)", "partition(w0=mean, rest=delayed(mean))"])
def test_what_goes_on_behind_a_step_is_waited_for_in_the_next(
    spec: str, seconds_per_bucket: float, step: float
) -> None:
    found = planner(Network.given(0.0, 4000 / seconds_per_bucket)).predict(spec, from_spec(spec), 2, IDLE)
    if "partition" in spec:  # w0's, the last, is waited for; three follow
        assert found.step == pytest.approx(max(5.0 + seconds_per_bucket, 4 * seconds_per_bucket))
    else:
        assert found.step == pytest.approx(step)
    assert found.bytes_sent == 16_000


def test_arithmetic_takes_the_time_of_backward_where_no_core_is_free() -> None:
    busy = Computation({(2, False): 2.0}, {(2, False): 0.0})
    fast = Network.given(0.0, 1e12)
    alone = planner(fast, cores=2).predict("mean", from_spec("mean"), 2, busy)
    shared = planner(fast, cores=1).predict("mean", from_spec("mean"), 2, busy)
    assert alone.step == pytest.approx(5.5)
    assert shared.step == pytest.approx(7.0)
    assert alone.compression == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("seconds_per_bucket", "cores", "step"),
    [(0.25, 1, 7.25), (1.0, 1, 8.0), (2.0, 1, 10.5), (2.0, 0.5, 10.5)],  # waits for: the last bucket, twice; all four
)
def test_arithmetic_on_backwards_core_goes_on_while_the_network_sends(
    seconds_per_bucket: float, cores: float, step: float
) -> None:
    """Each bucket takes a second of backward and half of one of arithmetic, after one of forward."""
    busy = Computation({(2, False): 2.0}, {(2, False): 0.0})
    network = Network.given(0.0, 4000 / seconds_per_bucket)
    assert planner(network, cores=cores).predict("mean", from_spec("mean"), 2, busy).step == pytest.approx(step)


@pytest.mark.parametrize("line", [AlphaBeta(0.0, 16_000, cpu=1.0), AlphaBeta(0.125, 1e15, latency_cpu=1.0)])
@pytest.mark.parametrize(("cores", "step"), [(2, 5.25), (1, 6.0), (0.5, 7.0)])
def test_sending_takes_the_time_of_backward_where_no_core_is_free(cores: float, step: float, line: AlphaBeta) -> None:
    """A quarter of a second of a core per bucket; where two ranks share it, each waits for the other's turn, too."""
    busy = Network({"": line})
    assert planner(busy, cores=cores).predict("mean", from_spec("mean"), 2, IDLE).step == pytest.approx(step)


@pytest.mark.parametrize(("cores", "step"), [(0.5, 38.0), (1, 19.0), (2, 9.5), (4, 5.5), (8, 5.5)])
def test_nothing_ends_before_the_cores_have_done_it_all(cores: float, step: float) -> None:
    """Five seconds of computing, half of one of sending for each of four buckets, and twelve of something else."""
    busy = planner(Network({"": AlphaBeta(0.0, 8_000, cpu=1.0)}), cores=cores, compute_cpu=5.0, overhead=12.0)
    found = busy.predict("mean", from_spec("mean"), 2, IDLE)
    assert found.cpu == pytest.approx(19.0)
    assert found.step == pytest.approx(step)


def test_a_slower_machine_takes_longer_for_all_but_its_network() -> None:
    network = Network.given(0.0, 8_000)
    fast = planner(network, optimizer=0.5, compute_cpu=3.0)
    slow = fast.scaled(2)
    assert (slow.forward, slow.backward, slow.optimizer) == (2.0, 8.0, 1.0)
    assert slow.compute_cpu == 6.0
    assert slow.network is network


@pytest.mark.parametrize(("spec", "grows"), [("bf16", False), ("powersgd:rank=4", False), ("topk:ratio=0.25", True)])
def test_noise_is_not_multiplied_by_the_ranks(spec: str, grows: bool) -> None:
    """What a policy codes does not depend on their number, what it decodes of a sparse gather does."""
    params = {"w": (1000, 1000)}
    received = measure_computation(from_spec(spec), params, 10.0, repeats=1).received
    known = Computation({(2, False): 1.0, (8, False): 1.5}, received)
    job = Planner(params, 0.0, 0.0, Network.given(1e-6, 1e9))
    few, many = (job.predict(spec, from_spec(spec), ranks, known).compression for ranks in (8, 100_000))
    assert (few, many) == (1.5, pytest.approx(1.0 + 99_998 / 12) if grows else 1.5)


@pytest.mark.parametrize("every", [8, 700, 5000])
def test_what_comes_seldom_has_its_share(every: int) -> None:
    assert step_kinds(from_spec(f"local_sgd:every={every}"))[1] == pytest.approx(1 / every)


def test_a_node_that_hides_its_ranks_behind_one_network_gains_no_bandwidth() -> None:
    """Eight lanes of a hierarchy share 10 Gbit/s: a network card has to send 7/4 of 100 MB on eight nodes."""
    params = {"w": (25_000_000,)}
    job = Planner(params, 0.0, 0.0, Network.given(0.0, 1.25e9, local=(0.0, 1e11)), 100.0, local_size=8)
    spec = "hierarchical(mean)"
    known = Computation({(64, False): 0.0}, {(64, False): 0.0})
    found = job.predict(spec, from_spec(spec), 64, known)
    assert found.communication >= 0.14


@pytest.mark.parametrize("spec", SPECS)
def test_predicted_bytes_are_those_of_bytes_per_step(spec: str) -> None:
    policy = from_spec(spec)
    arithmetic = measure_computation(policy, PARAMS, 0.005, repeats=1)
    job = Planner(PARAMS, 1e-3, 2e-3, Network.given(1e-6, 1e9), bucket_mb=0.005)
    for ranks in (4, 8):
        found = job.predict(spec, policy, ranks, arithmetic)
        every = [bytes_per_step(policy, PARAMS, ranks, step, 0.005, 1) for step in range(10_000, 10_004)]
        assert found.bytes_sent == pytest.approx(sum(every) / 4)
        assert found.step >= 3e-3


@pytest.mark.parametrize("spec", ["mean", "topk:ratio=0.01", "powersgd:rank=2", "bf16", "int8"])
@pytest.mark.parametrize("ranks", [4 * MAX_DRY_RUN_RANKS, 20 * MAX_DRY_RUN_RANKS])
def test_beyond_a_dry_run_bytes_go_on_as_they_grew(spec: str, ranks: int) -> None:
    policy = from_spec(spec)
    params = {"w": (2000, 2000)}
    arithmetic = measure_computation(policy, params, 10.0, repeats=1)
    found = Planner(params, 0.0, 0.0, Network.given(1e-6, 1e9)).predict(spec, policy, ranks, arithmetic)
    assert found.bytes_sent == pytest.approx(bytes_per_step(policy, params, ranks), rel=0.01)


def test_rules_that_smaller_parameters_would_meet_do_not_multiply_bytes() -> None:
    """Beyond a dry run a part of the parameters stands for all, flat: there each meets another rule."""
    policy, params = from_spec("partition(1d=fp16, rest=int8)"), {"w": (2000, 2000)}
    found = Planner(params, 0.0, 0.0, Network.given(1e-6, 1e9)).predict("p", policy, 1024, IDLE)
    assert found.bytes_sent == pytest.approx(bytes_per_step(policy, params, 256), rel=0.02)


def test_a_policy_that_needs_more_ranks_is_measured_where_it_is_defined() -> None:
    computation = measure_computation(from_spec("krum:f=1"), PARAMS, 10.0, repeats=1)
    assert {ranks for ranks, _ in computation.seconds} == {8, 64}
    with pytest.raises(ConfigurationError, match="its arithmetic is measured at"):
        measure_computation(from_spec("krum:f=40"), PARAMS, 10.0)


@pytest.mark.parametrize("dtypes", [("float32",) * 3, ("bfloat16",) * 3, ("bfloat16", "float32", "float64")])
@pytest.mark.parametrize("spec", [*SPECS, "hierarchical(adasum)", "krum", "dgc", "clipped_mean", "diloco"])
def test_every_policy_is_timed_as_it_runs(spec: str, dtypes: tuple[str, ...]) -> None:
    shapes = {"a": (40, 30), "b": (30,), "c": (1000,)}
    kinds = [getattr(torch, name) for name in dtypes]
    params = {name: torch.zeros(shape, dtype=kind) for (name, shape), kind in zip(shapes.items(), kinds, strict=True)}
    policy = from_spec(spec)
    for local_size in (1, 2):
        computation = measure_computation(policy, params, 0.003, local_size=local_size, repeats=1)
        planner = Planner(params, 1e-3, 2e-3, Network.given(1e-6, 1e9), 0.003, local_size)
        found = planner.predict(spec, policy, 8, computation, factor=2.0)
        assert found.step >= 3e-3
        assert found.compression == pytest.approx(2 * planner.predict(spec, policy, 8, computation).compression)


def test_the_recommendation_prefers_the_simple() -> None:
    mean = Prediction("mean", 8, 1.0, 0.5, 0.0, 0.9, 100)
    rows = [mean, replace(mean, policy="bf16", step=0.52), replace(mean, policy="topk", step=0.51)]
    text = recommend(rows, 8)
    assert text.startswith("8 ranks: bf16: 520.0 ms a step, all of its work overlaps with backward")
    assert "1.9 times as fast as mean" in text
    assert "the network is what" in recommend([replace(mean, step=0.9, compression=0.4)], 8)
    assert "cores are what the step waits for" in recommend([replace(mean, working=0.98)], 8)
    assert "the network is what the step waits for" in recommend([replace(mean, working=0.5)], 8)
    assert "nothing is gained" in recommend([replace(mean, step=0.5)], 8)
    assert recommend([replace(mean, step=math.inf)], 8) == "8 ranks: no policy has a prediction"


def test_plan_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    words = ["--model", "small:4", "--gbits", "1", "--ranks", "2", "64", "--policies", "mean", "int8", "krum:f=40"]
    assert main(["plan", *words, "--compute-ms", "3", "--json", str(out), "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "64 ranks" in printed
    assert "krum:f=40: left out" in printed
    assert {(row["policy"], row["ranks"]) for row in json.loads(out.read_text())["rows"]} == {
        (policy, ranks) for policy in ("mean", "int8") for ranks in (2, 64)
    }
    assert picture.stat().st_size > 1000


def test_plan_takes_compression_as_it_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the job, beside other ranks; what comes due in some steps only has no median step that says it."""
    source, out = tmp_path / "bench.json", tmp_path / "plan.json"
    policies = {"int8": 0.125, "topk:ratio=0.01": 0.0, "local_sgd:every=8": 7.0}
    rows = [
        {"backend": "torch", "model": "small:4", "policy": spec, "ranks": 2, "step": 0.5, "compute": 0.25,
         "compression": seconds, "cpu": 0.5, "compute_cpu": 0.25, "bucket_mb": 10.0, "samples": None, "enqueued": False}
        for spec, seconds in policies.items()
    ]  # fmt: skip
    source.write_text(json.dumps({"network": asdict(Network.given(1e-4, 1e8)), "rows": rows}))
    words = ["--model", "small:4", "--from", str(source), "--ranks", "2", "--policies", *policies, "mean"]
    assert main(["plan", *words, "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "predicted" in printed
    found = {row["policy"]: row for row in json.loads(out.read_text())["rows"]}
    assert found["int8"]["compression"] == pytest.approx(0.125)
    assert found["int8"]["step"] > 0.25 + 0.125 / 2
    assert found["topk:ratio=0.01"]["compression"] == 0.0
    assert found["local_sgd:every=8"]["compression"] < 1.0
    assert all(row["compute"] == pytest.approx(0.25) for row in found.values())


def test_plan_where_cores_are_what_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks share a core. What is compared has the computation of its own row; what was not measured has the least
    overhead of what was."""
    source, out = tmp_path / "bench.json", tmp_path / "plan.json"
    row = {"backend": "torch", "model": "small:4", "ranks": 2, "compression": 0.0, "bucket_mb": 25.0,
           "samples": None, "enqueued": False}  # fmt: skip
    rows = [
        {**row, "policy": "mean", "step": 11.0, "compute": 1.0, "compute_cpu": 0.5, "cpu": 5.5},
        {**row, "policy": "int8", "step": 6.5, "compute": 3.0, "compute_cpu": 1.5, "cpu": 6.5},
    ]
    network = replace(Network.given(1e-4, 1e8), cores=0.5)
    source.write_text(json.dumps({"network": asdict(network), "rows": rows}))
    words = ["--model", "small:4", "--from", str(source), "--ranks", "2", "--policies", "bf16", "mean", "int8"]
    assert main(["plan", *words, "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"mean\W+2\W+11000\.0\W+11000\.0\W+1\.00", printed)
    assert re.search(r"int8\W+2\W+13000\.0\W+6500\.0\W+2\.00", printed)
    bf16, mean, int8 = json.loads(out.read_text())["rows"]
    assert (mean["step"], int8["step"]) == pytest.approx((12.0, 12.0), abs=0.25)  # copies are as slow as computing
    assert bf16["policy"] == "bf16"
    assert bf16["step"] > 11.5


@pytest.mark.parametrize(("more", "stretched"), [([], False), (["--cores", "0.01"], True)])
def test_a_computation_that_was_said_has_its_cores(
    more: list[str], stretched: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As many ranks on a node as this machine has cores, four times: on the machines planned for there are more."""
    out = tmp_path / "plan.json"
    words = ["plan", "--model", "small:40", "--gbits", "1e6", "--latency-us", "0", "--policies", "mean"]
    words += ["--compute-ms", "100", "--local-size", str(4 * len(usable_cores())), "--ranks", "1", "1000", *more]
    assert main([*words, "--json", str(out)]) == 0
    alone, many = (row["step"] for row in json.loads(out.read_text())["rows"])
    assert (many > 0.2) is stretched
    assert (alone > 0.2) is stretched
    assert "Computation 100.0 ms a step as given" in capsys.readouterr().out


def test_no_more_ranks_share_a_machine_than_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "small:4", "--gbits", "1", "--policies", "mean", "--local-size", "1000"]
    assert main([*words, "--ranks", "1", "1000"]) == 0
    cores = len(usable_cores())
    assert f", {cores / 1000:.3g} to {cores} cores per rank" in capsys.readouterr().out


def test_a_bucket_among_many_nodes_asks_for_two() -> None:
    assert default_bucket_mb(from_spec("mean"), range(10**12)) == default_bucket_mb(from_spec("mean"), range(2))


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, int], float]:
    """The last size of a bucket with which each policy was predicted among so many ranks, in MiB."""
    monkeypatch.setattr("hvdbridge.reduction.source.DDP_HAS_SIZE_LIST", True)
    found: dict[tuple[str, int], float] = {}
    predict = Planner.predict

    def spy(
        self: Planner, spec: str, policy: Policy, ranks: int, computation: Computation, factor: float = 1.0
    ) -> Prediction:
        found[spec, ranks] = self.bucket_mb
        return predict(self, spec, policy, ranks, computation, factor)

    monkeypatch.setattr(Planner, "predict", spy)
    return found


def test_plan_has_the_buckets_that_a_job_would(sizes: dict[tuple[str, int], float]) -> None:
    """Whatever else is planned: DDP's on one node, smaller ones among several; or as said."""
    words = ["plan", "--model", "small:4", "--gbits", "1", "--local-size", "4", "--policies", "mean", "int8"]
    assert main([*words, "--ranks", "2", "4", "8"]) == 0
    usual = {"mean": (25, 25, 10), "int8": (10, 10, 5)}
    assert sizes == {(spec, n): size for spec in usual for n, size in zip((2, 4, 8), usual[spec], strict=True)}
    assert main([*words, "--ranks", "2", "8", "--bucket-mb", "3"]) == 0
    assert {sizes[spec, n] for spec in ("mean", "int8") for n in (2, 8)} == {3}


@pytest.mark.parametrize(("measured", "expected"), [(25.0, 10.0), (4.0, 4.0)])
def test_plan_from_one_node(
    measured: float, expected: float, tmp_path: Path, sizes: dict[tuple[str, int], float]
) -> None:
    """What was usual there is not so among several; what was said is."""
    path = tmp_path / "bench.json"
    words = written(path, ("torch", "small:4", None))
    content = json.loads(path.read_text())
    content["network"]["local_size"], content["rows"][0]["bucket_mb"] = 2, measured
    path.write_text(json.dumps(content))
    assert main([*words[:3], "--ranks", "2", "8", "--policies", "mean"]) == 0
    assert sizes["mean", 2] == measured
    assert sizes["mean", 8] == expected


def written(path: Path, *rows: tuple[str, str, int | None]) -> list[str]:
    """The words for a plan from a file of ``bench`` with rows of (backend, model, samples)."""
    row = {"policy": "mean", "ranks": 2, "step": 2.0, "compute": 1.0, "compression": 0.5, "cpu": 1.0,
           "compute_cpu": 0.5, "bucket_mb": 25.0, "enqueued": False}  # fmt: skip
    content = [{**row, "backend": backend, "model": name, "samples": samples} for backend, name, samples in rows]
    path.write_text(json.dumps({"network": asdict(Network.given(1e-4, 1e8)), "rows": content}))
    return ["plan", "--from", str(path), "--ranks", "2", "--policies", "mean"]


def test_plan_is_of_the_files_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bench.json"
    words = written(path, ("torch", "small:4", 4), ("mpi", "small:4", 4))
    assert main(words) == 0
    assert main([*words, "--samples", "4"]) == 0
    printed = capsys.readouterr()
    assert "rows of small:4 with mpi" in printed.err
    assert "predicted" in printed.out
    assert main([*words, "--samples", "5"]) == 2
    assert "--samples 5" in capsys.readouterr().err
    assert main([*words, "--model", "small:3"]) == 0
    assert "the network alone: it has no row of small:3" in capsys.readouterr().err
    assert main(written(path, ("torch", "small:4", None), ("torch", "small:3", None))) == 2
    assert "has small:4, small:3: say which by --model" in capsys.readouterr().err


def test_plan_of_a_files_machine_with_another_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --gbits ranks have a node each, the file's computation and the given link; its own row keeps its network."""
    path, out = tmp_path / "bench.json", tmp_path / "plan.json"
    words = written(path, ("torch", "small:4", None))
    content = json.loads(path.read_text())
    content["network"] |= {"local_size": 2, "cores": 1.0}
    path.write_text(json.dumps(content))

    def figures(*more: str) -> tuple[float, float, float]:
        assert main([*words, *more, "--json", str(out)]) == 0
        (row,) = json.loads(out.read_text())["rows"]
        printed = capsys.readouterr()
        compared = re.search(r"mean\W+2\W+([\d.]+)\W+2000\.0\W+[\d.]+", printed.out)
        assert compared is not None
        assert ("All 2 ranks were on one node" in printed.err) == ("--gbits" not in more)
        return row["communication"], row["compute"], float(compared[1])

    seconds, compute, row = figures()
    slow, same_compute, same_row = figures("--gbits", "1e-5", "--latency-us", "0")
    assert slow == pytest.approx(json.loads(out.read_text())["rows"][0]["bytes_sent"] * 8 / 1e4)
    assert slow > 2 > 100 * seconds
    assert same_compute == pytest.approx(compute)
    assert same_row == pytest.approx(row, rel=0.2)
    assert json.loads(out.read_text())["network"]["cores"] == 2.0, "a rank has the cores of both ranks of the file"
    within, _, _ = figures("--gbits", "1e-5", "--local-size", "2")
    assert within == pytest.approx(seconds), "on one node the file's network counts"


@pytest.mark.parametrize(
    ("variable", "more", "expected"),
    [
        (None, [], [1, 3]),  # a rank alone on its node has a thread per core
        (None, ["--local-size", "2"], [1]),  # as hb.init() sets it
        (None, ["--local-size", "2", "--ranks", "1"], [1, 3]),
        (None, ["--cores", "2"], [1, 2]),
        ("2", [], [2]),
    ],
)
def test_plan_measures_with_the_threads_of_a_rank(
    variable: str | None, more: list[str], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "usable_cores", lambda: [0, 1, 2])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    before, found = torch.get_num_threads(), []

    def spy(threads: list[int], *functions: Callable[[], object]) -> tuple[int, list[list[tuple[float, float]]]]:
        found.extend(threads)
        return fastest(threads, *functions)

    fastest = plan._fastest
    monkeypatch.setattr(plan, "_fastest", spy)
    try:
        torch.set_num_threads(int(variable or before))
        assert main(["plan", "--model", "small:4", "--gbits", "1", "--ranks", "2", "--policies", "mean", *more]) == 0
        assert torch.get_num_threads() == int(variable or before)
    finally:
        torch.set_num_threads(before)
    assert found == expected


@pytest.mark.parametrize(("seconds", "best"), [({1: 0.004, 2: 0.04}, 1), ({1: 0.04, 2: 0.004}, 2)])
def test_the_faster_number_of_threads_counts(seconds: dict[int, float], best: int) -> None:
    """On cores that other programs use, two threads may take a hundred times as long as one."""
    before = torch.get_num_threads()
    try:
        number, (runs,) = plan._fastest([1, 2], lambda: time.sleep(seconds[torch.get_num_threads()]))
        assert number == torch.get_num_threads() == best
    finally:
        torch.set_num_threads(before)
    assert len(runs) == 5
    assert sum(t for t, _ in runs) >= 5 * seconds[best]


@pytest.mark.parametrize("more", [[], ["--compute-ms", "300"]])
@pytest.mark.parametrize(("steps", "warns"), [([10, 12, 14, 16, 18], False), ([10, 12, 14, 30, 90], True)])
def test_plan_warns_of_computation_that_varies(
    steps: list[int], warns: bool, more: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [(ms / 1e3, ms / 1e3) for ms in steps]
    monkeypatch.setattr(plan, "_fastest", lambda threads, *functions: (1, [[(0.0, 0.0)] * 5, runs, [(0.0, 0.0)] * 5]))
    words = ["plan", "--model", "small:4", "--gbits", "1", "--ranks", "2", "--policies", "mean", *more]
    assert main(words) == 0
    printed = capsys.readouterr()
    assert f"14.0 ms (1 thread, median of 5; quartiles 12.0 to {steps[3]}.0)" in printed.out
    assert ("Warning: the quartiles differ" in printed.err) is warns
    assert ("give --compute-ms" in printed.err) is (warns and not more)
    assert "timing small:4 on this machine" in printed.err
    assert "arithmetic of mean (1 of 1)" in printed.err


@pytest.mark.parametrize("without_row", [False, True])
def test_plan_warns_if_a_policy_has_no_row(
    without_row: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    runs = [(ms / 1e3, ms / 1e3) for ms in (10, 12, 14, 30, 90)]
    monkeypatch.setattr(plan, "_fastest", lambda threads, *functions: (1, [[(0.0, 0.0)] * 5, runs, [(0.0, 0.0)] * 5]))
    words = written(tmp_path / "bench.json", ("torch", "small:4", None))
    assert main([*words, *(["int8"] if without_row else [])]) == 0
    assert ("Predictions of policies without a row in FILE" in capsys.readouterr().err) is without_row


def test_small_messages_have_digits(capsys: pytest.CaptureFixture[str]) -> None:
    show(predicted([Prediction("powersgd", 2, 0.5, 0.1, 0.0, 0.9, 46_112)]))
    assert "500.0 (0.0461)" in capsys.readouterr().out


def test_plan_refuses_a_latency_alone_and_files_without_a_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bench.json"
    words = written(path, ("torch", "small:4", None))
    assert main([*words, "--latency-us", "1"]) == 2
    assert f"--latency-us 1 and --from {path}: it needs --gbits" in capsys.readouterr().err
    assert main([*words, "--local-gbits", "100"]) == 0
    content = json.loads(path.read_text())
    for wrong in ({"rows": []}, {"network": {"lines": []}}, {"rows": [content["rows"][0] | {"ranks": 1}]}):
        path.write_text(json.dumps(content | wrong))
        assert main(words) == 2
        said = capsys.readouterr().err
        assert ("one rank alone has measured no network" if "ranks" in str(wrong) else "not what hvdbridge") in said


@pytest.mark.parametrize(
    ("place", "wrong", "said"),
    [
        (("network", "local_size"), 0, "network.local_size 0 must be positive"),
        (("network", "local_size"), 1.5, "network.local_size 1.5 must be a whole number"),
        (("network", "cores"), 0.0, "network.cores 0.0 must be positive"),
        (("network", "lines"), {}, "network.lines is of no AllGather, AllReduce"),
        (("network", "lines"), None, "network.lines is missing"),
        (("network", "lines", "", "bandwidth"), math.inf, "network.lines..bandwidth inf must be positive"),
        (("network", "lines", "", "latency"), -1, "network.lines..latency -1 must be at least 0"),
        (("network", "local"), {"": {"latency": 0}}, "network.local..bandwidth is missing"),
        (("rows", 0, "compute"), 0.0, "rows[0].compute 0.0 must be positive"),
        (("rows", 0, "step"), "x", "rows[0].step 'x' must be a number"),
        (("rows", 0, "cpu"), math.nan, "rows[0].cpu nan must be at least 0"),
        (("rows", 0, "ranks"), 2.5, "rows[0].ranks 2.5 must be a whole number"),
        (("rows", 0, "ranks"), True, "rows[0].ranks True must be a whole number"),
        (("rows", 0, "bucket_mb"), 10**400, "must be positive and at most"),
        (("rows", 0, "policy"), 3, "rows[0].policy 3 must be str"),
        (("rows", 0, "enqueued"), None, "rows[0].enqueued None must be bool"),
        (("rows", 0), 3, "not what hvdbridge bench --json writes: "),
    ],
)
def test_plan_says_what_is_wrong_in_a_file(
    place: tuple[str | int, ...], wrong: object, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bench.json"
    words = written(path, ("torch", "small:4", None))
    content = json.loads(path.read_text())
    *way, last = place
    inner = content
    for name in way:
        inner = inner[name]
    inner[last] = wrong
    path.write_text(json.dumps(content))
    assert main(words) == 2
    printed = capsys.readouterr().err
    assert f"--from {path}: not what hvdbridge bench --json writes: " in printed
    assert said in printed


def test_a_policy_that_only_another_models_file_has_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bench.json"
    words = written(path, ("torch", "small:4", None))
    content = json.loads(path.read_text())
    content["rows"].append(content["rows"][0] | {"policy": "of_elsewhere"})
    path.write_text(json.dumps(content))
    assert main(words[:-2]) == 0
    assert "of_elsewhere: left out: unknown policy 'of_elsewhere'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "said"),
    [(".", "Is a directory"), ("file/x.json", "Not a directory"), (300 * "x", "File name too long")],
    ids=["folder", "below a file", "long"],
)
@pytest.mark.parametrize("words", [["plan", "--gbits", "1"], ["bench"]])
def test_a_file_that_cannot_be_written_is_told_at_once(
    words: list[str], name: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(command, "_launch", lambda *_: pytest.fail("measured"))
    (tmp_path / "file").touch()
    assert main([*words, "--json", str(tmp_path / name)]) == 2
    printed = capsys.readouterr().err
    assert "--json " in printed
    assert "cannot be written: " in printed
    assert said in printed
    assert printed.count("\n") == 1
    picture = tmp_path / "folder.png"
    picture.mkdir()
    assert main([*words, "--plot", str(picture)]) == 2
    assert f"--plot {picture} cannot be written" in capsys.readouterr().err


def test_a_look_at_a_file_leaves_it_alone(tmp_path: Path) -> None:
    path = tmp_path / "there.json"
    path.write_text("kept")
    for each in (path, tmp_path / "a" / "b" / "new.json"):
        checks.check_file("--json", each)
    assert path.read_text() == "kept"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_saved_goes_through_a_pipe() -> None:
    """As ``--json /dev/stdout`` before ``| jq``."""
    reader, writer = os.pipe()
    save(Path(f"/dev/fd/{writer}"), Network.given(1e-5, 1e9), [])
    os.close(writer)
    with os.fdopen(reader) as pipe:
        assert json.load(pipe)["rows"] == []


@pytest.mark.parametrize("ends", [KeyError, None])
def test_signals_are_heard_within_only(ends: type[Exception] | None) -> None:
    """While a hook for what went wrong waits for other ranks, they are what they were."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]

    def heard(*_: object) -> None:
        pass

    with suppress(KeyError), command._handle_signals(heard):
        assert [signal.getsignal(number) for number in numbers] == [heard, heard]
        if ends is not None:
            raise ends
    assert [signal.getsignal(number) for number in numbers] == before


def test_what_the_host_cannot_time_is_not_told() -> None:
    row = Row("torch", "torchrun", 2, "small", "int8", None, "ddp", 8, 3, 2.0, 1.0, 0.125, 0.25, 1.0, 100.0, 1.0, 0.5,
              2.0, (1.0, 1.0, 1.0), 1.5, 10.0, True)  # fmt: skip
    cells = [next(iter(column.cells)) for column in measured([row]).columns]
    assert cells[4:9] == ["1000.0", "–", "–", "1000.0", "10"]
    assert cells.count("–") == 3
    assert "–" not in [next(iter(column.cells)) for column in measured([replace(row, enqueued=False)]).columns]


def test_a_row_without_a_native_way_and_a_pattern_in_brackets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = "partition(layers.[ab]*=mean, '[/x]'=mean, rest=int8)"
    row = Row("mpi", "mpiexec", 2, "own.py:[a]", spec, None, "none: not ['bfloat16 on cpu']", 8, 3, 2.0, 1.0, 0.125,
              0.25, 1.0, 1200.0, 1.0, 0.5, None, None, 1.5, 10.0)  # fmt: skip
    show(measured([row]))
    printed = capsys.readouterr().out
    assert all(text in printed for text in (spec, "own.py:[a]", "native: none: not ['bfloat16 on cpu']", "0.0012"))
    plot_measured(tmp_path / "p.png", [row, replace(row, native=1.0, ratio=(1.0, 2.0, 3.0))])
    save(tmp_path / "b.json", Network.given(1e-5, 1e9), [row])
    (saved,) = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert (saved["native"], saved["ratio"], saved["bandwidth"]) == (None, None, 4800.0)
    show(predicted([Prediction(spec, 2, 1.0, 1.0, 0.0, 0.9, 1e9)]))
    assert spec in capsys.readouterr().out


def test_a_plan_of_nothing_fails(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--gbits", "1", "--model", "small:4", "--ranks", "2", "--policies"]
    assert main([*words, "krum:f=40", "hierarchical(hierarchical(mean))"]) == 2
    printed = capsys.readouterr().out
    assert "krum:f=40: left out: " in printed
    assert "hierarchical(hierarchical(mean)): left out: " in printed
    assert main([*words, "hierarchical(hierarchical(mean))", "mean"]) == 0


def test_no_figure_is_cut_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    row = Row("horovod", "horovodrun", 2, "resnet50", "powersgd:rank=4", None, "horovod", 8, 3, 1234.5, 1.0, 0.125,
              0.25, 1.0, 1e9, 1.0, 0.5, 2.0, (1.125, 1.25, 1.5), 1.5, 10.0)  # fmt: skip
    show(measured([row]))
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert all(text in printed for text in ("1234500.0", "powersgd:rank=4", "1.12 .. 1.50", "2 ranks by horovodrun"))
    monkeypatch.setenv("COLUMNS", "80")
    show(predicted([Prediction("mean", ranks, 1234.5, 1.0, 0.0, 0.9, 1e9) for ranks in range(2, 12)]))
    printed = capsys.readouterr().out
    assert printed.count("1234500.0 (1000.00)") == 10


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["plan"], "name the network"),
        (["plan", "--gbits", "1", "--ranks", "0"], "must be positive"),
        (["plan", "--gbits", "1", "--local-size", "0"], "must be positive"),
        (["plan", "--gbits", "1", "--bucket-mb", "0"], "must be positive"),
        (["plan", "--gbits", "1", "--cores", "-1"], "must be positive"),
        (["plan", "--gbits", "1", "--local-latency-us", "2"], "--local-latency-us 2 needs --local-gbits"),
        (["plan", "--gbits", "1", "--compute-ms", "0"], "must be positive"),
        (["plan", "--gbits", "1", "--ranks", "1000000000000"], "--ranks 1000000000000 must be positive and at most"),
        *(
            (["plan", "--gbits", "1", "--local-gbits", "1", option, wrong], f"{option} {wrong} must be positive")
            for option in ("--gbits", "--local-gbits", "--compute-ms", "--bucket-mb", "--cores")
            for wrong in ("nan", "inf", "-1.0", "0.0")
        ),
        *(
            (["plan", "--gbits", "1", "--local-gbits", "1", option, wrong], f"{option} {wrong} must be at least 0")
            for option in ("--latency-us", "--local-latency-us")
            for wrong in ("nan", "inf", "-1.0")
        ),
        *((["bench", "--bucket-mb", wrong], f"--bucket-mb {wrong} must be") for wrong in ("nan", "inf", "0.0", "-1.0")),
        (["bench", "--ranks", "0"], "--ranks 0 must be positive"),
        (["bench", "--steps", "1000000000000"], "--steps 1000000000000 must be positive and at most 1,000,000"),
        (["bench", "--policies", "int9"], "unknown policy 'int9'"),
        (["plan", "--gbits", "1", "--policies", "int9"], "unknown policy 'int9'"),
        (["plan", "--gbits", "1", "--samples", "0"], "a positive number"),
        (["plan", "--from", "nowhere.json"], "--from nowhere.json: there is no such file"),
        (["plan", "--gbits", "1", "--plot", "p.xyz"], "--plot p.xyz: its name must end in one of"),
        (["bench", "--plot", "p.xyz"], "--plot p.xyz: its name must end in one of"),
        (["bench", "--models", "nowhere.py:make"], "no file nowhere.py in"),
        (["plan", "--from", __file__], "not what hvdbridge bench --json writes: JSONDecodeError"),
        (["bench", "--steps", "0"], "must be positive"),
        (["bench", "--models", "small,smal"], "unknown model 'smal'"),
        (["bench", "--models", "bert-base:12"], "only small takes a number"),
        (["bench", "--models", "small:0"], "only small takes a number"),
        (["bench", "--models", "json:loads", "--samples", "3"], "--samples 3 with json:loads"),
        (["bench", "--samples", "0"], "a positive number"),
        (["bench", "--backends", "nccl"], "known are torch, horovod, mpi"),
    ],
)
def test_bad_words(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["slow_network.py", "--ranks-per-host", "0"], 2, "--ranks-per-host 0 must be positive"),
        (["slow_network.py", "--mbits", "nan"], 2, "nan Mbit/s (above 0)"),
        (["slow_network.py", "--mbits", "inf"], 2, "inf Mbit/s (above 0)"),
        (["slow_network.py", "--delay-ms", "nan"], 2, "nan ms (not below 0)"),
        (["slow_network.py", "--delay-ms", "-1"], 2, "-1.0 ms (not below 0)"),
        (["slow_network.py", "--hosts", "0"], 2, "0 hosts (1 to 26)"),
        (["scheduler.py", "--help"], 0, "Measure the CPU time per bucket"),
    ],
)
def test_words_of_benchmarks(words: list[str], status: int, said: str) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / words[0]
    done = subprocess.run([sys.executable, script, *words[1:]], capture_output=True, text=True, timeout=60)
    assert done.returncode == status
    assert said in (done.stderr if status else done.stdout)
    assert "Traceback" not in done.stderr


def test_a_line_is_what_it_says() -> None:
    assert Network({"AllReduce": AlphaBeta(0.5, 2.0)}).seconds(Load("AllReduce", "world", 4.0, 2)) == pytest.approx(3.0)
    assert not any(isinstance(event, Asked) for event in dry_run(from_spec("noop"), PARAMS, 2))
    assert all(isinstance(event, Ended) for event in dry_run(from_spec("noop"), PARAMS, 2))
