"""The drafter that a command line means when it names none: n-grams, and a head if there is one."""

from __future__ import annotations

from pathlib import Path

from ridgeline.draft.base import DraftContext, Drafter, create_drafter, register
from ridgeline.draft.heads import head_for
from ridgeline.errors import ConfigError, RidgelineError
from ridgeline.model.load import LoadedModel, quantized_bits

AUTO = "auto"
WEIGHTLESS = "ngram"
"""Drafts for nothing, and better than any head where a text repeats itself."""
_REFUSED: dict[tuple[str, Path], str] = {}
"""Known heads that `auto` could not use, by model and folder, and why: `chosen` reads it."""


@register(AUTO)
def auto_drafter(argument: str, context: DraftContext) -> Drafter | None:
    """`auto`: n-grams, and where they have nothing to say a known head; takes no argument.

    A head is known by its model's name alone. One that does not fit, or is damaged, is left out:
    nobody asked for it. `chosen` says so.

    Raises:
        ConfigError: an argument was given, or `context.quantize` is no such format.
    """
    if argument:
        raise ConfigError(f"drafter 'auto' takes no argument, but {argument!r} was given")
    quantized_bits(context.quantize)  # that is no fault of the head
    if (head := head_for(context.target)) is None:
        return create_drafter(WEIGHTLESS, context)
    known = (context.target.name, head.path)
    _REFUSED.pop(known, None)
    try:
        return create_drafter(f"{WEIGHTLESS}+{head.spec}", context)
    except RidgelineError as error:
        _REFUSED[known] = str(error)
        return create_drafter(WEIGHTLESS, context)


def chosen(spec: str, target: LoadedModel) -> str:
    """For a person: the drafter of a spec, and why it is this one where `auto` chose it."""
    if spec != AUTO:
        return f"drafter {spec}"
    if head := head_for(target):
        if refusal := _REFUSED.get((target.name, head.path)):
            return (
                f"drafter {WEIGHTLESS}, as the known {head.method} head cannot be used: {refusal}"
            )
        return f"drafter {WEIGHTLESS}+{head.method}, whose head {head.origin}"
    return f"drafter {WEIGHTLESS}, as no draft head is known for {target.name}"
