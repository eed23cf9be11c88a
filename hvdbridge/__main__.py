"""``python -m hvdbridge``, for launchers that start Python: ``torchrun --nproc-per-node 2 -m hvdbridge bench``."""

import sys

from hvdbridge.tools import main

if __name__ == "__main__":
    sys.exit(main())
