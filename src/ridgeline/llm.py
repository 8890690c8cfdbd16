"""LLM: generate text offline, whole or as a stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

from ridgeline.config import EngineConfig
from ridgeline.core.sampling import SamplingParams, TokenLogprobs
from ridgeline.core.sequence import FinishReason, Piece, Speculation
from ridgeline.core.sequence import Sequence as TokenSequence
from ridgeline.draft import DraftContext, Drafter, create_drafter
from ridgeline.engine import Engine
from ridgeline.errors import ConfigError, RequestError
from ridgeline.model.device import choose_dtype
from ridgeline.model.load import LoadedModel, load_model, quantized_bits
from ridgeline.model.threads import set_threads

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or chat messages with `role` and `content`."""


@dataclass(frozen=True)
class Request:
    """A prompt, encoded and checked, with its parameters."""

    tokens: list[int]
    params: SamplingParams


@dataclass(frozen=True)
class Completion:
    """One finished sample of a request."""

    text: str
    token_ids: list[int]
    finish_reason: str
    """stop, length or abort"""
    logprobs: list[TokenLogprobs] | None
    prompt_tokens: int
    speculation: Speculation
    seconds_to_first_token: float | None
    """from the request's arrival; None if it was aborted before"""
    decode_seconds: float
    """from the first token to the last"""

    @property
    def tokens_per_s(self) -> float | None:
        """Decoding speed: (tokens - 1) / decode_seconds; None below two tokens."""
        if self.decode_seconds <= 0:
            return None
        return (len(self.token_ids) - 1) / self.decode_seconds


@dataclass(frozen=True)
class RequestOutput:
    """Everything that came of one prompt: `params.n` completions."""

    index: int
    prompt_tokens: int
    completions: list[Completion]

    @property
    def text(self) -> str:
        """The first completion's text."""
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first completion's tokens."""
        return self.completions[0].token_ids


@dataclass(frozen=True)
class Event:
    """What one step added to one sample."""

    index: int
    """of the prompt"""
    sample: int
    """of the prompt's n samples"""
    pieces: tuple[Piece, ...]
    completion: Completion | None
    """set on the sample's last event"""
    rest: str = ""
    """text that an interruption found held back, to be shown after the pieces"""

    @property
    def text(self) -> str:
        """What became readable."""
        return "".join(piece.text for piece in self.pieces) + self.rest


class LLM:
    """A model with its drafter and cache.

    Args:
        model: Hugging Face id, folder of safetensors, GGUF file, or a model loaded already.
        drafter: NAME[:ARGUMENT], or a drafter; `ridgeline.draft.drafter_names()` lists the names.
        draft_dtype: as `dtype`, for the drafter's own weights; `auto` is the target's dtype where
            it is not a GGUF file's own.
        draft_quantize: as `quantize`, for the drafter's own weights; `auto` is `int4` where the
            native decoder runs them, which costs acceptance at most, and `none` elsewhere.
        dtype: `auto`, `bfloat16`, `float16` or `float32`; `auto`: a GGUF file's own number format
            where the native decoder runs it, else bf16 on CUDA and on CPUs with bf16
            instructions, else fp32.
        quantize: `int8` or `int4`: round the weights of a model that the native decoder runs.
        device: `auto`, `cpu`, `cuda`, ...
        threads: CPU threads; None leaves them as torch has them.
        options: the fields of `EngineConfig`.

    Raises:
        ConfigError, UnsupportedModelError, ModelLoadError: before anything runs.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel,
        *,
        drafter: str | Drafter = "none",
        draft_dtype: str | torch.dtype = "auto",
        draft_quantize: str | None = "auto",
        dtype: str | torch.dtype = "auto",
        quantize: str | None = None,
        device: str | torch.device = "auto",
        threads: int | None = None,
        **options: Any,
    ) -> None:
        unknown = options.keys() - EngineConfig.__dataclass_fields__.keys()
        if unknown:
            raise ConfigError(
                f"there is no option {min(unknown)!r}; the options are "
                f"{', '.join(EngineConfig.__dataclass_fields__)}"
            )
        if not isinstance(model, str | Path | LoadedModel):
            raise ConfigError(f"model is {model!r}; it must be a hub id, a path or a LoadedModel")
        config = EngineConfig(**options)
        if isinstance(model, LoadedModel) and (dtype, device, quantize) != ("auto", "auto", None):
            raise ConfigError(
                "the model is loaded already; give dtype, device and quantize to load_model"
            )
        if quantize == "auto":
            raise ConfigError("quantize is 'auto'; it must be int8, int4 or none")
        set_threads(threads)
        self.loaded = (
            model
            if isinstance(model, LoadedModel)
            else load_model(str(model), dtype, device, quantize=quantize)
        )
        context = DraftContext(
            target=self.loaded,
            coupled=config.verify == "match",
            sampled_siblings=config.verify == "rejection",
            depth=config.depth,
            nodes=config.draft_nodes,
            max_batch_tokens=config.max_batch_tokens,
            dtype=draft_dtype,
            quantize=draft_quantize,
            confidence=config.confidence,
        )
        choose_dtype(draft_dtype, self.loaded.model.device)
        quantized_bits(draft_quantize)
        # Checked also where nothing may be drafted, so that a wrong name never passes unnoticed.
        built = drafter if isinstance(drafter, Drafter) else create_drafter(drafter, context)
        self.drafter = built if config.draft_nodes and config.depth else None
        self.engine = Engine(self.loaded, self.drafter, config)
        self._interrupted = False
        self._turn = threading.Lock()

    def request(self, prompt: Prompt, params: SamplingParams | None = None) -> Request:
        """Encodes a prompt as transformers does and checks it.

        Raises:
            RequestError: it cannot run; the message says why.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params is {params!r}; it must be a SamplingParams")
        if isinstance(prompt, str):
            tokens = self.loaded.encode_prompt(prompt) if prompt else []
        else:
            items = _items(prompt)
            if items and all(isinstance(item, Mapping) for item in items):
                tokens = self.loaded.encode_chat(items)
            elif all(isinstance(item, Integral) for item in items):
                tokens = [int(item) for item in items]
            else:
                raise _no_prompt(prompt)
        self.engine.check_request(tokens, params)
        return Request(tokens, params)

    def generate(
        self,
        prompts: Prompt | Request | Sequence[Prompt | Request],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generates for one prompt or a list; results in the order of the prompts.

        Every request is checked before any of them runs.

        Raises:
            RequestError: a request cannot run.
        """
        requests = self._requests(prompts, params)
        completions: list[dict[int, Completion]] = [{} for _ in requests]
        for event in self.stream(requests):
            if event.completion:
                completions[event.index][event.sample] = event.completion
        return [
            RequestOutput(i, len(request.tokens), [done[n] for n in sorted(done)])
            for i, (request, done) in enumerate(zip(requests, completions, strict=True))
        ]

    def stream(
        self,
        prompts: Prompt | Request | Sequence[Prompt | Request],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[Event]:
        """Yields what each step adds.

        Closing the iterator early aborts what still runs; `interrupt` does so too, and the stream
        then ends with one event for each unfinished sample, its completion marked "abort".

        Raises:
            RequestError: a request cannot run, or another stream of this LLM is open.
        """
        if not self._turn.acquire(blocking=False):
            raise RequestError(
                "this LLM is generating already; finish or close that stream first, or pass all "
                "prompts at once"
            )
        self._interrupted = False
        running: dict[int, tuple[int, int, TokenSequence]] = {}
        try:
            requests = self._requests(prompts, params)
            for index, request in enumerate(requests):
                for sample, sequence in enumerate(self.engine.add(request.tokens, request.params)):
                    running[sequence.id] = (index, sample, sequence)
            while running and not self._interrupted:
                for progress in self.engine.step():
                    sequence = progress.sequence
                    index, sample, _ = running[sequence.id]
                    completion = None
                    if sequence.finish_reason is not None:
                        completion = _completion(sequence)
                        del running[sequence.id]
                    yield Event(index, sample, tuple(progress.pieces), completion)
            for index, sample, sequence in running.values():
                rest = self.engine.abort(sequence)
                yield Event(index, sample, (), _completion(sequence), rest)
        finally:
            for _, _, sequence in running.values():
                self.engine.abort(sequence)
            self._turn.release()

    def interrupt(self) -> None:
        """Ends the running stream after its present step (safe in a signal handler)."""
        self._interrupted = True

    def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token ids of words to ban, each as it stands and after a space.

        Raises:
            RequestError: a word is empty or no text.
        """
        if isinstance(words, str) or not isinstance(words, Sequence):
            raise RequestError(f"bad_words is {words!r:.80}; it must be a list of texts")
        for word in words:
            if not isinstance(word, str):
                raise RequestError(f"bad_words holds {word!r:.80}; each word must be a text")
        if not all(words):
            raise RequestError("bad_words holds an empty text; each needs one character at least")
        encoded = (
            tuple(self.loaded.encode_text(prefix + word)) for word in words for prefix in ("", " ")
        )
        return tuple(dict.fromkeys(ids for ids in encoded if ids))

    def _requests(
        self,
        prompts: Prompt | Request | Sequence[Prompt | Request],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Request]:
        many = [prompts] if isinstance(prompts, str | Request) else _items(prompts)
        if many and isinstance(many[0], Integral | Mapping):
            many = [many]
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(many)
        if isinstance(params, str) or not isinstance(params, Sequence):
            raise RequestError(
                f"params is {params!r}; it must be a SamplingParams or a list of them"
            )
        if len(params) != len(many):
            raise RequestError(f"{len(many)} prompts but {len(params)} sets of parameters")
        return [
            prompt if isinstance(prompt, Request) else self.request(prompt, p)
            for prompt, p in zip(many, params, strict=True)
        ]


def _items(value: object) -> list[Any]:
    """The items of a sequence, array or tensor; RequestError for what is none."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        raise _no_prompt(value)
    return list(value)


def _no_prompt(value: object) -> RequestError:
    return RequestError(
        f"{value!r:.80} is no prompt; give text, token ids, chat messages, or a list of these"
    )


def _completion(sequence: TokenSequence) -> Completion:
    reason = sequence.finish_reason or FinishReason.ABORT
    started, ended = sequence.first_token, sequence.last_token
    return Completion(
        text=sequence.text.text if sequence.text else "",
        token_ids=sequence.output,
        finish_reason=reason.value,
        logprobs=sequence.logprobs if sequence.params.logprobs is not None else None,
        prompt_tokens=sequence.prompt_len,
        speculation=sequence.speculation,
        seconds_to_first_token=started - sequence.arrived if started is not None else None,
        decode_seconds=ended - started if started is not None and ended is not None else 0.0,
    )
