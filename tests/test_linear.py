"""The native matrix product: right, and the same bits for every number of rows and threads."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from torch import nn

from ridgeline.model import linear as linear_module
from ridgeline.model.linear import PackedLinear, matrix_path, pack_linears
from tests.extension import KERNELS

native = pytest.importorskip("ridgeline._native")

ROUNDING = ["amx", "avx512_bf16"]
"""Kernels that multiply bf16 weights with inputs rounded to bf16."""
DTYPES = [torch.float32, torch.bfloat16]
# Outputs that end within a tile, inputs that end within a pair, both, several cuts of inputs.
SHAPES = [(1, 1), (5, 3), (16, 2), (17, 33), (48, 64), (100, 257), (70, 1030)]


def make(
    outputs: int, inputs: int, dtype: torch.dtype, bias: bool = True
) -> tuple[nn.Linear, PackedLinear]:
    torch.manual_seed(outputs * 1000 + inputs)
    layer = nn.Linear(inputs, outputs, bias=bias).to(dtype).requires_grad_(False)
    return layer, PackedLinear(layer)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activations", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_exact_product(
    kernels: str, shape: tuple[int, int], dtype: torch.dtype, activations: torch.dtype
) -> None:
    outputs, inputs = shape
    layer, packed = make(outputs, inputs, dtype)
    for rows in (1, 2, 3, 7, 16, 40, 100):
        x = torch.randn(rows, inputs).to(activations)
        y = packed(x)
        seen = x.to(dtype) if kernels in ROUNDING else x
        exact = nn.functional.linear(seen.double(), layer.weight.double(), layer.bias.double())
        assert y.dtype == activations
        # fp32 sums err by about sqrt(inputs) roundings of numbers near 1, the result by another.
        bound = 2**-23 * math.sqrt(inputs) * 2 + exact.abs() * torch.finfo(activations).eps
        assert torch.all((y.double() - exact).abs() <= bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(17, 33), (100, 257), (70, 1030)])
def test_a_row_has_the_same_bits_whatever_surrounds_it(
    kernels: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    outputs, inputs = shape
    _, packed = make(outputs, inputs, dtype)
    x = torch.randn(200, inputs).to(dtype)
    native.set_threads(1)
    alone = torch.cat([packed(row[None]) for row in x])
    for threads in (1, 2, 3):
        native.set_threads(threads)
        for rows in [*range(1, 41), 97, 200]:
            assert torch.equal(packed(x[:rows]), alone[:rows])
            assert torch.equal(packed(x[-rows:]), alone[-rows:])


def test_the_bit_comparison_can_fail() -> None:
    # What it guards against: the same sum in another order has other bits.
    _, packed = make(64, 1030, torch.float32)
    x = torch.randn(1, 1030)
    reversed_layer = nn.Linear(1030, 64).requires_grad_(False)
    reversed_layer.weight.copy_(packed.weight.flip(1))
    reversed_layer.bias.copy_(packed.bias)
    assert not torch.equal(packed(x), PackedLinear(reversed_layer)(x.flip(1)))


def test_kernels_with_the_same_fused_sums_agree_to_the_bit() -> None:
    _, packed = make(70, 1030, torch.bfloat16)
    x = torch.randn(9, 1030)
    results = {}
    for name in KERNELS:
        native.choose_kernels(name)
        results[name] = packed(x)
    native.choose_kernels(KERNELS[0])
    fused = [results[name] for name in KERNELS if name not in {"portable", *ROUNDING}]
    assert all(torch.equal(result, fused[0]) for result in fused)
    torch.testing.assert_close(results["portable"], fused[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_weight_comes_back_exactly(shape: tuple[int, int], dtype: torch.dtype) -> None:
    layer, packed = make(*shape, dtype)
    assert torch.equal(packed.weight, layer.weight)


def test_special_values(kernels: str) -> None:
    layer = nn.Linear(2, 3, bias=False).to(torch.bfloat16).requires_grad_(False)
    layer.weight.copy_(torch.tensor([[1.0, 0.0], [3e38, 3e38], [math.nan, 1.0]]))
    y = PackedLinear(layer)(torch.tensor([[1.00390625, 1.0]], dtype=torch.bfloat16))
    assert y[0, 0] == 1.0  # an input halfway between two bf16 numbers was rounded to even by torch
    assert math.isinf(y[0, 1])
    assert math.isnan(y[0, 2])
    # 1 + 2^-8 lies halfway between 1 and 1 + 2^-7: to even; 1 + 3 * 2^-8 goes up to 1 + 2^-6.
    halves = nn.Linear(2, 2, bias=False).to(torch.bfloat16).requires_grad_(False)
    halves.weight.copy_(torch.tensor([[1.0, 2**-8], [1.0, 3 * 2**-8]]))
    rounded = PackedLinear(halves)(torch.ones(1, 2, dtype=torch.bfloat16))
    assert rounded[0].tolist() == [1.0, 1.0 + 2**-6]


def test_shapes_strides_and_emptiness() -> None:
    layer, packed = make(20, 12, torch.float32)
    x = torch.randn(2, 3, 24)[..., ::2]
    torch.testing.assert_close(packed(x), layer(x.contiguous()))
    assert packed(x[0, 0]).shape == (20,)
    assert packed(torch.empty(0, 12)).shape == (0, 20)
    transposed = nn.Linear(12, 20).requires_grad_(False)
    transposed.weight.data = layer.weight.t().contiguous().t()
    transposed.bias.copy_(layer.bias)
    assert torch.equal(PackedLinear(transposed)(x), packed(x))


def test_refuses_what_it_cannot_do() -> None:
    _, packed = make(20, 12, torch.float32)
    with pytest.raises(ValueError, match="rows of 12"):
        packed(torch.randn(12, 11))
    with pytest.raises(ValueError, match="rows of 12"):
        packed(torch.randn(2, 24))
    with pytest.raises(KeyError):
        packed(torch.randn(1, 12, dtype=torch.float64))
    with pytest.raises(ValueError, match="null"):
        native.dense(native.F32, 0, 4, 0, 4, 4)
    with pytest.raises(ValueError, match="2\\^30"):
        native.dense(native.F32, 64, 4, 0, 0, 4)
    with pytest.raises(ValueError, match="stride"):
        native.dense(native.F32, 64, 3, 0, 4, 4)
    with pytest.raises(ValueError, match="type"):
        native.dense(9, 64, 4, 0, 4, 4)
    with pytest.raises(ValueError, match="threads"):
        native.set_threads(0)
    with pytest.raises(ValueError, match="no kernels named"):
        native.choose_kernels("mmx")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 8)
        self.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(8, 8)}) for _ in range(3))
        self.kv_b_proj = nn.Linear(8, 8)
        self.other = nn.Linear(8, 8).half()
        self.lm_head = nn.Linear(8, 40, bias=False)
        self.lm_head.weight = self.embed.weight


def test_packs_a_model_and_frees_the_originals() -> None:
    net = Net().requires_grad_(False)
    x = torch.randn(2, 8)
    expected = [layer["up"](x) for layer in net.layers]
    head = net.lm_head(x)
    originals = [weakref.ref(layer["up"].weight) for layer in net.layers]
    assert pack_linears(net) == 4
    assert all(ref() is None for ref in originals)
    for layer, y in zip(net.layers, expected, strict=True):
        assert isinstance(layer["up"], PackedLinear)
        torch.testing.assert_close(layer["up"](x), y)
    torch.testing.assert_close(net.lm_head(x), head)
    assert isinstance(net.embed.weight, nn.Parameter)
    assert type(net.kv_b_proj) is nn.Linear
    assert type(net.other) is nn.Linear
    assert pack_linears(net) == 0


def test_skip_and_the_torch_path(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    assert pack_linears(net, skip={"up", "lm_head"}) == 1
    assert type(net.lm_head) is nn.Linear
    assert matrix_path().startswith(f"native, {KERNELS[0]} kernels")
    monkeypatch.setattr(linear_module, "_native", None)
    monkeypatch.setattr(linear_module, "_missing", "no such module", raising=False)
    assert pack_linears(Net()) == 0
    assert matrix_path() == "torch (the native extension is not built: no such module)"


def test_a_forked_child_computes_too() -> None:
    import os

    _, packed = make(512, 256, torch.float32)
    x = torch.randn(4, 256)
    native.set_threads(2)
    expected = packed(x)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(packed(x), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_concurrent_callers_do_not_mix() -> None:
    from concurrent.futures import ThreadPoolExecutor

    native.set_threads(2)
    _, packed = make(300, 200, torch.float32)
    inputs = [torch.randn(rows, 200) for rows in (1, 5, 40)] * 20
    expected = [packed(x) for x in inputs]
    with ThreadPoolExecutor(3) as executor:
        results = list(executor.map(packed, inputs))
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
