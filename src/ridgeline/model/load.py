"""Loading a model: a Hugging Face id, a transformers folder, or a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from ridgeline.attention.interface import ATTENTION
from ridgeline.errors import (
    ConfigError,
    ModelLoadError,
    RequestError,
    RidgelineError,
    reason,
)
from ridgeline.model import hub
from ridgeline.model.device import choose_device, choose_dtype
from ridgeline.model.files import (
    check_generation_config,
    check_layers,
    check_weights,
    end_tokens,
    local_folder,
    stored_tensors,
)
from ridgeline.model.gguf_convert import gguf_folder
from ridgeline.model.gguf_file import read_gguf
from ridgeline.model.linear import native_kernels, pack_linears, set_native_threads
from ridgeline.model.native import ModuleSource, NativeModel, obstacle, rounding_obstacle
from ridgeline.model.native_gguf import GGUFSource, packs
from ridgeline.model.support import check_supported, context_length
from ridgeline.model.target import Model
from ridgeline.model.torch_target import TorchModel

_CACHE_ONLY = (torch.float16, "cpu")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, and what belongs to it."""

    name: str
    """for messages and reports"""
    model: Model
    tokenizer: PreTrainedTokenizerBase | None
    end_tokens: frozenset[int]
    """tokens that end a text"""
    context_len: int
    """most tokens of one sequence, prompt included"""
    vocab_size: int
    """width of the logits, padding included"""
    source: str | None = None
    """the hub id, folder or GGUF file that it was loaded from"""

    @property
    def chats(self) -> bool:
        """Whether it has a chat template."""
        return self.tokenizer is not None and bool(self.tokenizer.chat_template)

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the special tokens (BOS) that the tokenizer adds."""
        return self._encode(text, add_special_tokens=True)

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a piece of text; no special token is added."""
        return self._encode(text, add_special_tokens=False)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation through the model's chat template, ready for the answer.

        Raises:
            RequestError: the model has no template, or its template refuses the messages.
        """
        tokenizer = self._tokenizer()
        if not self.chats:
            raise RequestError(f"{self.name} has no chat template; give it a plain prompt")
        for message in messages:
            if not isinstance(message.get("role"), str):
                raise RequestError(f"the chat message {dict(message)!r:.80} has no role")
            for value in message.values():
                _unicode(str(value))
        try:
            tokens: list[int] = tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=True,
                return_dict=False,
            )
        except Exception as error:  # a template is a program of the model's authors
            raise RequestError(
                f"the chat template of {self.name} refuses these messages: {reason(error)}"
            ) from error
        return tokens

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        tokenizer = self._tokenizer()
        try:
            return list(tokenizer.encode(_unicode(text), add_special_tokens=add_special_tokens))
        except RidgelineError:
            raise
        except Exception as error:  # whatever a damaged tokenizer file leads to
            raise RequestError(f"the tokenizer of {self.name} fails: {reason(error)}") from error

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise RequestError(f"{self.name} has no tokenizer; give prompts as token ids")
        return self.tokenizer


def load_model(
    path: str,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    *,
    quantize: str | None = None,
    default_dtype: torch.dtype | None = None,
) -> LoadedModel:
    """Load a model for Ridgeline's engine.

    `path` is a Hugging Face id, a local folder as `save_pretrained` writes it (sharded or not), or
    a GGUF file. Models of the Llama family run on the native decoder where it is built, all others
    on transformers' layers. `dtype` "auto" runs a GGUF file with the weights as they are where the
    native decoder can; otherwise it is `default_dtype`, or else bf16 on CUDA and on CPUs with bf16
    instructions and fp32 elsewhere. `quantize`, "int8" or "int4", rounds the native decoder's
    weights in groups of 32 where they have more bits; "auto" is int4 for models that it runs and
    "none" for others, right for draft models, which never change a text. Each model gets a
    configuration of its own, so that several can live in one process. Mixtures compute their
    experts eagerly: other ways let the batch change the order of sums.

    Raises:
        ConfigError: the dtype, the device or the quantisation is unknown or not there.
        ModelLoadError: files are missing, damaged or unreadable.
        UnsupportedModelError: the model has a part that cannot run here.
    """
    chosen_device = choose_device(device)
    bits = quantized_bits(quantize)
    # fp16 is how a quantised model keeps its cache; nothing computes in it on a CPU.
    if default_dtype and (default_dtype, chosen_device.type) != _CACHE_ONLY:
        default = default_dtype
    else:
        default = choose_dtype("auto", chosen_device)
    chosen_dtype = default if dtype == "auto" else choose_dtype(dtype, chosen_device)
    set_native_threads(torch.get_num_threads())  # several pack faster than one
    with quiet(), one_line_errors(path):
        as_it_is = _load_quantised(path, chosen_device, bits) if dtype == "auto" else None
        return as_it_is or _load_dense(path, chosen_dtype, chosen_device, bits, quantize == "auto")


def _load_dense(
    path: str, dtype: torch.dtype, device: torch.device, bits: int | None, where_possible: bool
) -> LoadedModel:
    """A model with its weights in `dtype`, or rounded to `bits`, if need be only where possible."""
    local = local_folder(path, dtype)
    folder = local or hub.download(path, hub.DESCRIPTION)
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str(local or path),
        "local_files_only": True,
        "trust_remote_code": False,  # else transformers asks on the terminal, and runs it on "y"
    }
    stored = stored_tensors(folder) if local else {}
    check_layers(folder, stored)
    check_generation_config(folder)
    config = AutoConfig.from_pretrained(**source)
    numbers = check_supported(config)
    if local is None:
        stored = stored_tensors(hub.download(path, hub.WEIGHTS))
    check_weights(path, numbers, stored)
    module, report = AutoModelForCausalLM.from_pretrained(
        **source,
        config=config,
        dtype=dtype,
        attn_implementation=ATTENTION,
        experts_implementation="eager",
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # refused below, by name
        output_loading_info=True,
    )
    tokenizer = None
    if local is None or any((local / name).is_file() for name in _TOKENIZER_FILES):
        tokenizer = AutoTokenizer.from_pretrained(**source)
    _check_complete(path, report)
    module.eval().requires_grad_(False).to(device)
    hindrance = obstacle(config, device, dtype)
    if bits and (unfit := hindrance or rounding_obstacle(config)):
        if not where_possible:
            raise ConfigError(f"{path} cannot be quantised here: {unfit}")
        bits = None
    model: Model
    if hindrance is None:
        model = NativeModel(module.config, ModuleSource(module, bits), dtype)
    else:
        pack_linears(module)
        model = TorchModel(module)
    return LoadedModel(
        name=_model_name(path) if local else path,
        model=model,
        tokenizer=tokenizer,
        end_tokens=end_tokens(module.generation_config, module.config),
        context_len=context_length(module.config),
        vocab_size=module.config.vocab_size,
        source=path,
    )


def _load_quantised(path: str, device: torch.device, bits: int | None) -> LoadedModel | None:
    """A GGUF file with its weights as they are; None if the native decoder cannot run it so."""
    file = Path(path).expanduser()
    if not (file.is_file() and file.suffix == ".gguf") or native_kernels() is None:
        return None
    header = read_gguf(file)
    folder = str(gguf_folder(file, None))
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if obstacle(config, device) or not packs(header):
        return None
    return LoadedModel(
        name=file.stem,
        model=NativeModel(config, GGUFSource(header, config, bits), torch.float16),
        tokenizer=AutoTokenizer.from_pretrained(folder, local_files_only=True),
        end_tokens=end_tokens(GenerationConfig.from_pretrained(folder), config),
        context_len=context_length(config),
        vocab_size=config.vocab_size,
        source=path,
    )


def _model_name(path: str) -> str:
    """That of a folder or of a GGUF file; a name may hold dots ("Qwen2.5-1.5B")."""
    return Path(path).expanduser().resolve().name.removesuffix(".gguf")


def _check_complete(path: str, report: Mapping[str, Any]) -> None:
    """Refuse weights that transformers would fill with noise."""
    if missing := sorted(report["missing_keys"]):
        raise ModelLoadError(
            f"{path} lacks {len(missing)} of the model's weights, such as {missing[0]}: "
            "its download or conversion is incomplete"
        )
    if mismatched := sorted(report["mismatched_keys"]):
        name, stored, expected = mismatched[0]
        raise ModelLoadError(
            f"{path} holds {name} of shape {list(stored)}, where config.json makes it "
            f"{list(expected)}: they belong to different models"
        )


def _unicode(text: str) -> str:
    """The text; RequestError where it holds bytes that were not UTF-8, or halves of characters."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text is not valid Unicode at its character {error.start + 1}; give UTF-8"
        ) from None
    return text


def quantized_bits(quantize: str | None) -> int | None:
    """Bits of a weight; None: as they are. ConfigError for another name."""
    bits = {None: None, "none": None, "auto": 4, "int4": 4, "int8": 8}
    if not isinstance(quantize, str | None) or quantize not in bits:
        raise ConfigError(f"quantize is {quantize!r}; it must be int8, int4 or none")
    return bits[quantize]


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars and reports: what matters here is raised."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def one_line_errors(path: str) -> Iterator[None]:
    """Turn whatever Python and other libraries raise about a model's files into one line."""
    try:
        yield
    except RidgelineError:
        raise
    except Exception as error:
        raise ModelLoadError(f"{path:.200} cannot be loaded: {reason(error)}") from error
