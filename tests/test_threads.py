"""CPU threads: torch's operators on one where a batch is small, the native product on all."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from ridgeline import LLM
from ridgeline.core.batch import Batch, Entry, pack
from ridgeline.core.tree import TokenTree
from ridgeline.errors import ConfigError
from ridgeline.model import linear
from ridgeline.model.threads import SMALL_KEYS, SMALL_ROWS, operator_threads, set_threads
from tests.engines import tiny_llm, tiny_loaded, torch_module


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    set_threads(1)


def batch(rows: int, kv_len: int = 0) -> Batch:
    tree = TokenTree.plain(list(range(rows)))
    return pack([Entry(tree, kv_len, np.arange(kv_len + rows), np.empty(0, np.int64))])


@pytest.mark.parametrize(
    ("rows", "kv_len", "threads"),
    [(1, 0, 1), (SMALL_ROWS, 0, 1), (SMALL_ROWS + 1, 0, 2), (1, SMALL_KEYS, 2)],
)
def test_only_small_batches_run_on_one(rows: int, kv_len: int, threads: int) -> None:
    with operator_threads(batch(rows, kv_len)):
        assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == 2


def test_an_error_within_restores_them() -> None:
    with pytest.raises(KeyError), operator_threads(batch(1)):
        raise KeyError
    assert torch.get_num_threads() == 2


def test_a_forward_pass_runs_torch_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ridgeline._native")
    seen = []
    forward = linear.PackedLinear.forward

    def spy(self: linear.PackedLinear, x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return forward(self, x)

    monkeypatch.setattr(linear.PackedLinear, "forward", spy)
    loaded = tiny_loaded(seed=3)  # no other test's: packing changes it
    linear.pack_linears(torch_module(loaded))
    llm = LLM(loaded, kv_tokens=256)
    seen.clear()
    llm.generate([[1, 2, 3]])
    assert set(seen) == {1}
    assert torch.get_num_threads() == 2


def test_one_number_for_both_also_with_a_model_loaded_before() -> None:
    native = pytest.importorskip("ridgeline._native")
    tiny_llm(threads=3)
    assert (torch.get_num_threads(), native.threads()) == (3, 3)


def test_fewer_than_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="threads is 0; it must be an integer, 1 to 1024"):
        set_threads(0)
