"""Entry point of ``python -m hvdbridge``, for launchers: ``torchrun --nproc-per-node 2 -m hvdbridge bench``."""

import sys

from hvdbridge.tools import main

if __name__ == "__main__":
    sys.exit(main())
