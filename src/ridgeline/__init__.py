"""Ridgeline: lossless speculative decoding.

A drafter guesses a small tree of next tokens, the target model checks the whole tree in one forward
pass, and what is emitted is what the target alone would have written.

    from ridgeline import LLM, SamplingParams

    llm = LLM("model.gguf", drafter="...")
    print(llm.generate("Once upon a time", SamplingParams(max_tokens=64))[0].text)

The public names below are imported when first used, so that `import ridgeline` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ridgeline.config import EngineConfig
    from ridgeline.core.sampling import SamplingParams, TokenLogprobs
    from ridgeline.core.sequence import Piece, Speculation
    from ridgeline.errors import (
        ConfigError,
        DraftError,
        ModelLoadError,
        OutOfBlocksError,
        RequestError,
        RidgelineError,
        UnsupportedModelError,
    )
    from ridgeline.llm import LLM, Completion, Event, Request, RequestOutput

    __version__: str

__all__ = [
    "LLM",
    "Completion",
    "ConfigError",
    "DraftError",
    "EngineConfig",
    "Event",
    "ModelLoadError",
    "OutOfBlocksError",
    "Piece",
    "Request",
    "RequestError",
    "RequestOutput",
    "RidgelineError",
    "SamplingParams",
    "Speculation",
    "TokenLogprobs",
    "UnsupportedModelError",
    "__version__",
]

_HOMES = {
    "ridgeline.config": ("EngineConfig",),
    "ridgeline.core.sampling": ("SamplingParams", "TokenLogprobs"),
    "ridgeline.core.sequence": ("Piece", "Speculation"),
    "ridgeline.errors": tuple(name for name in __all__ if name.endswith("Error")),
    "ridgeline.llm": ("LLM", "Completion", "Event", "Request", "RequestOutput"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("ridgeline")
    if name not in _HOME:
        raise AttributeError(f"module 'ridgeline' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
