"""Records what hb.init() raises; arguments are per rank: ``wrong.py backend=torch,mpi policy=mean,bf16``, and so are
those of the environment: ``wrong.py HVDBRIDGE_IFACE=lo,eth7``.

A rank ends only after all have recorded: when one fails before the others have started, a launcher ends those.
"""

import importlib
import os
import sys

from jobs import record, wait_for_records

import hvdbridge as hb
from hvdbridge.startup import launchers

world = launchers.detect()
rank = world.rank
if "IMPORT_FIRST" in os.environ:
    importlib.import_module(os.environ["IMPORT_FIRST"])
given = dict(argument.split("=", 1) for argument in sys.argv[1:])
mine = {name: values.split(",")[min(rank, values.count(","))] for name, values in given.items()}
os.environ.update({name: mine.pop(name) for name in [*mine] if name.isupper()})
try:
    hb.init(**mine)
except hb.HvdbridgeError as error:
    record(rank, [type(error).__name__, str(error)])
    if "IMPORT_FIRST" in os.environ:  # its segment would stay when the launcher ends this rank
        sys.modules["mpi4py.MPI"].Finalize()
    wait_for_records(world.size)
    raise
os._exit(0)
