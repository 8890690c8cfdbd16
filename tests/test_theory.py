"""The figures of the article and the formulas behind them."""

from __future__ import annotations

import numpy as np
import pytest

from ridgeline.core.theory import expected_tokens, speedup
from ridgeline.core.tree import TokenTree


def test_the_article_s_figures() -> None:
    assert expected_tokens(0.8, 5) == pytest.approx(3.69, abs=0.005)
    assert speedup(0.8, 5, 0.05) == pytest.approx(2.95, abs=0.005)


@pytest.mark.parametrize("depth", [0, 1, 5, 20])
def test_closed_form_and_limits(depth: int) -> None:
    assert expected_tokens(0.7, depth) == pytest.approx((1 - 0.7 ** (depth + 1)) / (1 - 0.7))
    assert expected_tokens(0.0, depth) == 1
    assert expected_tokens(1.0, depth) == depth + 1
    assert speedup(0.9, depth, 0.0) == expected_tokens(0.9, depth)


def test_depths_of_the_article_s_tree() -> None:
    """Node 0 is the trunk, the others are drafted."""
    parents = np.array([-1, 0, 0, 1, 1, 2], np.int32)
    tree = TokenTree(np.arange(6), parents, trunk=1)
    assert tree.depth.tolist() == [0, 1, 1, 2, 2, 2]
