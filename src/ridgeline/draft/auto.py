"""The drafter that a command line means when it names none: n-grams, and a head if there is one."""

from __future__ import annotations

import logging

from ridgeline.draft.base import DraftContext, Drafter, create_drafter, register
from ridgeline.draft.heads import head_for
from ridgeline.errors import ConfigError, RidgelineError
from ridgeline.model.load import LoadedModel, quantized_bits

AUTO = "auto"
WEIGHTLESS = "ngram"
"""Drafts for nothing, and better than any head where a text repeats itself."""


@register(AUTO)
def auto_drafter(argument: str, context: DraftContext) -> Drafter | None:
    """`auto`: n-grams, and where they have nothing to say a known head; takes no argument.

    A head is known by its model's name alone. One that does not fit, or is damaged, is left out, as
    nobody asked for it, and a warning is logged.

    Raises:
        ConfigError: an argument was given, or `context.quantize` is no such format.
    """
    if argument:
        raise ConfigError(f"drafter 'auto' takes no argument, but {argument!r} was given")
    quantized_bits(context.quantize)  # that is no fault of the head
    if (head := head_for(context.target)) is None:
        return create_drafter(WEIGHTLESS, context)
    try:
        return create_drafter(f"{WEIGHTLESS}+{head.spec}", context)
    except RidgelineError as error:
        logging.getLogger(__name__).warning(
            "note: the known %s head cannot be used: %s", head.method, error
        )
        return create_drafter(WEIGHTLESS, context)


def chosen(spec: str, target: LoadedModel, drafter: Drafter | None) -> str:
    """For a person: the drafter that a spec led to, and why this one where `auto` chose it."""
    if spec != AUTO or drafter is None:
        return f"drafter {spec}"
    if (head := head_for(target)) is None:
        return f"drafter {WEIGHTLESS}, as no draft head is known for {target.name}"
    if drafter.name == WEIGHTLESS:
        return f"drafter {WEIGHTLESS}, as the known {head.method} head cannot be used"
    return f"drafter {drafter.name}, whose head {head.origin}"
