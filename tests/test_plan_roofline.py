"""The roofline on hardware of the table, against the article's figures and sums made by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline.errors import ConfigError
from ridgeline.plan.hardware import Hardware, hardware, table
from ridgeline.plan.roofline import Roofline, experts_read, linear_intensity, ridge_tokens
from ridgeline.plan.shape import (
    EMBEDDING,
    EXPERTS,
    HEAD,
    LAYERS,
    Attention,
    ModelShape,
    Part,
    read_shape,
)
from tests.plan_models import DEEPSEEK_V3, LLAMA_3_70B, write_config

H100 = hardware("h100-sxm")
SLOW = Hardware("slow", "slow", 1e6, 100.0, {"bf16": 1000.0, "fp8": 2000.0}, "made up")
"""Ridge at 10 FLOPs a byte, at 20 in fp8."""


def model(*parts: Part, attention: tuple[Attention, ...] = ()) -> ModelShape:
    return ModelShape("made up", 8, 16, parts, attention, 4096)


def test_every_row_has_a_source() -> None:
    rows = table()
    wanted = {"h100-sxm", "h100-pcie", "h200", "b200", "a100", "l40s", "rtx-4090", "rtx-5090"}
    assert {*rows} >= wanted | {"mi300x", "m1", "m4-max"}
    for row in rows.values():
        assert len(row.source) > 20
        assert row.memory >= 16e9
        assert 5e10 < row.bandwidth < 1e13
        assert 1e12 < row.flops["fp32"] <= row.flops["bf16"] <= row.flops.get("fp8", 1e18)


def test_unknown_hardware_is_named() -> None:
    with pytest.raises(ConfigError, match="no hardware 'h900'; it must be local or one of h100"):
        hardware("h900")


def test_the_ridge_of_h100() -> None:
    """989 TFLOP/s over 3.35 TB/s: the article's 295."""
    assert H100.ridge("bf16") == pytest.approx(295, abs=0.5)
    assert H100.ridge("fp16") == H100.ridge("bf16")
    assert H100.ridge("int4") == H100.ridge("bf16"), "unpacked to bf16"
    assert H100.ridge("fp8") == pytest.approx(2 * 295, abs=1)


def test_several_devices() -> None:
    eight = H100.times(8)
    assert (eight.memory, eight.bandwidth) == (640e9, 8 * 3.35e12)
    assert eight.ridge("bf16") == pytest.approx(H100.ridge("bf16"))
    assert H100.times(1) is H100


def test_capital_letters_are_no_mistake() -> None:
    assert hardware("H100-SXM") == H100


def test_intensity_of_a_linear_layer() -> None:
    """Close to N while N is far below the dimensions."""
    assert linear_intensity(1, 8192, 8192) == pytest.approx(1, rel=1e-3)
    assert linear_intensity(64, 8192, 8192) == pytest.approx(64, rel=0.02)
    assert linear_intensity(3, 2, 5) == 2 * 3 * 10 / (20 + 2 * 3 * 7)
    assert linear_intensity(1, 8192, 8192, bits=4) == pytest.approx(4, rel=2e-3)


def test_a_linear_part() -> None:
    shape = model(Part(LAYERS, "bf16", 40, 16, widths=13), Part(HEAD, "fp8", 128, 8, widths=24))
    few, many = (Roofline(shape, SLOW).work(tokens, 1, 0) for tokens in (2, 100))
    assert (few["weights"].bytes, few["weights"].flops) == (80 + 2 * 2 * 13, 2 * 2 * 40)
    assert few["weights"].seconds == 132 / 100, "memory is the limit"
    assert few["weights"].intensity == 160 / 132
    assert (few["head"].bytes, few["head"].flops) == (128 + 2 * 2 * 24, 2 * 2 * 128)
    assert many["head"].seconds == max((128 + 4800) / 100, 25600 / 2000)
    assert Roofline(shape, SLOW).seconds(2, 1, 0) == 1.32 + few["head"].seconds


def test_arithmetic_becomes_the_limit() -> None:
    shape = model(Part(LAYERS, "bf16", 40, 16, widths=0))
    assert Roofline(shape, SLOW).seconds(10, 1, 0) == pytest.approx(80 / 100)
    assert Roofline(shape, SLOW).seconds(11, 1, 0) == pytest.approx(2 * 11 * 40 / 1000)


def test_attention_by_hand() -> None:
    """Keys are read once a sequence, whatever the rows; a window limits both bytes and FLOPs."""
    layers = (Attention(4, kept=6, key=3, value=5), Attention(2, kept=2, key=1, value=1, window=10))
    work = Roofline(model(attention=layers), SLOW).work(tokens=8, sequences=2, context=50)["kv"]
    assert work.bytes == 8 * (6 + 2) * 2 + 2 * (50 * 6 + 10 * 2) * 2
    assert work.flops == 2 * 8 * (50 * 4 * 8 + 10 * 2 * 2)


def test_experts_that_a_pass_reads() -> None:
    part = Part(EXPERTS, "bf16", 800, 16, widths=5, used=1, of=4)
    assert experts_read(part, 1) == 0.25
    assert experts_read(part, 2) == pytest.approx(1 - 0.75**2)
    work = Roofline(model(part), SLOW).work(2, 2, 0)["weights"]
    assert work.bytes == pytest.approx(1600 * (1 - 0.75**2) + 2 * 2 * 5)
    assert work.flops == 2 * 2 * 800 / 4


def test_the_ridge_of_a_mixture_is_where_its_experts_are_read(tmp_path: Path) -> None:
    """Read: the layers, and of two experts those that N rows choose; computed: one a row."""
    half = model(Part(LAYERS, "bf16", 40, 16), Part(EXPERTS, "bf16", 80, 16, used=1, of=2))
    found = ridge_tokens(half, SLOW)
    assert 2 * found * (40 + 80 / 2) / 1000 == pytest.approx((80 + 160 * (1 - 0.5**found)) / 100)
    shape, eight = read_shape(write_config(DEEPSEEK_V3, tmp_path)), hardware("h200").times(8)
    bare = replace(shape, parts=tuple(replace(part, widths=0) for part in shape.parts))
    tokens = round(ridge_tokens(shape, eight))
    assert 3600 < tokens < 3800
    work = Roofline(bare, eight).work(tokens, 1, 0)
    both = work["weights"], work["head"]
    reading = sum(part.bytes for part in both) / eight.bandwidth
    arithmetic = sum(
        2 * tokens * part.weights * part.used / part.of / eight.rate(part.kind)
        for part in shape.parts
        if part.matrices and part.role != EMBEDDING
    )
    assert arithmetic == pytest.approx(reading, rel=1e-3)


def test_what_is_looked_up_is_no_matter_of_the_ridge() -> None:
    shape = model(Part(EMBEDDING, "bf16", 10**6, 32), Part(HEAD, "bf16", 40, 16))
    assert ridge_tokens(shape, SLOW) == pytest.approx(10)


def test_llama_70b_on_h100(tmp_path: Path) -> None:
    """The article: a token streams 140 GB, over 98 % of arithmetic idles, eight cost about one."""
    shape = read_shape(write_config(LLAMA_3_70B, tmp_path))
    roofline = Roofline(shape, H100)
    work = roofline.work(1, 1, 0)
    moved, flops = sum(w.bytes for w in work.values()), sum(w.flops for w in work.values())
    matrices = 80 * 855_638_016 + 128256 * 8192
    assert moved == pytest.approx(2 * matrices, rel=1e-3)
    assert flops == 2 * matrices
    one, eight = roofline.seconds(1, 1, 1024), roofline.seconds(8, 1, 1024)
    assert one == pytest.approx(139e9 / 3.35e12, rel=0.01)
    assert flops / one / H100.rate("bf16") < 0.02
    assert eight / one < 1.01
    assert roofline.seconds(590, 1, 0) / one == pytest.approx(2, rel=0.03), "past the ridge"
    assert work["head"].bytes / moved == pytest.approx(1.05 / 69.5, rel=0.01)
    assert 2 * matrices > H100.memory


def test_deepseek_v3_reads_more_experts_with_more_tokens(tmp_path: Path) -> None:
    shape = read_shape(write_config(DEEPSEEK_V3, tmp_path))
    roofline = Roofline(shape, H100.times(16))
    one, eight = (roofline.work(tokens, 1, 0)["weights"] for tokens in (1, 8))
    expert = 58 * 256 * 44_040_192
    rest = 15_263_268_864
    assert one.bytes == pytest.approx(rest + expert * 8 / 256, rel=2e-3)
    assert eight.bytes == pytest.approx(rest + expert * (1 - (248 / 256) ** 8), rel=2e-3)
    assert one.flops == 2 * (rest + expert * 8 // 256)
