"""The recipes of docs/how-to/frameworks.md: ``recipes.py Lightning | Accelerate | Trainer | Ray | DDP``.

Each imports the page's file ``*_policy.py`` and trains a model by the package's own loop, two batches accumulated per
step, in several buckets. DDP is the loop that Ray's actors must equal.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jobs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import hvdbridge as hb

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "frameworks.md"
BUCKET_MB = 1e-4
POLICIES = ["mean", "ef(bf16)"]


def recipe(package: str) -> Any:
    """Return the page's module ``{package}_policy``."""
    name = f"{package}_policy"
    found = re.search(rf'^```python title="{name}\.py"\n(.*?)^```', PAGE.read_text(), re.M | re.S)
    assert found, name
    names = {"__name__": "__main__"}  # so that Ray pickles the actor's class by value
    exec(compile(found[1], f"{name}.py", "exec"), names)
    return SimpleNamespace(**names)


def mlp() -> nn.Sequential:
    torch.set_num_threads(1)
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(64, 6, generator=generator), torch.randn(64, 3, generator=generator))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def summary(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:16]


def in_buckets(model: Any) -> None:
    """DDP rebuilt its buckets, and has several."""
    told = model._get_ddp_logging_data()
    assert len(told["rebuilt_bucket_sizes"].split(",")) >= 3, told["rebuilt_bucket_sizes"]


# -- On DDP: plain, and by policies -----------------------------------------------------------------------------------


def with_lightning() -> dict[str, str]:
    import lightning
    from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook
    from lightning.pytorch.strategies import DDPStrategy

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

        def on_train_end(self) -> None:
            in_buckets(self.trainer.strategy.model)

    class AsOnCuda(DDPStrategy):
        def _register_ddp_hooks(self) -> None:
            _register_ddp_comm_hook(self.model, self._ddp_comm_state, self._ddp_comm_hook)

    def fit(strategy: DDPStrategy, callbacks: list[Any]) -> str:
        net = Net()
        trainer = lightning.Trainer(
            accelerator="cpu", devices=2, strategy=strategy, callbacks=callbacks,
            max_epochs=2, accumulate_grad_batches=2,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(net, DataLoader(data(), batch_size=4))
        return summary(net)

    results = {"plain": fit(DDPStrategy(bucket_cap_mb=BUCKET_MB), [])}
    for policy in POLICIES:
        results[policy] = fit(DDPStrategy(bucket_cap_mb=BUCKET_MB), [recipe("lightning").Policy(policy)])
        state, hook = hb.to_comm_hook(policy)
        strategy = AsOnCuda(ddp_comm_state=state, ddp_comm_hook=hook, bucket_cap_mb=BUCKET_MB)
        results[f"{policy} by ddp_comm_hook"] = fit(strategy, [])
    return results


def with_accelerate() -> dict[str, str]:
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    def fit(policy: str | None) -> str:
        handler = DistributedDataParallelKwargs(bucket_cap_mb=BUCKET_MB)
        accelerator = Accelerator(cpu=True, kwargs_handlers=[handler], gradient_accumulation_steps=2)
        net = mlp()
        parts = net, sgd(net), DataLoader(data(), batch_size=4)
        if policy is None:
            model, optimizer, loader = accelerator.prepare(*parts)
        else:
            model, optimizer, loader = recipe("accelerate").prepare(accelerator, policy, *parts)
        for _ in range(2):
            for x, y in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(nn.functional.mse_loss(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
        in_buckets(model)
        return summary(model)

    return {"plain": fit(None)} | {policy: fit(policy) for policy in POLICIES}


def with_trainer() -> dict[str, str]:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    ids = torch.randint(50, (48, 16), generator=torch.Generator().manual_seed(1))
    samples = [{"input_ids": row, "labels": row} for row in ids]

    def fit(policy: str | None) -> str:
        torch.set_num_threads(1)
        torch.manual_seed(7)
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        tokens = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0}
        model = GPT2LMHeadModel(GPT2Config(n_positions=16, n_embd=16, n_layer=2, n_head=2, **tokens, **dropout))
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder, use_cpu=True, per_device_train_batch_size=4, gradient_accumulation_steps=2,
                max_steps=4, learning_rate=0.01, save_strategy="no", report_to="none", disable_tqdm=True,
                ddp_find_unused_parameters=False, ddp_bucket_cap_mb=BUCKET_MB,
            )  # fmt: skip
            trainer = Trainer(model=model, args=arguments, train_dataset=samples)
            if policy is not None:
                trainer.add_callback(recipe("trainer").Policy(trainer, policy))
            trainer.train()
            in_buckets(trainer.model_wrapped)
        return summary(model)

    return {"plain": fit(None)} | {policy: fit(policy) for policy in POLICIES}


# -- In actors --------------------------------------------------------------------------------------------------------


def epochs(model: Any, optimizer: torch.optim.Optimizer, skip: Any, rank: int) -> str:
    x, y = data().tensors
    for step in range(12):
        mine = slice(4 * (2 * step + rank) % 64, 4 * (2 * step + rank) % 64 + 4)
        with nullcontext() if step % 2 else skip():
            nn.functional.mse_loss(model(x[mine]), y[mine]).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return summary(model)


def with_ddp() -> dict[str, str]:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(mlp(), bucket_cap_mb=BUCKET_MB)
    digest = epochs(model, sgd(model), model.no_sync, dist.get_rank())
    in_buckets(model)
    return {"plain": digest}


def train() -> dict[str, str]:
    """What the recipe's actors run."""
    results = {}
    for policy in POLICIES:
        model = mlp()
        sync = hb.GradientSynchronizer(model, sgd(model), policy=policy, bucket_mb=BUCKET_MB)
        results[policy] = epochs(sync.model, sync.optimizer, sync.no_sync, hb.rank())
    return results


def with_ray() -> None:
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}  # no file at home, no reports
    import ray

    with tempfile.TemporaryDirectory(prefix="ray-") as place:
        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20, _temp_dir=place)
        try:
            found = recipe("ray").run(train, 2)
        finally:
            ray.shutdown()
    for rank, results in enumerate(found):
        jobs.record(rank, results)


if __name__ == "__main__":
    package = sys.argv[1]
    if package == "Ray":
        with_ray()
    else:
        run = {"Lightning": with_lightning, "Accelerate": with_accelerate, "Trainer": with_trainer, "DDP": with_ddp}
        jobs.record(int(os.environ["RANK"]), run[package]())
        if dist.is_initialized():
            jobs.leave_torch()
