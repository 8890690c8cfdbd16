"""The noise is uniform, independent along every axis, finite, and a function of its key alone."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from ridgeline.core.noise import GROUP, Stream, gumbel, gumbel_ceiling, keys, substream, uniform

TOKENS = torch.arange(1 << 17)


GROUPS = torch.arange(len(TOKENS) // GROUP)


def noise_of(words: list[int], groups: Tensor = GROUPS) -> Tensor:
    """f64[keys,tokens]"""
    return gumbel(torch.tensor(words)[:, None], groups).flatten(1)


def key(seed: int = 0, position: int = 0, stream: Stream = Stream.TARGET, round_: int = 0) -> int:
    words = keys(np.array([seed], np.uint64), np.array([position]), stream, np.array([round_]))
    return int(words[0])


def test_splitmix64_reference() -> None:
    """The first outputs of SplitMix64 seeded with 1234567, as its authors' code prints them."""
    outputs = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    expected = torch.tensor([((word >> 12) + 0.5) / 2**52 for word in outputs], dtype=torch.float64)
    assert torch.equal(uniform(torch.tensor([1234567]), torch.arange(1, 6)), expected)


def test_uniform_is_uniform() -> None:
    values = uniform(torch.tensor([key(7)]), TOKENS)
    assert stats.kstest(values.numpy(), "uniform").pvalue > 1e-4
    low_bits = (values * 2**40 % 64).long()
    assert stats.chisquare(torch.bincount(low_bits, minlength=64).numpy()).pvalue > 1e-4


def test_gumbel_is_gumbel() -> None:
    values = noise_of([key(8)])[0]
    assert stats.kstest(values.numpy(), "gumbel_r").pvalue > 1e-4


def test_members_of_a_group_are_independent() -> None:
    """Arrival times of a group: sums are gamma distributed, and no pair of lanes is correlated."""
    arrivals = torch.exp(-noise_of([key(9)])).view(-1, GROUP).numpy()
    assert stats.kstest(arrivals.sum(1), stats.gamma(GROUP).cdf).pvalue > 1e-4
    firsts = np.bincount(arrivals.argmin(1), minlength=GROUP)
    assert stats.chisquare(firsts).pvalue > 1e-4
    correlation = np.corrcoef(arrivals.T) - np.eye(GROUP)
    assert np.abs(correlation).max() < 5.5 / np.sqrt(len(arrivals))


def test_ceiling_is_the_largest_of_the_group() -> None:
    row = torch.tensor([[key(3)], [key(4)]])
    assert torch.equal(gumbel(row, GROUPS).amax(2), gumbel_ceiling(row, GROUPS))


AXES = {
    "seed": [key(seed=s) for s in range(6)],
    "position": [key(position=p) for p in range(6)],
    "stream": [key(stream=s) for s in Stream],
    "round": [key(stream=Stream.DRAFT, round_=r) for r in range(6)],
    "large seed": [key(seed=2**64 - 1 - s) for s in range(6)],
}


@pytest.mark.parametrize("axis", AXES)
def test_neighbours_along_every_axis_are_independent(axis: str) -> None:
    rows = noise_of(AXES[axis], GROUPS[:512]).numpy()
    bound = 5 / np.sqrt(rows.shape[1])
    for a, b in itertools.combinations(rows, 2):
        for shift in (0, 1, GROUP):
            assert abs(np.corrcoef(a[shift:], b[: len(b) - shift])[0, 1]) < bound


def test_positions_of_one_token_are_independent() -> None:
    count = 1 << 15
    words = keys(
        np.full(count, 5, np.uint64), np.arange(count), Stream.TARGET, np.zeros(count, np.int64)
    )
    values = gumbel(torch.from_numpy(words), torch.tensor(5))[:, 17].numpy()
    assert stats.kstest(values, "gumbel_r").pvalue > 1e-4
    assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 5 / np.sqrt(count)


def test_always_finite() -> None:
    extremes = torch.tensor([0, -1, 1, 2**63 - 1, -(2**63)])[:, None]
    values, noise = uniform(extremes, TOKENS), gumbel(extremes, GROUPS)
    assert values.min() > 0
    assert values.max() < 1
    assert noise.isfinite().all()


def test_depends_on_key_and_token_alone() -> None:
    row = torch.tensor([[key(1)], [key(2)]])
    some = torch.tensor([77, 3, 1000])
    assert torch.equal(gumbel(row, GROUPS)[:, some], gumbel(row, some))
    assert torch.equal(gumbel(row, some)[1], gumbel(row[1], some))


def test_only_the_target_stream_ignores_the_round() -> None:
    for stream in Stream:
        same = key(stream=stream, round_=5) == key(stream=stream, round_=6)
        assert same == (stream is Stream.TARGET)


def test_substreams() -> None:
    for seed in (0, 12, 2**64 - 1):
        seeds = [substream(seed, i) for i in range(100)]
        assert seeds[0] == seed
        assert len(set(seeds)) == 100
        assert all(0 <= s < 2**64 for s in seeds)
