"""A GGUF file as a transformers folder: converted once, kept in the cache folder.

Unpacking the weights takes much longer than reading unpacked ones, and so does building the
tokenizer. The first load therefore writes a folder as `save_pretrained` would (configuration,
tokenizer, safetensors) and every load, the first too, reads that folder. It is named by the
GGUF's sha256 and the dtype.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.integrations import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING
from transformers.integrations.gguf import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ridgeline.errors import ModelLoadError
from ridgeline.model.cache import cache_folder, file_sha256, staging_folder
from ridgeline.model.gguf_file import GGUFFile, read_gguf
from ridgeline.model.gguf_weights import ROPE_FACTORS, WeightPlan
from ridgeline.model.support import check_supported

_FORMAT = 1  # of the converted folders: raised when a conversion changes

# Architectures that transformers calls otherwise.
_FAMILIES = {
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "gpt-oss": "gpt_oss",
    "minimax-m2": "minimax_m2",
}
_MODEL_TYPES = {"gemma3": "gemma3_text", "gemma4": "gemma4_text"}
# What files state about the model and transformers' own table leaves at a default.
_FURTHER_KEYS = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
# Names of control tokens that end a turn or a text, beside those that the file names by id.
_END_MARKS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|eom_id|>")
_CONTROL = 3  # `tokenizer.ggml.token_type` of such tokens


def gguf_folder(path: Path, dtype: torch.dtype) -> Path:
    """The transformers folder of a GGUF file with weights in `dtype`, made if it is not there.

    Raises:
        ModelLoadError: the file is truncated or damaged, of a kind that transformers cannot build,
            or the cache folder is full or cannot be written.
        UnsupportedModelError: the model has a part that cannot run here.
    """
    home = cache_folder() / "gguf"
    name = f"{_digest(path, home)}-{str(dtype).removeprefix('torch.')}-{_FORMAT}"
    target = home / name
    if target.is_dir():
        return target
    header = read_gguf(path)
    config = gguf_config(header)
    check_supported(config)
    plan = WeightPlan(header, config, dtype)
    with staging_folder(target, plan.nbytes + (64 << 20), f"the unpacked {path.name}") as staging:
        folder = staging / name
        folder.mkdir()
        gguf_tokenizer(header).save_pretrained(folder)
        config.save_pretrained(folder)
        GenerationConfig(
            bos_token_id=config.bos_token_id,
            eos_token_id=_end_tokens(header),
            pad_token_id=config.pad_token_id,
        ).save_pretrained(folder)
        plan.write(folder / "model.safetensors")
        try:
            folder.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was faster
                raise
    return target


def gguf_config(header: GGUFFile) -> PreTrainedConfig:
    """The configuration that the metadata describes; ModelLoadError when transformers has none."""
    family = _FAMILIES.get(header.architecture, header.architecture)
    if family not in GGUF_CONFIG_MAPPING:
        raise ModelLoadError(
            f"{header.path} is of the architecture {header.architecture!r}, which transformers "
            "cannot read from GGUF; use the model's safetensors folder"
        )
    known = GGUF_CONFIG_MAPPING[family]
    names = {key: name for key, name in _FURTHER_KEYS.items() if known.get(key) is None}
    names |= {key: name for key, name in known.items() if name}
    stated = {key: header.metadata.get(f"{header.architecture}.{key}") for key in names}
    fields = dict(GGUF_CONFIG_DEFAULTS_MAPPING.get(family, {}))
    fields |= {names[key]: value for key, value in stated.items() if value is not None}
    for key, name in GGUF_CONFIG_MAPPING["tokenizer"].items():
        if (value := header.metadata.get(f"tokenizer.{key}")) is not None:
            fields[name] = value
    try:
        fields["vocab_size"] = header.tensors["token_embd.weight"].shape[0]
        # A block is several tensors; a count beyond theirs would only cost time to build.
        if fields.get("num_hidden_layers", fields.get("n_layer", 0)) > len(header.tensors):
            raise ValueError("block_count exceeds the number of tensors")
        fields["tie_word_embeddings"] = "output.weight" not in header.tensors
        if scaling := _rope_scaling(header):
            fields["rope_scaling"] = scaling
        config = AutoConfig.for_model(_MODEL_TYPES.get(family, family), **fields)
        if ROPE_FACTORS in header.tensors:
            _check_rope_factors(header, config)
    except ModelLoadError:
        raise
    except Exception as error:  # whatever transformers makes of numbers that do not fit together
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ModelLoadError(
            f"the metadata of {header.path} does not describe a {header.architecture} model: {reason}"
        ) from error
    return config


def gguf_tokenizer(header: GGUFFile) -> PreTrainedTokenizerFast:
    """The tokenizer that the metadata describes, with its special tokens and chat template."""
    grouped: dict[str, dict[str, Any]] = {
        group: {
            name: header.metadata[f"tokenizer.{key}"]
            for key, name in keys.items()
            if f"tokenizer.{key}" in header.metadata
        }
        for group, keys in GGUF_TOKENIZER_MAPPING.items()
    }
    description, options = grouped["tokenizer"], grouped["tokenizer_config"]
    try:
        if description["tokenizer_type"] == "llama":  # llama.cpp's default for sentencepiece
            options.setdefault("add_bos_token", True)
        for name in ("bos", "eos", "unk", "pad"):
            if (token := description.get(f"{name}_token_id")) is not None:
                options[f"{name}_token"] = description["tokens"][token]
        backend: Tokenizer = convert_gguf_tokenizer(header.architecture, description)[0]
        return PreTrainedTokenizerFast(tokenizer_object=backend, **options)
    except Exception as error:  # see gguf_config
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ModelLoadError(f"{header.path} holds no usable tokenizer: {reason}") from error


def _end_tokens(header: GGUFFile) -> list[int]:
    """Every token after which a model of this file has finished speaking."""
    metadata = header.metadata
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ends = [metadata[f"tokenizer.ggml.{k}"] for k in keys if f"tokenizer.ggml.{k}" in metadata]
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type", [])
    marks = [i for i, kind in enumerate(types) if kind == _CONTROL and tokens[i] in _END_MARKS]
    return list(dict.fromkeys(ends + marks))


def _rope_scaling(header: GGUFFile) -> dict[str, Any] | None:
    """Rotary scaling in transformers' terms: linear and yarn from the metadata, or Llama 3's."""

    def stated(key: str) -> Any:
        return header.metadata.get(f"{header.architecture}.rope.scaling.{key}")

    if ROPE_FACTORS in header.tensors:
        return {
            "rope_type": "llama3",
            "factor": float(_rope_factors(header).max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    kind = stated("type")
    if kind in (None, "none"):
        return None
    if kind not in ("linear", "yarn"):
        raise ModelLoadError(
            f"{header.path} scales its rotary positions by {kind!r}; from GGUF only linear and "
            "yarn can be read: use the model's safetensors folder"
        )
    scaling = {"rope_type": kind, "factor": stated("factor")}
    if kind == "yarn" and (original := stated("original_context_length")):
        scaling["original_max_position_embeddings"] = original
    return scaling


def _rope_factors(header: GGUFFile) -> torch.Tensor:
    rows = header.rows(header.tensors[ROPE_FACTORS])
    return torch.from_numpy(rows.view("<f4").astype("f4").ravel())


def _check_rope_factors(header: GGUFFile, config: PreTrainedConfig) -> None:
    """Hold the file's divisors against those that Llama 3's published parameters give.

    llama.cpp stores only the result, one divisor a frequency; transformers takes the parameters.
    """
    factors = _rope_factors(header)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    exponents = torch.arange(len(factors)) / len(factors)
    plain = config.rope_parameters["rope_theta"] ** -exponents
    if scaled.shape != factors.shape or not torch.allclose(plain / scaled, factors, rtol=1e-3):
        raise ModelLoadError(
            f"{header.path} scales its rotary positions in a way other than Llama 3's; "
            "use the model's safetensors folder"
        )


def _digest(path: Path, home: Path) -> str:
    """The file's sha256, remembered by its path, size and time of change."""
    stat = path.stat()
    identity = f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"
    memo = home / "digests" / hashlib.sha256(identity.encode()).hexdigest()
    if memo.is_file():
        return memo.read_text()
    digest = file_sha256(path)
    with staging_folder(memo, 0, path.name) as staging:
        (staging / "digest").write_text(digest)
        os.replace(staging / "digest", memo)
    return digest
