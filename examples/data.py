"""Data sets of the examples, as whole tensors: scikit-learn's digits, Fashion-MNIST, and Python's own manual."""

from __future__ import annotations

import gzip
import importlib.util
import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

FASHION_MNIST = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


class Images(NamedTuple):
    """Images ``[n, 1, height, width]`` (float32, around zero) and their labels ``[n]`` (int64)."""

    images: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> Images:
        return Images(self.images.to(device), self.labels.to(device))


class Text(NamedTuple):
    """Chunks of text as ASCII codes ``[n, length]`` (int64); ``labels`` are the codes of the next characters."""

    characters: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> Text:
        return Text(self.characters.to(device), self.labels.to(device))


def load(name: str, directory: Path | None = None) -> tuple[Images, Images] | tuple[Text, Text]:
    """Return the training set and the test set; raises ValueError for an unknown name."""
    if name == "digits":
        return digits()
    if name == "text":
        return text()
    if name == "fashion-mnist" and directory is not None:
        return fashion_mnist(directory)
    raise ValueError(f"no data set {name!r} in {directory}; known: digits, text, and fashion-mnist in a directory")


def digits(test_share: float = 0.2) -> tuple[Images, Images]:
    """Return 1,437 training and 360 test images of handwritten digits, 8x8 pixels, with classes in proportion."""
    # scikit-learn's file is read directly, because importing sklearn.datasets is slow.
    package = importlib.util.find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("the digits come with scikit-learn. Run: pip install scikit-learn")
    path = Path(package.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    with gzip.open(path, "rt") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.float32)
    pixels, labels = table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int64)
    test = stratified(labels, test_share)
    return _images(pixels[~test], labels[~test], 16.0), _images(pixels[test], labels[test], 16.0)


def stratified(labels: np.ndarray, share: float, seed: int = 0) -> np.ndarray:
    """Return a mask that selects ``share`` of the samples, with classes in proportion; equal on all ranks."""
    chosen = np.zeros(len(labels), dtype=bool)
    order = np.random.RandomState(seed).permutation(len(labels))
    # Taking every (1/share)-th sample in the order of classes keeps their proportions, and the total is exact.
    order = order[np.argsort(labels[order], kind="stable")]
    count = math.ceil(share * len(labels))
    chosen[order[np.arange(count) * len(labels) // count]] = True
    return chosen


def text(length: int = 32, test_share: float = 0.1) -> tuple[Text, Text]:
    """Return the language topics of ``help()``, 470,000 characters; the last tenth is the test set."""
    from pydoc_data.topics import topics

    written = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
    codes = torch.frombuffer(bytearray(written), dtype=torch.uint8).to(torch.int64)
    count = (len(codes) - 1) // length
    characters, labels = codes[: count * length].view(count, -1), codes[1 : count * length + 1].view(count, -1)
    first = count - math.ceil(test_share * count)
    return Text(characters[:first], labels[:first]), Text(characters[first:], labels[first:])


def fashion_mnist(directory: Path) -> tuple[Images, Images]:
    """Return 60,000 training and 10,000 test images of 28x28 pixels from the four IDX files, plain or with ``.gz``."""
    paths = fashion_mnist_files(directory)
    train, test = (_images(*(read_idx(paths[name]) for name in names), 255.0) for names in FASHION_MNIST.values())
    return train, test


def fashion_mnist_files(directory: Path) -> dict[str, Path]:
    """Return the path of each of the four files.

    Raises:
        FileNotFoundError: files are missing; the message names them.
    """
    names = [name for names in FASHION_MNIST.values() for name in names]
    paths = {
        name: path
        for name in names
        for path in (directory / f"{name}.gz", directory / name)  # the plain file overrides the other
        if path.is_file()
    }
    if missing := [name for name in names if name not in paths]:
        raise FileNotFoundError(
            f"Fashion-MNIST is four files, plain or with .gz; {directory} lacks: {', '.join(missing)}"
        )
    return paths


def read_idx(path: Path) -> np.ndarray:
    """Return the uint8 values of an IDX file; raises ValueError for another format.

    The format: 0, 0, type 8, number of dimensions, the dimensions (big-endian), the values.
    """
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        content = file.read()
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise ValueError(f"{path} is not an IDX file of unsigned bytes: it begins {content[:4].hex(' ')}")
    end = 4 + 4 * content[3]
    if len(content) < end:
        raise ValueError(f"{path} ends inside its header")
    shape = struct.unpack(f">{content[3]}I", content[4:end])
    values = np.frombuffer(content, dtype=np.uint8, offset=end)
    if values.size != np.prod(shape, dtype=np.int64):
        raise ValueError(f"{path} announces {shape} values and holds {values.size}")
    return values.reshape(shape)


def write_idx(path: Path, values: np.ndarray) -> None:
    """Write ``values`` as an IDX file of bytes, the inverse of :func:`read_idx`."""
    header = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    with gzip.open(path, "wb") if path.suffix == ".gz" else path.open("wb") as file:
        file.write(header + values.astype(np.uint8).tobytes())


def deal(samples: int, batch_size: int, shares: Sequence[float], rank: int, seed: int) -> list[list[int]]:
    """Return one rank's sample indices in each batch of an epoch; ranks divide each batch in proportion to ``shares``.

    Batch k is the k-th ``batch_size`` samples of one permutation, for any number of ranks, and each rank gets its share
    of it. So all ranks make the same number of steps and use each sample exactly once. One process with the same
    ``batch_size`` sees the unions. A rank's part may be empty.

    >>> [[len(part) for part in deal(7, 6, (1, 2), rank, seed=0)] for rank in (0, 1)]
    [[2, 0], [4, 1]]
    """
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed)).tolist()
    batches = [order[start : start + batch_size] for start in range(0, samples, batch_size)]
    begin, end = (sum(shares[:k]) / sum(shares) for k in (rank, rank + 1))
    return [batch[int(begin * len(batch)) : int(end * len(batch))] for batch in batches]


def _images(pixels: np.ndarray, labels: np.ndarray, white: float) -> Images:
    if pixels.ndim != 3 or labels.ndim != 1 or len(pixels) != len(labels):
        raise ValueError(f"images of shape {pixels.shape} do not go with labels of shape {labels.shape}")
    images = torch.from_numpy(pixels.astype(np.float32)).unsqueeze(1) / white - 0.5
    return Images(images, torch.from_numpy(labels.astype(np.int64)))
