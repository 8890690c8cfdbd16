"""The drafter that a command line means when it names none: n-grams, and a head if there is one."""

from __future__ import annotations

from ridgeline.draft.base import DraftContext, Drafter, create_drafter, register
from ridgeline.draft.heads import head_for
from ridgeline.errors import ConfigError
from ridgeline.model.load import LoadedModel

AUTO = "auto"
WEIGHTLESS = "ngram"
"""Drafts for nothing, and better than any head where a text repeats itself."""


@register(AUTO)
def auto_drafter(argument: str, context: DraftContext) -> Drafter | None:
    """`auto`: n-grams, and where they have nothing to say a known head; takes no argument.

    Raises:
        ConfigError: an argument was given.
        RidgelineError: the head cannot be used.
    """
    if argument:
        raise ConfigError(f"drafter 'auto' takes no argument, but {argument!r} was given")
    head = head_for(context.target)
    return create_drafter(f"{WEIGHTLESS}+{head.spec}" if head else WEIGHTLESS, context)


def chosen(spec: str, target: LoadedModel) -> str:
    """For a person: the drafter of a spec, and why it is this one where `auto` chose it."""
    if spec != AUTO:
        return f"drafter {spec}"
    if head := head_for(target):
        return f"drafter {WEIGHTLESS}+{head.method}, whose head {head.origin}"
    return f"drafter {WEIGHTLESS}, as no draft head is known for {target.name}"
