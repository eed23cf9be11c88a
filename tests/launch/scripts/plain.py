"""Runs a script that knows nothing but torch: ``plain.py SCRIPT``."""

import runpy
import sys

from jobs import leave_torch

runpy.run_path(sys.argv[1], run_name="__main__")
leave_torch()
