"""examples/train.py whose last rank is killed: ``killed_train.py STEP [train.py's options]``."""

import os
import signal
import sys
from pathlib import Path

import hvdbridge as hb

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
import train

STEP = int(sys.argv.pop(1))


class Log(train.Log):
    def step(self, loss):
        super().step(loss)
        if len(self.losses) == STEP and hb.rank() == hb.size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)


train.Log = Log
train.main()
