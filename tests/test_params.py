"""SamplingParams refuses what cannot work, in one clear line."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from ridgeline.core.params import SamplingParams
from ridgeline.errors import RequestError

WRONG: list[tuple[str, Any]] = [
    ("temperature", -1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "hot"),
    ("temperature", True),
    ("top_k", -1),
    ("top_k", 1.5),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", math.nan),
    ("frequency_penalty", 2.1),
    ("frequency_penalty", math.nan),
    ("presence_penalty", -2.1),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {"5": 1.0}),
    ("logit_bias", {5: math.inf}),
    ("logit_bias", {5: math.nan}),
    ("logit_bias", [(5, 1.0)]),
    ("bad_words", ((),)),
    ("bad_words", (5,)),
    ("bad_words", ((-5,),)),
    ("min_tokens", -1),
    ("min_tokens", 300),
    ("max_tokens", 0),
    ("max_tokens", None),
    ("stop", ""),
    ("stop", ("x", "")),
    ("stop", (5,)),
    ("stop", 5),
    ("stop_token_ids", (-1,)),
    ("stop_token_ids", ("a",)),
    ("stop_token_ids", 5),
    ("ignore_eos", "no"),
    ("seed", -1),
    ("seed", 2**64),
    ("seed", 1.0),
    ("n", 0),
    ("logprobs", -1),
    *((name, 10**400) for name in ("temperature", "top_p", "min_p", "repetition_penalty")),
    *((name, -(10**5000)) for name in ("frequency_penalty", "presence_penalty", "top_k", "n")),
    ("logit_bias", {5: 10**400}),
    ("logit_bias", {5: 1e31}),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=[name for name, _ in WRONG])
def test_refused_in_one_line(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**{name: value})
    message = str(error.value)
    assert name in message
    assert "must" in message
    assert len(message) < 200
    assert "\n" not in message


def test_limits_are_allowed() -> None:
    SamplingParams(
        temperature=0,
        top_k=0,
        top_p=1,
        min_p=1,
        frequency_penalty=2,
        presence_penalty=-2,
        min_tokens=256,
        seed=2**64 - 1,
        logprobs=0,
    )


def test_collections_are_copied_and_normalised() -> None:
    bias = {3: 1.0}
    params = SamplingParams(stop="end", bad_words=[[1, 2]], stop_token_ids=[7], logit_bias=bias)  # type: ignore[arg-type]
    bias[4] = 2.0
    assert params.stop == ("end",)
    assert params.bad_words == ((1, 2),)
    assert params.stop_token_ids == (7,)
    assert params.logit_bias == {3: 1.0}
    assert params == SamplingParams(
        stop=("end",), bad_words=((1, 2),), stop_token_ids=(7,), logit_bias={3: 1.0}
    )
    assert isinstance(hash(params), int)


def test_greedy_below_the_smallest_temperature() -> None:
    assert SamplingParams(temperature=1e-6).greedy
    assert not SamplingParams(temperature=1e-3).greedy


@pytest.mark.parametrize("value", [1, 10**30, Fraction(1, 3), np.float32(0.5)])
def test_every_kind_of_number_is_kept_as_a_float(value: Any) -> None:
    params = SamplingParams(temperature=value, repetition_penalty=value, logit_bias={5: value})
    for kept in (params.temperature, params.repetition_penalty, params.logit_bias[5]):
        assert type(kept) is float
        assert kept == float(value)
