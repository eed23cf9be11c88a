"""Parity: ResNet18 for 20 steps on each backend, against plain DistributedDataParallel, bit for bit.

::

    python benchmarks/parity.py [--data-dir DIR] [--steps N]

Two ranks; each backend under its own launcher; rank 0's loss of every step and all final parameters must be equal.
DIR holds Fashion-MNIST's four IDX files; without it, files of the same shape are generated. A change that
must not alter results shows it here.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

import data  # noqa: E402
from cells import NATIVE, JobFailed, run  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="Fashion-MNIST's four IDX files")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hvdbridge-") as directory:
        if args.data_dir is None:
            args.data_dir = Path(directory)
            generate(args.data_dir)
        return compare(args)


def compare(args: argparse.Namespace) -> int:
    options = [
        "--model=resnet18", "--data=fashion-mnist", f"--data-dir={args.data_dir.resolve()}",
        f"--steps={args.steps}", f"--batch-size={args.batch_size}",
    ]  # fmt: skip
    console = Console()
    table = Table("", "last loss", "ms per step", "losses equal", "digest", title=f"ResNet18, {args.steps} steps")
    equal = True
    plain = None
    try:
        for backend in ("plain DDP", *NATIVE):
            with console.status(backend):
                if plain is None:
                    result = plain = run("torchrun", None, EXAMPLES / "plain_ddp.py", options, timeout=300)
                else:
                    result = run(NATIVE[backend], backend, EXAMPLES / "train.py", options, timeout=300)
            same = sum(ours == theirs for ours, theirs in zip(result["losses"], plain["losses"], strict=True))
            equal &= same == args.steps and result["digest"] == plain["digest"]
            table.add_row(
                backend, f"{result['losses'][-1]:.6f}", f"{1000 * result['step_seconds']:.0f}",
                f"{same} of {args.steps}", result["digest"][:12],
            )  # fmt: skip
    except JobFailed as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 1
    console.print(table)
    console.print("All equal, bit for bit." if equal else "NOT equal.", style="green" if equal else "red")
    return 0 if equal else 1


def generate(directory: Path, train: int = 512, test: int = 64) -> None:
    """IDX files with Fashion-MNIST's names and shapes: each class is a pattern of its own, under noise."""
    random = np.random.RandomState(0)
    patterns = random.randint(0, 160, (10, 28, 28))
    for (images, labels), count in zip(data.FASHION_MNIST.values(), (train, test), strict=True):
        classes = random.randint(0, 10, count)
        data.write_idx(directory / images, patterns[classes] + random.randint(0, 96, (count, 28, 28)))
        data.write_idx(directory / labels, classes)


if __name__ == "__main__":
    sys.exit(main())
