"""A GGUF file as a transformers folder: converted once, kept in the cache folder.

Unpacking the weights takes much longer than reading unpacked ones, and so does building the
tokenizer. The first load therefore writes a folder as `save_pretrained` would (configuration,
tokenizer, safetensors) and every load, the first too, reads that folder. It is named by the
GGUF's sha256 and the dtype.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.integrations import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING
from transformers.integrations.gguf import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ridgeline.errors import ModelLoadError, reason
from ridgeline.model.cache import cache_errors, cache_folder, file_sha256, staging_folder
from ridgeline.model.gguf_file import GGUFFile, read_gguf
from ridgeline.model.gguf_weights import ROPE_FACTORS, WeightPlan
from ridgeline.model.native import FAMILIES, head_dim
from ridgeline.model.support import check_supported

_FORMAT = 2  # of the converted folders: raised when a conversion changes

_EMBEDDING = "token_embd.weight"
_SEALS = "seals.json"  # in a converted folder: what tells whether it is whole

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
# Names of pre-tokenizers that split numbers into digits before GPT-2's rule, which transformers'
# conversion applies alone. https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp
_SINGLE_DIGITS = (
    *("smollm", "starcoder", "refact", "command-r"),
    *("codeshell", "exaone", "minerva-7b"),
)


def gguf_folder(path: Path, dtype: torch.dtype | None) -> Path:
    """The transformers folder of a GGUF file with weights in `dtype`, made if it is not there.

    Without a dtype the folder holds all but the weights: configuration and tokenizer.

    Raises:
        ModelLoadError: the file is truncated or damaged, of a kind that transformers cannot build,
            or the cache folder is full or cannot be written.
        UnsupportedModelError: the model has a part that cannot run here.
    """
    home = cache_folder() / "gguf"
    kind = str(dtype).removeprefix("torch.") if dtype else "description"
    name = f"{_digest(path, home)}-{kind}-{_FORMAT}"
    target = home / name
    if _intact(target):
        return target
    shutil.rmtree(target, ignore_errors=True)
    header = read_gguf(path)
    config = gguf_config(header)
    check_supported(config)
    plan = WeightPlan(header, config, dtype) if dtype else None
    tokenizer = gguf_tokenizer(header)
    room = (plan.nbytes if plan else 0) + (64 << 20)
    with staging_folder(target, room, f"unpacking {path.name}") as staging:
        folder = staging / name
        folder.mkdir()
        config.save_pretrained(folder)
        _save_tokenizer(tokenizer, folder)
        _generation_config(header).save_pretrained(folder)
        if plan:
            plan.write(folder / "model.safetensors")
        seals = {file.name: _seal(file) for file in folder.iterdir()}
        (folder / _SEALS).write_text(json.dumps(seals))
        try:
            folder.rename(target)
        except OSError:
            if not _intact(target):  # else another process was faster
                raise
    return target


def _intact(folder: Path) -> bool:
    """Whether a converted folder holds what was written to it."""
    try:
        seals = json.loads((folder / _SEALS).read_text())
        return all(_seal(folder / name) == seal for name, seal in seals.items())
    except (OSError, ValueError):
        return False


def _seal(file: Path) -> str | int:
    """A checksum; of the weights, which are large, their size."""
    return file.stat().st_size if file.suffix == ".safetensors" else file_sha256(file)


def _save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes the tokenizer's files; OSError if they cannot be written."""
    try:
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # the tokenizers library raises nothing more specific
        raise OSError(reason(error)) from error


def gguf_config(header: GGUFFile) -> PreTrainedConfig:
    """The configuration that the metadata describes; ModelLoadError when transformers has none."""
    family = _FAMILIES.get(header.architecture, header.architecture)
    if family not in GGUF_CONFIG_MAPPING:
        raise ModelLoadError(
            f"{header.path} is of the architecture {header.architecture!r}, which transformers "
            "cannot read from GGUF; use the model's safetensors folder"
        )
    known = GGUF_CONFIG_MAPPING[family]
    names = {key: name for key, name in known.items() if name}
    names |= {key: name for key, name in _FURTHER_KEYS.items() if key not in names}
    stated = {key: header.metadata.get(f"{header.architecture}.{key}") for key in names}
    fields: dict[str, Any] = dict(GGUF_CONFIG_DEFAULTS_MAPPING.get(family, {}))
    fields |= {names[key]: value for key, value in stated.items() if value is not None}
    fields |= {
        name: header.metadata[f"tokenizer.{key}"]
        for key, name in GGUF_CONFIG_MAPPING["tokenizer"].items()
        if f"tokenizer.{key}" in header.metadata
    }
    if _EMBEDDING not in header.tensors:
        raise ModelLoadError(
            f"{header.path} holds no tensor {_EMBEDDING}, so it is no language model"
        )
    fields["tie_word_embeddings"] = "output.weight" not in header.tensors
    with _described_by(header, "model"):
        fields["vocab_size"] = header.tensors[_EMBEDDING].shape[0]
        # A layer has several tensors: a count beyond theirs would only take time to build.
        if fields.get("num_hidden_layers", fields.get("n_layer", 0)) > len(header.tensors):
            raise ValueError("block_count exceeds the number of tensors")
        if family in ("gemma2", "gemma3"):
            # Stated nowhere: as llama.cpp does, tell the 27B models by their depth.
            largest = fields["num_hidden_layers"] in (46, 62)
            width = fields["hidden_size"] // fields["num_attention_heads"]
            fields["query_pre_attn_scalar"] = width if largest else fields["head_dim"]
        if scaling := _rope_scaling(header):
            fields["rope_scaling"] = scaling
        config = AutoConfig.for_model(_MODEL_TYPES.get(family, family), **fields)
        if ROPE_FACTORS in header.tensors:
            _check_rope_factors(header, config)
        rotated = header.metadata.get(f"{header.architecture}.rope.dimension_count")
        if config.model_type in FAMILIES and rotated not in (None, head_dim(config)):
            raise ValueError(
                f"rope.dimension_count is {rotated}, but heads have {head_dim(config)}"
            )
    return config


def gguf_tokenizer(header: GGUFFile) -> PreTrainedTokenizerFast:
    """The tokenizer that the metadata describes, with its special tokens and chat template."""
    description, options = (
        {
            name: header.metadata[f"tokenizer.{key}"]
            for key, name in GGUF_TOKENIZER_MAPPING[group].items()
            if f"tokenizer.{key}" in header.metadata
        }
        for group in ("tokenizer", "tokenizer_config")
    )
    with _described_by(header, "tokenizer"):
        if description["tokenizer_type"] == "llama":  # llama.cpp's default for sentencepiece
            options.setdefault("add_bos_token", True)
        for name in ("bos", "eos", "unk", "pad"):
            if (token := description.get(f"{name}_token_id")) is not None:
                options[f"{name}_token"] = description["tokens"][token]
        backend: Tokenizer = convert_gguf_tokenizer(header.architecture, description)[0]
        if description.get("pre_tokenizer_type") in _SINGLE_DIGITS:
            backend.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False),
                ]
            )
        return PreTrainedTokenizerFast(tokenizer_object=backend, **options)


@contextmanager
def _described_by(header: GGUFFile, what: str) -> Iterator[None]:
    """Metadata is anybody's data: whatever transformers makes of it becomes one line."""
    try:
        yield
    except ModelLoadError:
        raise
    except Exception as error:
        raise ModelLoadError(
            f"the metadata of {header.path} describes no usable {what}: {reason(error)}"
        ) from error


def _generation_config(header: GGUFFile) -> GenerationConfig:
    """The special tokens; every one counts as an end after which such a model has finished."""
    metadata = header.metadata
    with _described_by(header, "tokenizer"):
        ends = [
            metadata[f"tokenizer.ggml.{name}_token_id"]
            for name in ("eos", "eot", "eom")
            if f"tokenizer.ggml.{name}_token_id" in metadata
        ]
        tokens = metadata["tokenizer.ggml.tokens"]
        types = metadata.get("tokenizer.ggml.token_type", [])
        ends += [
            index
            for index, (token, kind) in enumerate(zip(tokens, types, strict=False))
            if kind == _CONTROL and token in _END_MARKS
        ]
        return GenerationConfig(
            bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
            eos_token_id=list(dict.fromkeys(ends)),
            pad_token_id=metadata.get("tokenizer.ggml.padding_token_id"),
        )


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
    with cache_errors(f"looking for {path.name}", home):
        if memo.is_file():
            return memo.read_text()
    digest = file_sha256(path)
    with staging_folder(memo, 0, path.name) as staging:
        (staging / "digest").write_text(digest)
        os.replace(staging / "digest", memo)
    return digest
