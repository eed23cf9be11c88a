"""Fails on its first attempt, under `torchrun --max-restarts`."""

import os

from jobs import record

import hvdbridge as hb

with hb.session():
    hb.barrier()
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt == 0 and hb.rank() == 1:
        raise RuntimeError("the first attempt fails")
    hb.barrier()
    record(hb.rank(), attempt)
