"""examples/tokens.py on some data: the parameters that come out, and the largest step of a parameter.

tokens.py dealt|shards [float64|unweighted]: the windows are dealt, or ranks have data of their own, rank 0 two thirds
"""

from __future__ import annotations

import importlib.util
import sys
from itertools import zip_longest
from pathlib import Path

import torch
from jobs import record

import hvdbridge as hb

found = importlib.util.spec_from_file_location("example", Path(__file__).parents[3] / "examples" / "tokens.py")
assert found is not None
assert found.loader is not None
example = importlib.util.module_from_spec(found)
found.loader.exec_module(example)

how, *words = sys.argv[1:]
if "float64" in words:
    made = example.Model
    example.Model = lambda: made().double()
if "unweighted" in words:
    setter = hb.GradientSynchronizer.weight.fset
    hb.GradientSynchronizer.weight = property(hb.GradientSynchronizer.weight.fget, lambda sync, _: setter(sync, 1.0))
hb.init()
data = example.sequences(100, 5)
if how == "dealt":
    steps = example.windows(data, 3, 8, hb.rank(), hb.size())
else:  # 23 and 11 micro-batches: windows of four, of which the last ones have three
    shards = [list(example.windows(part, 3, 4, 0, 1)) for part in (data[:69], data[69:])]
    unions = [[*one, *other] for one, other in zip_longest(*shards, fillvalue=[])]
    steps = iter(unions if hb.size() == 1 else shards[hb.rank()])
model, losses = example.train(steps, 0.25, 1)
parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
record(hb.rank(), {"parameters": parameters.tolist(), "steps": len(losses)})
hb.shutdown()
