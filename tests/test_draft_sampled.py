"""Sampled drafts through the whole engine: what is emitted is distributed as the target's.

The same check runs with planted faults, and must catch each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from ridgeline import EngineConfig, SamplingParams
from ridgeline.core.sampling import Drafts, Rows, draw_drafts, process
from ridgeline.core.sequence import Sequence
from ridgeline.core.tree import TokenTree
from ridgeline.draft import create_drafter, levels
from ridgeline.draft.base import DraftContext
from ridgeline.draft.model import ModelDrafter
from ridgeline.draft.sampled import CHANCE, sampled_shape
from ridgeline.engine import Engine
from tests.draft_models import relative
from tests.engines import tiny_loaded, torch_module
from tests.heads import write_head
from tests.simulation import assert_counts

SIZE = 16
PROMPT = [0, 4, 5, 6]
PARAMS = SamplingParams(
    temperature=2.5, top_k=12, repetition_penalty=1.2, max_tokens=3, ignore_eos=True
)
TRIALS = 2_048


@cache
def expected() -> NDArray[np.float64]:
    """f64[V*V]: probabilities of the second and third token; the first one is never drafted."""
    module = torch_module(tiny_loaded(vocab_size=SIZE))
    p = np.ones(())
    for length in range(3):
        texts = [[*PROMPT, *output] for output in np.ndindex(*[SIZE] * length)]
        module.set_attn_implementation("eager")
        logits = module(torch.tensor(texts), use_cache=False).logits[:, -1]
        module.set_attn_implementation("ridgeline")
        after = process(logits, [undrafted(text) for text in texts]).double().softmax(1)
        p = p[..., None] * after.numpy().reshape([SIZE] * (length + 1))
    return p.sum(0).flatten()


def undrafted(text: list[int]) -> Rows:
    tree = TokenTree.plain(text[-1:])
    return Rows(PARAMS, 0, text, len(PROMPT), frozenset(), tree, np.array([0]))


def assert_lossless(method: str, folder: Path, rule: str, nodes: int, depth: int = 3) -> float:
    """Returns the drafts accepted a step."""
    target = tiny_loaded(vocab_size=SIZE)
    config = EngineConfig(
        verify=rule,
        policy="fixed",
        nodes=nodes,
        depth=depth,
        max_batch=256,
        max_batch_tokens=4096,
        kv_tokens=8192,
    )
    context = DraftContext(
        target, False, depth, nodes, 4096, "float32", None, sampled_siblings=rule == "rejection"
    )
    if method == "model":
        drafter = ModelDrafter(relative(0.6, vocab_size=SIZE), context)
    else:
        changes = {"draft_vocab": 11} if method in ("eagle3", "medusa") else {}
        drafter = create_drafter(write_head(method, folder, target, **changes), context)
    engine = Engine(target, drafter, config)
    texts: list[Sequence] = []
    for seed in range(TRIALS):
        texts += engine.add(PROMPT, replace(PARAMS, seed=seed))
        if len(texts) % config.max_batch == 0:
            while engine.has_work:
                engine.step()
    output = np.array([text.output for text in texts])
    assert_counts(output[:, 1] * SIZE + output[:, 2], expected())
    return sum(t.speculation.accepted for t in texts) / sum(t.speculation.steps for t in texts)


@pytest.mark.parametrize(
    ("method", "rule", "nodes"),
    [
        ("model", "rejection", 9),
        ("model", "block", 3),
        ("eagle", "block", 9),
        ("eagle3", "rejection", 9),
        ("medusa", "rejection", 9),
        pytest.param("eagle", "rejection", 9, marks=pytest.mark.slow),
        pytest.param("eagle3", "block", 9, marks=pytest.mark.slow),
        pytest.param("medusa", "block", 9, marks=pytest.mark.slow),
        pytest.param("mtp", "rejection", 9, marks=pytest.mark.slow),
        pytest.param("mtp", "block", 9, marks=pytest.mark.slow),
    ],
)
def test_sampled_drafts_are_lossless(method: str, rule: str, nodes: int, tmp_path: Path) -> None:
    assert assert_lossless(method, tmp_path, rule, nodes) > 0.01  # random heads


def raw_q(logits: Tensor, *args: Any, **options: Any) -> Drafts:
    """Hands over the head's own distribution, not the processed one that was drawn from."""
    drafts = draw_drafts(logits, *args, **options)
    return replace(drafts, q=logits.softmax(1))


def least_likely_pruned(*args: Any, **options: Any) -> Drafts:
    """Drops the least likely of the first three, often in the middle of the draw order."""
    drafts = draw_drafts(*args, **options)
    assert drafts.q is not None
    worst = drafts.q.gather(1, drafts.tokens[:, :3]).argmin(1)
    kept = torch.ones_like(drafts.tokens, dtype=torch.bool).scatter(1, worst[:, None], False)
    shape = (len(kept), kept.shape[1] - 1)
    return replace(
        drafts, tokens=drafts.tokens[kept].view(shape), scores=drafts.scores[kept].view(shape)
    )


def reranked(*args: Any, **options: Any) -> Drafts:
    """Tries the likelier of the drawn siblings first."""
    drafts = draw_drafts(*args, **options)
    assert drafts.q is not None
    order = drafts.q.gather(1, drafts.tokens).argsort(1, descending=True)
    return replace(drafts, tokens=drafts.tokens.gather(1, order))


@pytest.mark.parametrize("fault", [raw_q, least_likely_pruned, reranked])
def test_faults_are_caught(
    fault: Callable[..., Drafts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(levels, "draw_drafts", fault)
    with pytest.raises(AssertionError):
        assert_lossless("model", tmp_path, "rejection", 9, depth=2)


@pytest.mark.parametrize("depth", [1, 3, 8])
@pytest.mark.parametrize("nodes", [1, 3, 9, 40])
def test_shapes(nodes: int, depth: int) -> None:
    shape = sampled_shape(nodes, depth)
    reached, below = {0: 0}, [0]
    for node in below:  # every node hangs below the root, once
        for child in shape[node]:
            assert child not in reached
            reached[child] = reached[node] + 1
            below.append(child)
    assert len(reached) == len(shape) <= nodes + 1
    assert max(reached.values()) == min(nodes, depth)
    assert len(shape) == nodes + 1 or (depth == 1 and len(shape) == len(CHANCE) + 1)
    if nodes <= depth:
        assert max(map(len, shape)) == 1  # a chain
