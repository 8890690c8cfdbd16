"""From rounds to figures. docs/bench.md says what each of them means."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from statistics import median
from typing import Any

from ridgeline.bench.measure import Round, Side, Text


def figures_of(rounds: Sequence[Round]) -> dict[str, Any]:
    """What the rounds of one drafter under one load come to, ready for JSON.

    Rates and times are medians over the rounds. What was accepted is the first round's: the seeds
    are the same in all. None stands for what cannot be told, such as the rate of no decode step.
    """
    plain, drafted = [r.plain for r in rounds], [r.drafted for r in rounds]
    texts = drafted[0].texts
    return {
        "texts": len(texts),
        "identical": sum(_same(rounds, i) for i in range(len(texts))),
        **_rates(
            [_ratio(side.emitted, side.seconds) for side in plain],
            [_ratio(side.emitted, side.seconds) for side in drafted],
        ),
        **_acceptance(texts),
        "draft_target_ratio": _median(map(_draft_target_ratio, rounds)),
        "pass_ratio": _median(
            _ratio(_mean(r.drafted, _target), _mean(r.plain, _target)) for r in rounds
        ),
        "plain_pass_ms": _milliseconds(plain, _target),
        "drafted_pass_ms": _milliseconds(drafted, _target),
        "drafting_ms": _milliseconds(drafted, _drafter),
        "levels_per_step": _ratio(drafted[0].levels, drafted[0].steps),
        "kinds": {
            kind: _of_kind(rounds, kind) for kind in dict.fromkeys(text.kind for text in texts)
        },
    }


def _of_kind(rounds: Sequence[Round], kind: str) -> dict[str, Any]:
    """The figures of one kind of prompt; rates are those of a single text."""

    def rates(sides: Iterable[Side]) -> list[float | None]:
        chosen = [[text for text in side.texts if text.kind == kind] for side in sides]
        return [_ratio(sum(t.emitted for t in ts), sum(t.seconds for t in ts)) for ts in chosen]

    texts = [text for text in rounds[0].drafted.texts if text.kind == kind]
    plain, drafted = (
        rates(side) for side in ([r.plain for r in rounds], [r.drafted for r in rounds])
    )
    return {"texts": len(texts), **_rates(plain, drafted), **_acceptance(texts)}


def _rates(plain: Sequence[float | None], drafted: Sequence[float | None]) -> dict[str, Any]:
    speed_ups = [_ratio(d, p) for p, d in zip(plain, drafted, strict=True)]
    return {
        "plain_tokens_per_s": _median(plain),
        "tokens_per_s": _median(drafted),
        "speed_up": _median(speed_ups),
        "speed_up_by_round": speed_ups,
    }


def _acceptance(texts: Sequence[Text]) -> dict[str, Any]:
    counts = [text.speculation for text in texts]
    reached = _sums(count.reached for count in counts)
    passed = _sums(count.passed for count in counts)
    steps = sum(count.steps for count in counts)
    # The first token of a text belongs to the prompt's own pass.
    emitted = sum(len(text.tokens) - 1 for text in texts)
    return {
        "tokens_per_step": _ratio(emitted, steps),
        "mean_acceptance": _ratio(sum(passed), sum(reached)),
        "acceptance_by_position": [p / r for p, r in zip(passed, reached, strict=True)],
        "reached": reached,
        "passed": passed,
        "steps": steps,
        "drafted_steps": sum(count.drafted_steps for count in counts),
        "drafted": sum(count.drafted for count in counts),
        "accepted": sum(count.accepted for count in counts),
    }


def _same(rounds: Sequence[Round], index: int) -> bool:
    """Whether a text has the same tokens with drafts as without, in every round."""
    return all(r.plain.texts[index].tokens == r.drafted.texts[index].tokens for r in rounds)


def _draft_target_ratio(measured: Round) -> float | None:
    """c: the drafter's time for a drafted level over that of a plain forward pass."""
    per_level = _ratio(measured.drafted.drafter_seconds, measured.drafted.levels)
    return _ratio(per_level, _mean(measured.plain, _target))


def _target(side: Side) -> float:
    return side.target_seconds


def _drafter(side: Side) -> float:
    return side.drafter_seconds


def _mean(side: Side, time: Callable[[Side], float]) -> float | None:
    """Of a decode step, in seconds."""
    return _ratio(time(side), side.steps)


def _milliseconds(sides: Iterable[Side], time: Callable[[Side], float]) -> float | None:
    mean = _median(_mean(side, time) for side in sides)
    return None if mean is None else 1000 * mean


def _sums(lists: Iterable[list[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*lists, fillvalue=0)]


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
