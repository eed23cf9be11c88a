"""A backend of one's own, added by a package and a line, and a launcher, by a class and a line."""

import hashlib
import os
import sys
from pathlib import Path

import torch
from jobs import record

import hvdbridge as hb
from hvdbridge.backends import registry
from hvdbridge.startup import launchers
from hvdbridge.startup.world import World

sys.path.append(str(Path(__file__).parents[1] / "toys"))
registry.register("shelf", "shelf")  # the line


class Farm(launchers.Launcher):
    name = "farm"

    def world(self, env: launchers.Environ) -> World | None:
        return World(int(env["FARM_RANK"]), int(env["FARM_SIZE"]), launcher=self.name) if "FARM_RANK" in env else None


launchers.LAUNCHERS = (Farm(), *launchers.LAUNCHERS)  # the line
os.environ |= {"FARM_RANK": os.environ.pop("RANK"), "FARM_SIZE": os.environ.pop("WORLD_SIZE")}

torch.set_num_threads(1)
hb.init()
found: dict[str, object] = {"backend": hb.backend() == os.environ["HVDBRIDGE_BACKEND"], "launcher": hb.launcher()}
for policy in ("mean", "int8", "topk:ratio=0.1", "adasum"):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.ReLU(), torch.nn.Linear(40, 5))
    sync = hb.GradientSynchronizer(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), policy=policy)
    generator = torch.Generator().manual_seed(hb.rank())
    for _ in range(4):
        sync.weight = 1.0 + hb.rank() * (policy != "adasum")
        sync.optimizer.zero_grad()
        sync.model(torch.randn(8, 30, generator=generator)).square().mean().backward()
        sync.optimizer.step()
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    found[policy] = hashlib.sha256(flat.numpy().tobytes()).hexdigest()
    sync.close()
message = torch.full((3,), float(hb.rank()))
if hb.rank() == 0:
    hb.send(message, 1)
else:
    hb.recv(message, 0)
found["message"] = message.tolist()
hb.barrier()
hb.shutdown()
record(int(os.environ["FARM_RANK"]), found)
