"""What speculation is expected to bring, by the formulas of its first papers."""

from __future__ import annotations

from collections.abc import Sequence


def expected_tokens(acceptance: float, depth: int) -> float:
    """Expected tokens a step emits, from a chain whose drafts are accepted independently.

    E = 1 + a + ... + a^g = (1 - a^(g+1)) / (1 - a); the leading 1 is the target's own token.

    Source: Leviathan et al. (arXiv 2211.17192), equation 1.

    Args:
        acceptance: a, probability in [0, 1] that a drafted token is accepted.
        depth: g, drafted tokens a step, 0 or more.
    """
    return sum(acceptance**i for i in range(depth + 1))


def expected_tokens_of(survival: Sequence[float]) -> float:
    """The same where acceptance differs by position: E = 1 + s_1 + s_2 + ...

    s_j = a_1 a_2 ... a_j is the chance that a step's first j drafts are all accepted, so that
    position j is emitted.

    Source: Leviathan et al. (arXiv 2211.17192), equation 1, before acceptance is taken as constant.
    """
    return 1 + sum(survival)


def speedup(acceptance: float, depth: int, cost: float) -> float:
    """Expected speed-up over plain decoding where verifying g + 1 tokens costs as much as one.

    Source: Leviathan et al. (arXiv 2211.17192), theorem 3.8.

    Args:
        acceptance: a, as for `expected_tokens`.
        depth: g, likewise.
        cost: c, time of one draft step over time of one target step.
    """
    return expected_tokens(acceptance, depth) / (1 + depth * cost)
