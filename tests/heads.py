"""Random draft heads in the layouts that others publish, for the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from ridgeline.draft.checkpoint import hidden_size
from ridgeline.model.load import LoadedModel
from tests.tiny import tiny_model, tiny_tokenizer

METHODS = ("medusa", "eagle", "eagle3", "mtp")


def write_head(method: str, folder: Path, target: LoadedModel, **changes: Any) -> str:
    """A random head for the target; returns the drafter's spec.

    `changes`: `hidden` and `vocab` for a head of another model, `draft_vocab`, `pickled`, `config`;
    of MTP the number of `modules`, and `qwen` for Qwen3-Next's layout.
    """
    torch.manual_seed(METHODS.index(method))
    hidden = changes.get("hidden", hidden_size(target))
    vocab = changes.get("vocab", target.vocab_size)
    layers = len(target.model.layers)
    if method == "mtp":
        tensors = _mtp(hidden, vocab, layers, changes.get("modules", 1), changes.get("qwen", False))
    else:
        write = {"medusa": _medusa, "eagle": _eagle, "eagle3": _eagle3}[method]
        tensors = write(hidden, vocab, changes.get("draft_vocab"))
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


def _eagle(hidden: int, vocab: int, draft_vocab: int | None) -> dict[str, Tensor]:
    tensors = {f"layers.0.{name}": t for name, t in _block(hidden, hidden).items()}
    tensors |= {
        "embed_tokens.weight": torch.randn(vocab, hidden),
        "fc.weight": _matrix(hidden, 2 * hidden),
        "fc.bias": torch.randn(hidden) * 0.1,
    }
    if draft_vocab:
        tensors["d2t"] = _ids(vocab, draft_vocab) - torch.arange(draft_vocab)
    return tensors


def _eagle3(hidden: int, vocab: int, draft_vocab: int | None) -> dict[str, Tensor]:
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


def _mtp(hidden: int, vocab: int, layers: int, modules: int, qwen: bool) -> dict[str, Tensor]:
    tensors = {"model.layers.0.self_attn.q_proj.weight": _matrix(hidden, hidden)}  # the model's own
    for k in range(modules):
        block = _block(hidden, hidden) | {"input_layernorm.weight": _norm(hidden)}
        if qwen:
            tensors |= {f"mtp.layers.{k}.{name}": tensor for name, tensor in block.items()}
            continue
        own = block | {
            "enorm.weight": _norm(hidden),
            "hnorm.weight": _norm(hidden),
            "eh_proj.weight": _matrix(hidden, 2 * hidden),
            "embed_tokens.weight": torch.randn(vocab, hidden),
            "shared_head.norm.weight": _norm(hidden),
            "shared_head.head.weight": 4 * _matrix(vocab, hidden),
        }
        tensors |= {f"model.layers.{layers + k}.{name}": tensor for name, tensor in own.items()}
    if qwen:
        tensors |= {
            "mtp.pre_fc_norm_embedding.weight": _norm(hidden),
            "mtp.pre_fc_norm_hidden.weight": _norm(hidden),
            "mtp.fc.weight": _matrix(hidden, 2 * hidden),
            "mtp.norm.weight": _norm(hidden),
        }
    return tensors


def _medusa(hidden: int, vocab: int, draft_vocab: int | None) -> dict[str, Tensor]:
    tensors = {}
    for i in range(4):
        tensors[f"{i}.0.linear.weight"] = _matrix(hidden, hidden)
        tensors[f"{i}.0.linear.bias"] = torch.randn(hidden) * 0.1
        tensors[f"{i}.1.weight"] = 4 * _matrix(draft_vocab or vocab, hidden)
    if draft_vocab:
        tensors["d2t"] = _ids(vocab, draft_vocab) - torch.arange(draft_vocab)
    return tensors


def write_modules(
    family: str, folder: Path, modules: int, qwen: bool = False
) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """A whole tiny checkpoint of 3 layers with MTP modules whose layers are the family's own.

    Returns:
        The model with the modules' layers as further ones, and the tensors around them by the
        names that they have in the folder.
    """
    layers = 3
    overrides = {"layer_types": ["full_attention"] * (layers + modules)} if qwen else {}
    model = tiny_model(family, num_hidden_layers=layers + modules, **overrides)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": layers}
    for name in {"layer_types", "mlp_layer_types"} & config.keys():
        config[name] = config[name][:layers]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(7)
    hidden, vocab = model.config.hidden_size, model.config.vocab_size
    around: dict[str, Tensor] = {}
    for k in range(modules):
        place = f"model.layers.{layers + k}."
        if qwen:
            found = [name for name in tensors if name.startswith(place)]
            for name in found:
                tensors[name.replace(place, f"mtp.layers.{k}.")] = tensors.pop(name)
            place = "mtp."
        projection, before, between, after = (
            ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
            if qwen
            else ("eh_proj", "enorm", "hnorm", "shared_head.norm")
        )
        around[f"{place}{projection}.weight"] = _matrix(hidden, 2 * hidden)
        for name in (before, between, after):
            around[f"{place}{name}.weight"] = _norm(hidden)
        if not qwen:
            around[place + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
            around[place + "shared_head.head.weight"] = 4 * _matrix(vocab, hidden)
    held = {name: tensor.contiguous().clone() for name, tensor in (tensors | around).items()}
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    return model, around
