"""Draft heads' weights in 8 bits: the layout of compressed-tensors, written and read."""

from __future__ import annotations

import pytest
import torch

from ridgeline.draft.int8 import restored, rounded
from ridgeline.errors import ModelLoadError


def test_a_rounded_matrix_is_within_a_step_of_what_it_was() -> None:
    weight = torch.randn(6, 40) * torch.logspace(-3, 3, 6)[:, None]
    tensors = {"fc.weight": weight, "norm.weight": torch.randn(40), "d2t": torch.arange(5)}
    found = rounded(tensors)
    assert found["fc.weight"].dtype == torch.int8
    assert found["fc.weight_scale"].shape == (6, 1)
    back = restored(found, "head")
    assert back.keys() == tensors.keys()
    step = weight.abs().amax(1, keepdim=True) / 127
    # bf16 keeps a factor to one part in 256, which moves the largest weights by half a step more.
    assert bool(((back["fc.weight"] - weight).abs() <= 1.01 * step).all())
    assert torch.equal(back["norm.weight"], tensors["norm.weight"])
    assert torch.equal(back["d2t"], tensors["d2t"])


def test_rows_of_zeros_stay_zeros() -> None:
    assert not restored(rounded({"w.weight": torch.zeros(2, 8)}), "head")["w.weight"].any()


def test_factors_may_stand_for_groups_of_a_row() -> None:
    weight = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=torch.int8)
    scale = torch.tensor([[1.0, 10.0], [0.5, 2.0]])
    found = restored({"w.weight": weight, "w.weight_scale": scale}, "head")
    assert found["w.weight"].tolist() == [[1, 2, 30, 40], [2.5, 3, 14, 16]]


@pytest.mark.parametrize("scale", [None, torch.ones(3, 1), torch.ones(2, 3), torch.ones(0)])
def test_factors_that_do_not_fit_are_named(scale: torch.Tensor | None) -> None:
    tensors = {"w.weight": torch.ones(2, 4, dtype=torch.int8)}
    if scale is not None:
        tensors["w.weight_scale"] = scale
    with pytest.raises(ModelLoadError, match=r"w\.weight"):
        restored(tensors, "head")
