"""The drafter that a command line means when it names none: a head for the model, else n-grams."""

from __future__ import annotations

from ridgeline.draft.base import DraftContext, Drafter, create_drafter, register
from ridgeline.draft.heads import head_for
from ridgeline.errors import ConfigError
from ridgeline.model.load import LoadedModel

AUTO = "auto"
WEIGHTLESS = "ngram"
"""Where no head is known: a drafter that needs no weights of its own."""


@register(AUTO)
def auto_drafter(argument: str, context: DraftContext) -> Drafter | None:
    """`auto`, a known head for the model, else n-grams; takes no argument.

    Raises:
        ConfigError: an argument was given.
        RidgelineError: the head cannot be used.
    """
    if argument:
        raise ConfigError(f"drafter 'auto' takes no argument, but {argument!r} was given")
    head = head_for(context.target)
    return create_drafter(head.spec if head else WEIGHTLESS, context)


def chosen(spec: str, target: LoadedModel) -> str:
    """For a person: the drafter of a spec, and why it is this one where `auto` chose it."""
    if spec != AUTO:
        return f"drafter {spec}"
    if head := head_for(target):
        return f"drafter {head.method}, which {head.origin}"
    return f"drafter {WEIGHTLESS}, as no draft head is known for {target.name}"
