"""What a request may ask of sampling, checked once, when it is made."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from ridgeline.errors import RequestError

GREEDY_BELOW = 1e-5
"""Temperatures below this decode greedily: the limit of sampling, without its overflow."""


MOST_SAMPLES = 1 << 16
"""Of one request: each takes memory before it runs."""
MOST_BIAS = 1e30
"""A larger one, divided by a small temperature, would be infinite in fp32."""


@dataclass(frozen=True)
class SamplingParams:
    """How one request turns logits into tokens, and when it ends.

    The order in which these act is fixed (`sampling.process`): penalties, logit_bias, bad_words,
    min_tokens; then temperature; then top_k, top_p, min_p.

    Raises:
        RequestError: a value is outside its range; the message names the field and the range.
    """

    temperature: float = 0.0
    """0 or more; below 1e-5 is greedy, whatever top_k, top_p and min_p say"""
    top_k: int = 0
    """keep the k largest logits, and those that equal the k-th; 0 keeps all"""
    top_p: float = 1.0
    """keep the fewest most probable tokens that reach this mass, and ties of the last; in (0, 1]"""
    min_p: float = 0.0
    """keep tokens of at least this share of the largest probability; in [0, 1]"""
    repetition_penalty: float = 1.0
    """divides positive and multiplies negative logits of tokens in prompt or output; above 0"""
    frequency_penalty: float = 0.0
    """subtracted once for each occurrence in the output; in [-2, 2]"""
    presence_penalty: float = 0.0
    """subtracted once if the token occurs in the output; in [-2, 2]"""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """added to the logits of these token ids"""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """token sequences that must not be completed"""
    min_tokens: int = 0
    """no end token and no stop string before so many tokens were generated"""
    max_tokens: int = 256
    """at least 1"""
    stop: tuple[str, ...] = ()
    """strings that end the text; one string may be given bare"""
    stop_token_ids: tuple[int, ...] = ()
    """token ids that end the text, beside the model's own end tokens"""
    ignore_eos: bool = False
    """the model's own end tokens do not end the text"""
    seed: int | None = None
    """0 to 2**64 - 1; the same seed gives the same text. None: a new one for each request"""
    n: int = 1
    """samples for the prompt, each with a seed of its own"""
    logprobs: int | None = None
    """report each emitted token's log-probability and the so many largest beside it"""

    def __post_init__(self) -> None:
        _integer("top_k", self.top_k, 0, "0 (off) or more")
        for name, allowed, holds in _NUMBERS:
            value = _number(name, getattr(self, name), allowed, holds)
            object.__setattr__(self, name, value)
        _integer("max_tokens", self.max_tokens, 1, "1 or more")
        _integer("min_tokens", self.min_tokens, 0, "0 or more")
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}; it must not exceed max_tokens, {self.max_tokens}"
            )
        _integer("n", self.n, 1, f"from 1 to {MOST_SAMPLES}", MOST_SAMPLES)
        if self.seed is not None:
            _integer("seed", self.seed, 0, "from 0 to 2**64 - 1", 2**64 - 1)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, "0 or more")
        if not isinstance(self.ignore_eos, bool):
            raise _wrong("ignore_eos", self.ignore_eos, "true or false")
        self._normalise()

    def _normalise(self) -> None:
        """Checks the collections and copies them into tuples, or a dictionary of its own."""
        stop = (self.stop,) if isinstance(self.stop, str) else _collection("stop", self.stop)
        if any(not isinstance(text, str) or not text for text in stop):
            raise _wrong("stop", self.stop, "strings, none of them empty")
        bad_words = tuple(
            _collection("a word in bad_words", word)
            for word in _collection("bad_words", self.bad_words)
        )
        if not all(bad_words):
            raise _wrong("bad_words", self.bad_words, "sequences of at least one token id each")
        if not isinstance(self.logit_bias, Mapping):
            raise _wrong("logit_bias", self.logit_bias, "a mapping of token ids to numbers")
        stop_token_ids = _collection("stop_token_ids", self.stop_token_ids)
        for name, ids in (
            ("stop_token_ids", stop_token_ids),
            ("bad_words", sum(bad_words, ())),
            ("logit_bias", tuple(self.logit_bias)),
        ):
            for token in ids:
                _integer(f"a token id in {name}", token, 0, "0 or more")
        bias = {
            token: _number(
                f"logit_bias of token {token}",
                value,
                f"from -{MOST_BIAS:g} to {MOST_BIAS:g}",
                lambda b: abs(b) <= MOST_BIAS,
            )
            for token, value in self.logit_bias.items()
        }
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", stop_token_ids)
        object.__setattr__(self, "bad_words", bad_words)
        object.__setattr__(self, "logit_bias", bias)

    @property
    def greedy(self) -> bool:
        """Whether the largest logit wins, without any draw."""
        return self.temperature < GREEDY_BELOW


_NUMBERS: tuple[tuple[str, str, Callable[[float], bool]], ...] = (
    ("temperature", "0 or more", lambda t: t >= 0),
    ("top_p", "above 0 and at most 1", lambda p: 0 < p <= 1),
    ("min_p", "from 0 to 1", lambda p: 0 <= p <= 1),
    ("repetition_penalty", "above 0", lambda r: r > 0),
    ("frequency_penalty", "from -2 to 2", lambda f: -2 <= f <= 2),
    ("presence_penalty", "from -2 to 2", lambda f: -2 <= f <= 2),
)


def _wrong(name: str, value: object, allowed: str) -> RequestError:
    try:
        shown = f"{value!r:.80}"
    except ValueError:  # Python writes no integer of thousands of digits
        shown = "a number of thousands of digits"
    return RequestError(f"{name} is {shown}; it must be {allowed}")


def _number(name: str, value: object, allowed: str, holds: Callable[[float], bool]) -> float:
    """The value as a float, which is what tensors and arrays take."""
    try:
        number = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:  # an integer beyond every float
        number = math.inf
    if isinstance(value, bool) or not math.isfinite(number) or not holds(number):
        raise _wrong(name, value, f"a number, {allowed}")
    return number


def _integer(name: str, value: object, low: int, allowed: str, high: float = math.inf) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or not low <= int(value) <= high:
        raise _wrong(name, value, f"an integer, {allowed}")


def _collection(name: str, value: object) -> tuple[Any, ...]:
    if not isinstance(value, tuple | list):
        raise _wrong(name, value, "a list of token ids" if "bad_words" in name else "a list")
    return tuple(value)
