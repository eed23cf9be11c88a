"""The examples' data: the digits' split, IDX files, and batches dealt out by shares."""

import gzip
import re
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import data


def test_digits_are_scikit_learns() -> None:
    from sklearn.datasets import load_digits

    train, test = data.digits()
    pixels = torch.cat([train.images, test.images]).flatten(1)
    labels = torch.cat([train.labels, test.labels])
    ours = sorted(map(tuple, torch.cat([(pixels + 0.5) * 16, labels[:, None]], 1).tolist()))
    digits = load_digits()
    assert ours == sorted(map(tuple, np.column_stack([digits.data, digits.target]).tolist()))


def test_digits_are_split_in_proportion() -> None:
    train, test = data.digits()
    assert (len(train.labels), len(test.labels)) == (1437, 360)
    whole = train.labels.bincount() + test.labels.bincount()
    assert ((test.labels.bincount() - 0.2 * whole).abs() <= 1.5).all()
    again, _ = data.digits()
    assert torch.equal(train.images, again.images)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_fashion_mnist_reads_idx_files(tmp_path: Path, suffix: str) -> None:
    random = np.random.RandomState(0)
    written = {}
    for count, names in zip((7, 3), data.FASHION_MNIST.values(), strict=True):
        written[names[0]] = random.randint(0, 256, (count, 28, 28))
        written[names[1]] = random.randint(0, 10, count)
    for name, values in written.items():
        data.write_idx(tmp_path / f"{name}{suffix}", values)
    for read, names in zip(data.load("fashion-mnist", tmp_path), data.FASHION_MNIST.values(), strict=True):
        pixels = (read.images.squeeze(1) + 0.5) * 255
        assert np.array_equal(pixels.round().numpy(), written[names[0]])
        assert np.array_equal(read.labels.numpy(), written[names[1]])


def test_missing_files_are_named(tmp_path: Path) -> None:
    data.write_idx(tmp_path / "train-images-idx3-ubyte.gz", np.zeros((1, 28, 28)))
    with pytest.raises(FileNotFoundError) as caught:
        data.load("fashion-mnist", tmp_path)
    assert str(caught.value).endswith(
        f"{tmp_path} lacks: train-labels-idx1-ubyte, t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not an IDX file"),
        (b"\x00\x00\x0d\x01\x00\x00\x00\x01\x00", "of unsigned bytes: it begins 00 00 0d 01"),
        (b"\x00\x00\x08\x02\x00\x00\x00\x01", "ends inside its header"),
        (b"\x00\x00\x08\x01\x00\x00\x00\x03\x01\x02", "announces (3,) values and holds 2"),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_broken_idx_file(tmp_path: Path, content: bytes, message: str, suffix: str) -> None:
    path = tmp_path / f"file{suffix}"
    path.write_bytes(gzip.compress(content) if suffix else content)
    with pytest.raises(ValueError, match=re.escape(message)):
        data.read_idx(path)


SHARES = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@settings(deadline=None)
@given(st.integers(0, 60), st.integers(1, 20), SHARES, st.integers(0, 3))
def test_shares_deal_every_batch_out(samples: int, batch_size: int, shares: list[int], seed: int) -> None:
    """Step k of all ranks together is step k of one process; no sample twice, none left out."""
    alone = data.deal(samples, batch_size, [1], 0, seed)
    assert sorted(chain(*alone)) == list(range(samples))
    ranks = [data.deal(samples, batch_size, shares, rank, seed) for rank in range(len(shares))]
    assert [list(chain(*parts)) for parts in zip(*ranks, strict=True)] == alone
