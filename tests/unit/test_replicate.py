"""How an optimizer's state travels: a pickled tree without values, and its tensors one by one."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hvdbridge.reduction.replicate import allocated, each_once, placeholder


def test_a_state_is_pickled_without_its_tensors() -> None:
    """They keep their memory layout, and those that entries share stay shared."""
    step, moment = torch.tensor(3.0), torch.randn(8, 16, 5, 5).to(memory_format=torch.channels_last)
    expanded = torch.ones(1).expand(4)  # its elements cannot be written one by one
    state: Any = {
        "state": {0: {"step": step, "moment": moment}, 1: {"step": step, "expanded": expanded}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, torch.tensor(0.99))}],
    }
    sent: list[Tensor] = []
    pickled = pickle.dumps(tree_map_only(Tensor, each_once(partial(placeholder, sent)), state))
    assert len(pickled) < moment.nbytes / 2
    received: list[Tensor] = []
    found = tree_map_only(Tensor, each_once(partial(allocated, received)), pickle.loads(pickled))
    for mine, theirs in zip(received, sent, strict=True):
        mine.copy_(theirs)
    assert torch.equal(found["state"][0]["moment"], moment)
    assert found["state"][0]["moment"].stride() == moment.stride()
    assert found["state"][0]["step"] is found["state"][1]["step"]
    assert found["state"][0]["step"] == 3.0
    assert torch.equal(found["state"][1]["expanded"], expanded)
    assert found["param_groups"] == [{"lr": 0.1, "betas": (0.9, torch.tensor(0.99))}]
