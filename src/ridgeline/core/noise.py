"""Random numbers without state: a pure function of (seed, position, stream, round) and token id.

Nothing is ever "consumed", so a token's noise does not depend on which other tokens, nodes or
sequences were computed beside it. The generator is SplitMix64 (Steele, Lea, Flood: Fast Splittable
Pseudorandom Number Generators, OOPSLA 2014): 64-bit integer arithmetic, the same bits on every
device.

Tokens come in groups of `GROUP` consecutive ids, so that a draw over a vocabulary need not look at
every token (`groups.gumbel_argmax`). Each token has an independent exponential arrival time, built
from the first arrival of its group: the minimum of n unit exponentials is exponential with rate n
and falls on each of the n with the same probability; by memorylessness the others arrive after it
by independent unit exponentials. So a whole group is bounded by one random number, and still every
token's time is a pure function of its key and id.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

GROUP = 32
"""Consecutive token ids that share a first arrival."""

# SplitMix64's constants as signed 64-bit integers
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64

_Words = TypeVar("_Words", NDArray[np.int64], Tensor)


class Stream(IntEnum):
    """Independent uses of randomness."""

    TARGET = 0
    """the target's own draws: a function of (seed, position, token id) and nothing else"""
    DRAFT = 1
    """a drafter's draws, where they must be independent of the target's"""
    ACCEPT = 2
    """whether a drafted token is accepted"""
    CORRECT = 3
    """what is emitted where none was accepted, and the bonus token"""


def keys(
    seeds: NDArray[np.uint64],
    positions: NDArray[np.int64],
    stream: Stream,
    rounds: NDArray[np.int64],
) -> NDArray[np.int64]:
    """One key for each of R draws.

    Args:
        seeds: u64[R], seeds of the sequences.
        positions: i64[R], position in the sequence of the token to draw.
        stream: what the noise is for.
        rounds: i64[R], a number that no two steps of a sequence share. Every stream but TARGET is
            fresh in every step: a rule that has looked at a position's draft noise (block
            verification looks ahead) must not meet it again in the next step.

    Returns:
        i64[R]
    """
    state = _mix(seeds.view(np.int64) + _GOLDEN)
    state = _mix(state + positions * _GOLDEN)
    state = _mix(state + np.full_like(positions, stream) * _GOLDEN)
    if stream is Stream.TARGET:
        return state
    return _mix(state + rounds * _GOLDEN)


def substream(seed: int, index: int) -> int:
    """Seed of the index-th of several samples of one request; the first keeps the request's own."""
    if index == 0:
        return seed
    index_ = np.array([~index])
    key = keys(np.array([seed], dtype=np.uint64), index_, Stream.TARGET, index_)
    return int(key.view(np.uint64)[0])


def uniform(keys: Tensor, counters: Tensor) -> Tensor:
    """Uniform numbers in the open interval (0, 1), in steps of 2**-52.

    Args:
        keys: i64, broadcast against `counters`.
        counters: i64, token ids or any other number of the draw.

    Returns:
        f64, of the broadcast shape.
    """
    return _unit(_mix(keys + counters * _GOLDEN))


def gumbel(keys: Tensor, groups: Tensor) -> Tensor:
    """Standard Gumbel noise of the tokens of groups; always finite (within -4 and 41).

    In f64, because logarithms differ in the last bit between devices and between the vectorised
    and the scalar loop of one: in f64 that cannot decide a draw between f32 logits in practice.

    Args:
        keys: i64, broadcast against `groups`.
        groups: i64, group g holds the tokens g * GROUP .. (g + 1) * GROUP - 1.

    Returns:
        f64, of the broadcast shape and a last dimension of GROUP tokens.
    """
    lanes = torch.arange(GROUP, device=groups.device)
    bits = _group_bits(keys, groups)[..., None]
    delay = _exponential(uniform(keys[..., None], groups[..., None] * GROUP + lanes))
    delay.masked_fill_(bits & (GROUP - 1) == lanes, 0.0)
    return -torch.log(_first_arrival(bits) + delay)


def gumbel_ceiling(keys: Tensor, groups: Tensor) -> Tensor:
    """The largest Gumbel noise within each group: f64, of the broadcast shape."""
    return -torch.log(_first_arrival(_group_bits(keys, groups)))


def _group_bits(keys: Tensor, groups: Tensor) -> Tensor:
    """Bits of a group: the top 52 time its first arrival, the lowest name the token it falls on.

    Counters of groups are negative, so that they never meet a token id.
    """
    return _mix(keys + groups.bitwise_not() * _GOLDEN)


def _first_arrival(bits: Tensor) -> Tensor:
    return _exponential(_unit(bits)) / GROUP


def _exponential(uniforms: Tensor) -> Tensor:
    """Unit exponentials; small uniforms give small, fully resolved times."""
    return -torch.log1p(-uniforms)


def _unit(bits: Tensor) -> Tensor:
    """The top 52 bits as a number in (0, 1), both ends excluded."""
    return (_shift(bits, 12).double() + 0.5) * 2.0**-52


def _mix(words: _Words) -> _Words:
    """SplitMix64's output function: a bijection in which every input bit moves every output bit."""
    words = (words ^ _shift(words, 30)) * _MIX_1
    words = (words ^ _shift(words, 27)) * _MIX_2
    return words ^ _shift(words, 31)


def _shift(words: _Words, bits: int) -> _Words:
    """Logical right shift of signed words, whose own shift copies the sign."""
    return (words >> bits) & ((1 << 64 - bits) - 1)
