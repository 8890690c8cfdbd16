"""What a plan takes for the acceptance of drafters, and for their sizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline.core.theory import expected_tokens, expected_tokens_of
from ridgeline.errors import ConfigError
from ridgeline.plan.acceptance import Acceptance, constant, parse_range, published_range
from ridgeline.plan.drafters import defaults, methods, planned
from ridgeline.plan.shape import read_shape
from tests.plan_models import DEEPSEEK_V3, LLAMA_3_70B, TARGET, write_config
from tests.tiny import save_tiny


def test_tokens_of_measured_positions_and_beyond() -> None:
    measured = Acceptance(survival=(0.8, 0.5), rate=0.5)
    assert expected_tokens_of((0.8, 0.5)) == pytest.approx(2.3)
    assert [measured.tokens(depth) for depth in range(4)] == pytest.approx([1, 1.8, 2.3, 2.55])
    assert constant(0.7).tokens(5) == pytest.approx(expected_tokens(0.7, 5))


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("0.7", 0.7, 0.7),
        ("0.6-0.8", 0.6, 0.8),
        ("1e-1", 0.1, 0.1),
        ("1e-1-2E-1", 0.1, 0.2),
        ("0.5-9e-1", 0.5, 0.9),
    ],
)
def test_given_ranges(text: str, low: float, high: float) -> None:
    found = parse_range(text)
    assert (found.low.rate, found.high.rate, found.source) == (low, high, "given")


@pytest.mark.parametrize("text", ["", "x", "1.2", "0.8-0.6", "-0.5", "0.1-", "nan", "0.5-0.6-0.7"])
def test_wrong_ranges(text: str) -> None:
    with pytest.raises(ConfigError, match=r"a number from 0 to 1 or a range such as 0\.6-0\.8"):
        parse_range(text)


def test_published_ranges() -> None:
    """Those of the article; of tokens per step, the acceptance that gives them at their depth."""
    mtp = published_range("mtp")
    assert (mtp.low.rate, mtp.high.rate, mtp.low.nodes) == (0.85, 0.90, (1,))
    eagle3 = published_range("eagle3")
    assert eagle3.low == eagle3.high
    assert expected_tokens(eagle3.low.rate, 6) == pytest.approx(5.71)
    assert eagle3.low.nodes == pytest.approx((59 / 6,))
    draft = published_range("model")
    assert draft.high.rate == 0.82
    assert draft.low.rate == pytest.approx(1 - 1 / 2.28)
    assert published_range("eagle").high == constant(0.92, 24 / 5)
    with pytest.raises(ConfigError, match="no acceptance of oracle is known; give --acceptance"):
        published_range("oracle")


# Drafters


def test_heads_of_llama_70b(tmp_path: Path) -> None:
    target = read_shape(write_config(LLAMA_3_70B, tmp_path))
    layer = 855_638_016 + 2 * 8192
    medusa, eagle, eagle3 = (
        planned(name, target, None).shape for name in ("medusa", "eagle", "eagle3")
    )
    assert medusa
    assert eagle
    assert eagle3
    assert medusa.parameters == 8192**2 + 128256 * 8192
    assert medusa.kv_per_token == 0
    # What is left of a division by the number of layers is the last norm's share.
    assert eagle.parameters == pytest.approx(2 * 8192**2 + layer + 128256 * 8192, abs=200)
    assert eagle3.parameters == pytest.approx(3 * 8192**2 + layer + 32000 * 8192, abs=200)
    assert eagle.kv_per_token == 2 * 8 * 128 * 2
    assert planned("ngram", target, None).shape is None


def test_levels_in_one_pass_and_in_many(tmp_path: Path) -> None:
    target = read_shape(write_config(LLAMA_3_70B, tmp_path))
    medusa, eagle = (planned(name, target, None) for name in ("medusa", "eagle"))
    assert [medusa.passes(d) for d in (0, 1, 4)] == [0, 1, 1]
    assert [eagle.passes(d) for d in (0, 1, 4)] == [0, 1, 4]
    one, four = medusa.shape_at(1), medusa.shape_at(4)
    assert one
    assert four
    assert four.parameters == 4 * one.parameters
    assert eagle.shape_at(4) == eagle.shape_at(1)


def test_a_module_has_a_layer_of_experts_and_a_head_has_none(tmp_path: Path) -> None:
    target = read_shape(write_config(DEEPSEEK_V3, tmp_path))
    module, head = (planned(name, target, None).shape for name in ("mtp", "eagle"))
    assert module
    assert head
    assert module.parameters > 10e9 > module.active  # 256 experts, of which 8
    assert head.parameters == head.active == 14 * 7168**2 + 129280 * 7168
    assert "mtp" in defaults(target)
    assert "mtp" not in defaults(replace(target, modules=0))
    assert "model" not in defaults(target)


def test_a_draft_model(tmp_path: Path) -> None:
    target = read_shape(write_config(LLAMA_3_70B, tmp_path / "target"))
    small = LLAMA_3_70B | {"num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 1024}
    path = write_config(small, tmp_path / "small")
    found = planned(f"model:{path}", target, "int4")
    assert found.label == "model:small"
    assert found.shape == read_shape(path).in_format("int4")
    assert found.passes(3) == 3


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("oracle", "no plan for the drafter 'oracle'; there is for ngram, model"),
        ("model", "give the draft model's hub id, folder or file: model:PATH"),
        ("model:/nowhere", "/nowhere"),
    ],
)
def test_drafters_that_cannot_be_planned(spec: str, message: str) -> None:
    with pytest.raises(Exception, match=message):
        planned(spec, TARGET, None)


def test_a_draft_model_of_another_vocabulary(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    target = read_shape(write_config(LLAMA_3_70B, tmp_path / "target"))
    with pytest.raises(ConfigError, match="needs the target's tokenizer"):
        planned(f"model:{folder}", target, None)


def test_a_pair_costs_what_its_drafter_with_weights_does(tmp_path: Path) -> None:
    target = read_shape(write_config(LLAMA_3_70B, tmp_path / "target"))
    head = planned("eagle3", target, "int4")
    for spec in ("ngram+eagle3:here", "eagle3+ngram", "ngram:max=4+ngram+eagle3"):
        assert planned(spec, target, "int4") == replace(head, spec=spec)
    assert planned("ngram+ngram", target, None).shape is None
    small = LLAMA_3_70B | {"num_hidden_layers": 4}
    path = write_config(small, tmp_path / "small")
    assert planned(f"ngram+model:{path}", target, None).label == "ngram+model:small"
    with pytest.raises(ConfigError, match=r"no plan for medusa\+eagle, both of which have weights"):
        planned("medusa+eagle", target, None)


def test_auto_is_what_it_would_be_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    target = replace(TARGET, name="Model-1B.Q4_1")
    assert planned("auto", target, None).shape is None
    head = tmp_path / "heads" / "model-1b" / "medusa"
    head.mkdir(parents=True)
    (head / "config.json").write_text("{}")
    assert planned("auto", target, None) == replace(planned("medusa", target, None), spec="auto")


def test_every_method_has_a_source() -> None:
    for method in methods().values():
        assert len(method.source) > 20
        assert published_range(method.name)
