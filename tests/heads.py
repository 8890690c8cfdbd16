"""Random draft heads in the layouts that others publish, for the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ridgeline.draft.checkpoint import hidden_size
from ridgeline.model.load import LoadedModel

METHODS = ("medusa", "eagle", "eagle3", "mtp")


def write_head(method: str, folder: Path, target: LoadedModel, **changes: Any) -> str:
    """A random head for the target; returns the drafter's spec.

    `changes`: `hidden` and `vocab` for a head of another model, `draft_vocab`, `pickled`.
    """
    torch.manual_seed(METHODS.index(method))
    hidden = changes.get("hidden", hidden_size(target))
    vocab = changes.get("vocab", target.vocab_size)
    tensors = {
        "medusa": _medusa,
        "eagle": _eagle,
        "eagle3": _eagle3,
        "mtp": _mtp,
    }[method](hidden, vocab, changes.get("draft_vocab"), len(target.model.layers))
    kv_heads, dim = (2, 16) if hidden % 16 == 0 and hidden >= 64 else (2, 12)
    config = {
        "hidden_size": hidden,
        "intermediate_size": 96,
        "num_attention_heads": hidden // dim,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 256,
        "vocab_size": vocab,
        "medusa_num_heads": 2,  # as in published files, where there are more
        **changes.get("config", {}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if changes.get("pickled"):
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(
            {name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors"
        )
    return f"{method}:{folder}"


def _matrix(outputs: int, inputs: int) -> Tensor:
    return torch.randn(outputs, inputs) * 1.5 / inputs**0.5


def _norm(width: int) -> Tensor:
    return 1 + 0.1 * torch.randn(width)


def _block(hidden: int, wide: int) -> dict[str, Tensor]:
    dim = 16 if hidden % 16 == 0 and hidden >= 64 else 12
    heads, kv = hidden // dim * dim, 2 * dim
    return {
        "self_attn.q_proj.weight": _matrix(heads, wide),
        "self_attn.k_proj.weight": _matrix(kv, wide),
        "self_attn.v_proj.weight": _matrix(kv, wide),
        "self_attn.o_proj.weight": _matrix(hidden, heads),
        "mlp.gate_proj.weight": _matrix(96, hidden),
        "mlp.up_proj.weight": _matrix(96, hidden),
        "mlp.down_proj.weight": _matrix(hidden, 96),
        "post_attention_layernorm.weight": _norm(hidden),
    }


def _ids(vocab: int, draft_vocab: int) -> Tensor:
    return torch.randperm(vocab)[:draft_vocab].sort().values


def _eagle(hidden: int, vocab: int, draft_vocab: int | None, layers: int) -> dict[str, Tensor]:
    tensors = {f"layers.0.{name}": t for name, t in _block(hidden, hidden).items()}
    tensors |= {
        "embed_tokens.weight": torch.randn(vocab, hidden),
        "fc.weight": _matrix(hidden, 2 * hidden),
        "fc.bias": torch.randn(hidden) * 0.1,
    }
    if draft_vocab:
        tensors["d2t"] = _ids(vocab, draft_vocab) - torch.arange(draft_vocab)
    return tensors


def _eagle3(hidden: int, vocab: int, draft_vocab: int | None, layers: int) -> dict[str, Tensor]:
    draft_vocab = draft_vocab or 60
    ids = _ids(vocab, draft_vocab)
    tensors = {f"midlayer.{name}": t for name, t in _block(hidden, 2 * hidden).items()}
    return tensors | {
        "midlayer.hidden_norm.weight": _norm(hidden),
        "midlayer.input_layernorm.weight": _norm(hidden),
        "fc.weight": _matrix(hidden, 3 * hidden),
        "norm.weight": _norm(hidden),
        "lm_head.weight": 4 * _matrix(draft_vocab, hidden),
        "d2t": ids - torch.arange(draft_vocab),
        "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True),
    }


def _mtp(hidden: int, vocab: int, draft_vocab: int | None, layers: int) -> dict[str, Tensor]:
    own = _block(hidden, hidden) | {
        "input_layernorm.weight": _norm(hidden),
        "enorm.weight": _norm(hidden),
        "hnorm.weight": _norm(hidden),
        "eh_proj.weight": _matrix(hidden, 2 * hidden),
        "embed_tokens.weight": torch.randn(vocab, hidden),
        "shared_head.norm.weight": _norm(hidden),
        "shared_head.head.weight": 4 * _matrix(vocab, hidden),
    }
    tensors = {f"model.layers.{layers}.{name}": t for name, t in own.items()}
    tensors["model.layers.0.self_attn.q_proj.weight"] = _matrix(hidden, hidden)  # the model's own
    return tensors


def _medusa(hidden: int, vocab: int, draft_vocab: int | None, layers: int) -> dict[str, Tensor]:
    tensors = {}
    for i in range(4):
        tensors[f"{i}.0.linear.weight"] = _matrix(hidden, hidden)
        tensors[f"{i}.0.linear.bias"] = torch.randn(hidden) * 0.1
        tensors[f"{i}.1.weight"] = 4 * _matrix(draft_vocab or vocab, hidden)
    if draft_vocab:
        tensors["d2t"] = _ids(vocab, draft_vocab) - torch.arange(draft_vocab)
    return tensors
