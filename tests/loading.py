"""What the tests of model loading share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ridgeline.core.batch import Entry, pack
from ridgeline.core.tree import TokenTree
from ridgeline.errors import ModelLoadError
from ridgeline.kv.store import KVStore
from ridgeline.model.load import LoadedModel, load_model
from tests.tiny import VOCAB_SIZE

CONTEXT = 256
PROMPT = torch.from_numpy(np.random.default_rng(1).integers(4, VOCAB_SIZE, 24))


def logits(loaded: LoadedModel) -> Tensor:
    """f32[24,V] of PROMPT, run as the engine would."""
    store = KVStore(loaded.model.layers, 4, 16, "cpu")
    tree = TokenTree.plain(PROMPT.numpy())
    rows = np.arange(tree.size)
    return loaded.model.bind(store).forward(pack([Entry(tree, 0, rows, rows)])).logits


def eager_logits(model: PreTrainedModel) -> Tensor:
    return model(input_ids=PROMPT[None], use_cache=False).logits[0]


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).abs().max() < 1e-4  # of logits of about 15


def refusal(path: str | Path, kind: type[Exception] = ModelLoadError) -> str:
    """The one line that loading `path` ends in."""
    with pytest.raises(kind) as error:
        load_model(str(path), "fp32", "cpu")
    message = str(error.value)
    assert "\n" not in message
    return message
