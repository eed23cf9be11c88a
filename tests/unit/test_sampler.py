"""DistributedSampler: nothing twice and nothing dropped, or torch's own padding."""

from itertools import chain

import pytest
import torch.utils.data
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdbridge.errors import ConfigurationError
from hvdbridge.training.distributed_sampler import DistributedSampler

COUNTS, SIZES, EPOCHS = st.integers(0, 70), st.integers(1, 9), st.integers(0, 5)


def parts(count: int, size: int, epoch: int = 0, **options: bool) -> list[list[int]]:
    samplers = [DistributedSampler(range(count), rank, size, seed=3, **options) for rank in range(size)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    assert [len(sampler) for sampler in samplers] == [len(list(sampler)) for sampler in samplers]
    return [list(sampler) for sampler in samplers]


@settings(deadline=None)
@given(COUNTS, SIZES, EPOCHS, st.booleans())
def test_every_sample_is_used_once(count: int, size: int, epoch: int, shuffle: bool) -> None:
    dealt = parts(count, size, epoch, shuffle=shuffle)
    assert sorted(chain(*dealt)) == list(range(count))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("pad", [True, False])
def test_another_default_device_deals_the_same(shuffle: bool, pad: bool) -> None:
    usual = parts(11, 3, shuffle=shuffle, pad=pad)
    with torch.device("meta"):
        assert parts(11, 3, shuffle=shuffle, pad=pad) == usual


@settings(deadline=None)
@given(st.integers(1, 70), SIZES, EPOCHS, st.booleans())
def test_padding_is_torchs_order(count: int, size: int, epoch: int, shuffle: bool) -> None:
    theirs = []
    for rank in range(size):
        sampler = torch.utils.data.DistributedSampler(range(count), size, rank, shuffle, seed=3)
        sampler.set_epoch(epoch)
        theirs.append(list(sampler))
    assert parts(count, size, epoch, shuffle=shuffle, pad=True) == theirs


def test_order_depends_on_epoch_and_on_nothing_else() -> None:
    assert parts(50, 2, epoch=1) == parts(50, 2, epoch=1)
    assert parts(50, 2, epoch=1) != parts(50, 2, epoch=2)


def test_unions_of_batches_do_not_depend_on_the_number_of_ranks() -> None:
    """What makes a weighted job equal to one process: batch k of all ranks together is its batch k."""
    alone = parts(50, 1)[0]
    together = parts(50, 2)
    for start in range(0, 25, 5):
        union = {index for rank in together for index in rank[start : start + 5]}
        assert union == set(alone[2 * start : 2 * start + 10])


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_out_of_range(rank: int) -> None:
    with pytest.raises(ConfigurationError, match=r"0\.\.1"):
        DistributedSampler(range(3), rank, 2)
