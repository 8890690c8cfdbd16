"""Products of quantised weights: exact integers, GGUF's own values, the same bits for any rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

native = pytest.importorskip("ridgeline._native")

T = GGMLQuantizationType
# Where a block's fp16 numbers lie.
KINDS = {
    T.Q4_0: (0,),
    T.Q4_1: (0, 2),
    T.Q5_0: (0,),
    T.Q5_1: (0, 2),
    T.Q8_0: (0,),
    T.Q4_K: (0, 2),
    T.Q5_K: (0, 2),
    T.Q6_K: (208,),
}
OUTPUTS, INPUTS = 52, 512  # outputs end within a tile


def blocks(kind: T, seed: int = 0) -> NDArray[np.uint8]:
    """u8[OUTPUTS, bytes of a row]: every bit random but for moderate scales."""
    size, nbytes = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (OUTPUTS, INPUTS // size, nbytes), dtype=np.uint8)
    for offset in KINDS[kind]:
        scales = rng.uniform(0.002, 0.01, (*raw.shape[:2], 1)).astype(np.float16)
        raw[..., offset : offset + 2] = scales.view(np.uint8)
    return raw.reshape(OUTPUTS, -1)


def pack(kind: T, raw: NDArray[np.uint8], bias: NDArray[np.float32] | None = None) -> object:
    return native.from_gguf(
        type=int(kind),
        blocks=raw.reshape(-1),
        rows=np.arange(OUTPUTS, dtype=np.int32),
        bias=np.empty(0, np.float32) if bias is None else bias,
        inputs=INPUTS,
    )


def multiply(weights: object, x: Tensor) -> Tensor:
    y = torch.empty(len(x), weights.outputs)  # type: ignore[attr-defined]
    weights.multiply(  # type: ignore[attr-defined]
        native.F32, x.data_ptr(), x.numel(), y.data_ptr(), y.numel()
    )
    return y


def unpacked(weights: object) -> Tensor:
    values = torch.empty(weights.outputs, weights.inputs)  # type: ignore[attr-defined]
    weights.unpack(values.data_ptr(), values.numel())  # type: ignore[attr-defined]
    return values


def rounded(x: Tensor) -> Tensor:
    """The inputs as the product sees them: 8 bits for every 32."""
    strips = x.view(len(x), -1, 32)
    scale = strips.abs().amax(-1, keepdim=True) / 127
    return (torch.round(strips / scale) * scale).view_as(x)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_packed_values_are_those_of_the_file(kind: T) -> None:
    raw = blocks(kind)
    assert torch.equal(unpacked(pack(kind, raw)), torch.from_numpy(dequantize(raw, kind)))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_packed_weights_take_little_more_than_the_file(kind: T) -> None:
    raw = blocks(kind)[:48]  # whole tiles
    weights = native.from_gguf(
        int(kind), raw.reshape(-1), np.arange(48, dtype=np.int32), np.empty(0, np.float32), INPUTS
    )
    # 5-bit integers lie in 6 bits.
    most = 1.25 if kind in (T.Q5_0, T.Q5_1, T.Q5_K) else 1.03
    assert weights.nbytes <= most * raw.nbytes


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_single_rows_are_exact(kind: T) -> None:
    raw = blocks(kind)
    ids = np.array([51, 0, 7, 7], np.int64)
    rows = torch.empty(4, INPUTS)
    to = (rows.data_ptr(), rows.numel())
    native.gguf_rows(int(kind), raw.reshape(-1), OUTPUTS, INPUTS, ids, *to)
    assert torch.equal(rows, torch.from_numpy(dequantize(raw, kind)[ids]))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_product_is_that_of_the_rounded_inputs(kernels: str, kind: T) -> None:
    bias = np.random.default_rng(1).normal(size=OUTPUTS).astype(np.float32)
    weights = pack(kind, blocks(kind), bias)
    torch.manual_seed(0)
    x = torch.randn(40, INPUTS)
    exact = rounded(x).double() @ unpacked(weights).double().T + torch.from_numpy(bias)
    error = (multiply(weights, x) - exact).abs().max() / exact.abs().max()
    assert error < 1e-6


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_extreme_integers_do_not_overflow(kernels: str, kind: T) -> None:
    # Every product as large as it can be: what 16-bit sums would overflow on.
    raw = blocks(kind)
    raw.reshape(OUTPUTS, -1, GGML_QUANT_SIZES[kind][1])[..., max(KINDS[kind]) + 2 :] = 0xFF
    if kind is T.Q6_K:
        raw.reshape(OUTPUTS, -1, 210)[..., :192] = 0xFF
    weights = pack(kind, raw)
    for x in (torch.ones(2, INPUTS), -torch.ones(2, INPUTS)):
        exact = x.double() @ unpacked(weights).double().T
        assert ((multiply(weights, x) - exact).abs() / exact.abs().max()).max() < 1e-6


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_row_has_the_same_bits_among_others(kernels: str, kind: T) -> None:
    weights = pack(kind, blocks(kind))
    torch.manual_seed(1)
    x = torch.randn(130, INPUTS)
    alone = torch.cat([multiply(weights, row[None]) for row in x])
    for count in (2, 3, 8, 16, 97, 130):
        assert torch.equal(multiply(weights, x[:count].contiguous()), alone[:count])
    for threads in (1, 3):
        native.set_threads(threads)
        assert torch.equal(multiply(weights, x), alone)


def test_rows_may_be_permuted() -> None:
    raw = blocks(T.Q4_K)
    order = np.random.default_rng(2).permutation(OUTPUTS).astype(np.int32)
    weights = native.from_gguf(12, raw.reshape(-1), order, np.empty(0, np.float32), INPUTS)
    assert torch.equal(unpacked(weights), unpacked(pack(T.Q4_K, raw))[torch.from_numpy(order)])


@pytest.mark.parametrize(("bits", "largest"), [(4, 0.6 / 15), (8, 0.6 / 127)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_weights_errs_by_half_a_step(
    bits: int, largest: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(3)
    weights = torch.randn(OUTPUTS, INPUTS).to(dtype)
    kind = native.F32 if dtype == torch.float32 else native.BF16
    packed = native.quantised(bits, kind, weights.data_ptr(), 0, OUTPUTS, INPUTS)
    groups = weights.float().view(OUTPUTS, -1, 32)
    reach = groups.amax(-1) - groups.amin(-1) if bits == 4 else groups.abs().amax(-1)
    error = (unpacked(packed).view_as(groups) - groups).abs().amax(-1)
    assert (error <= largest * reach).all()
    assert packed.nbytes * 8 / (64 * INPUTS) == {4: 5.0, 8: 8.5}[bits]


def test_constant_and_zero_groups(kernels: str) -> None:
    weights = torch.zeros(16, 64)
    weights[1] = 0.5
    packed = native.quantised(4, native.F32, weights.data_ptr(), 0, 16, 64)
    assert torch.equal(unpacked(packed), weights)
    assert torch.equal(multiply(packed, torch.zeros(1, 64)), torch.zeros(1, 16))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_shows(kernels: str, bad: float) -> None:
    weights = pack(T.Q4_0, blocks(T.Q4_0))
    x = torch.randn(2, INPUTS)
    x[1, 100] = bad
    y = multiply(weights, x)
    assert torch.isfinite(y[0]).all()
    assert not torch.isfinite(y[1]).any()


def test_bad_arguments_are_refused() -> None:
    raw, rows = blocks(T.Q4_0).reshape(-1), np.arange(OUTPUTS, dtype=np.int32)
    none = np.empty(0, np.float32)
    with pytest.raises(ValueError, match="GGUF type 10 is not packed"):
        native.from_gguf(10, raw, rows, none, INPUTS)
    with pytest.raises(ValueError, match="another number of bytes"):
        native.from_gguf(2, raw[:-1], rows, none, INPUTS)
    with pytest.raises(ValueError, match="no whole number of blocks"):
        native.from_gguf(2, raw, rows, none, INPUTS + 1)
    with pytest.raises(ValueError, match="row's number is out of range"):
        native.from_gguf(2, raw, rows + 1, none, INPUTS)
    with pytest.raises(ValueError, match="one value an output"):
        native.from_gguf(2, raw, rows, np.zeros(3, np.float32), INPUTS)
    ids, to = np.array([OUTPUTS], np.int64), torch.empty(1, INPUTS)
    with pytest.raises(ValueError, match="row's number is out of range"):
        native.gguf_rows(2, raw, OUTPUTS, INPUTS, ids, to.data_ptr(), to.numel())
    with pytest.raises(ValueError, match="room for its numbers"):
        native.gguf_rows(2, raw, OUTPUTS, INPUTS, ids, to.data_ptr(), to.numel() - 1)
    weights = torch.zeros(16, 48)
    with pytest.raises(ValueError, match="multiple of 32 inputs"):
        native.quantised(4, native.F32, weights.data_ptr(), 0, 16, 48)
    with pytest.raises(ValueError, match="4 or 8 bits"):
        native.quantised(5, native.F32, weights.data_ptr(), 0, 16, 32)
