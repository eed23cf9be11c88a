"""Rank 0 waits for a message that rank 1 never sends."""

from __future__ import annotations

import time

import torch

import hvdbridge as hb

hb.init()
if hb.rank() == 0:
    hb.recv(torch.empty(3), src=1, tag=4)
else:
    time.sleep(30)
