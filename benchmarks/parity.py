"""Parity: ResNet18 for 20 steps on each backend, against plain DistributedDataParallel, bit for bit.

::

    python benchmarks/parity.py [--data-dir DIR] [--steps N]

Each job has two ranks, and each backend runs under its own launcher. Rank 0's losses of all steps and all final
parameters must be equal. DIR holds Fashion-MNIST's four IDX files, whose first images are used; without DIR, the script
generates files of the same shape. Changes that must not alter results are checked by this script.
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
        counts = (2 * args.steps * args.batch_size, 64)  # new images for each step and rank; few test images
        if args.data_dir is None:
            generate(Path(directory), counts)
        else:
            shorten(args.data_dir, Path(directory), counts)
        return compare(Path(directory), args.steps, args.batch_size)


def compare(directory: Path, steps: int, batch_size: int) -> int:
    """Run the four jobs; return status 0 if their results are equal."""
    options = [
        "--model=resnet18", "--data=fashion-mnist", f"--data-dir={directory}", f"--steps={steps}",
        f"--batch-size={batch_size}",
    ]  # fmt: skip
    console = Console()
    table = Table("", "last loss", "ms per step", "losses equal", "digest", title=f"ResNet18, {steps} steps")
    equal = True
    plain = None
    try:
        for backend in ("plain DDP", *NATIVE):
            with console.status(backend):
                if plain is None:
                    result = plain = run("torchrun", None, EXAMPLES / "plain_ddp.py", options, timeout=300)
                else:
                    result = run(NATIVE[backend], backend, EXAMPLES / "train.py", options, timeout=300)
            equal_losses = sum(loss == other for loss, other in zip(result["losses"], plain["losses"], strict=True))
            equal &= equal_losses == steps and result["digest"] == plain["digest"]
            table.add_row(
                backend, f"{result['losses'][-1]:.6f}", f"{1000 * result['step_seconds']:.0f}",
                f"{equal_losses} of {steps}", result["digest"][:12],
            )  # fmt: skip
    except JobFailed as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 1
    console.print(table)
    console.print("All equal, bit for bit." if equal else "NOT equal.", style="green" if equal else "red")
    return 0 if equal else 1


def generate(directory: Path, counts: tuple[int, int]) -> None:
    """Write IDX files with Fashion-MNIST's names and image size: one random pattern per class, plus noise."""
    random = np.random.RandomState(0)
    patterns = random.randint(0, 160, (10, 28, 28))
    for (images, labels), count in zip(data.FASHION_MNIST.values(), counts, strict=True):
        classes = random.randint(0, 10, count)
        data.write_idx(directory / images, patterns[classes] + random.randint(0, 96, (count, 28, 28)))
        data.write_idx(directory / labels, classes)


def shorten(source: Path, directory: Path, counts: tuple[int, int]) -> None:
    """Write the first images of the files in ``source`` to ``directory``: training images, then test images."""
    paths = data.fashion_mnist_files(source)
    for names, count in zip(data.FASHION_MNIST.values(), counts, strict=True):
        for name in names:
            data.write_idx(directory / name, data.read_idx(paths[name])[:count])


if __name__ == "__main__":
    sys.exit(main())
