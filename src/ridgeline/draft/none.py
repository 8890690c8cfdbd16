"""No drafting: plain decoding."""

from __future__ import annotations

from ridgeline.draft.base import DraftContext, register
from ridgeline.errors import ConfigError


@register("none")
def no_drafter(argument: str, context: DraftContext) -> None:
    """Plain decoding; takes no argument.

    Raises:
        ConfigError: an argument was given.
    """
    if argument:
        raise ConfigError(f"drafter 'none' takes no argument, but {argument!r} was given")
