"""Every error that Ridgeline raises for a reason a person can act on.

RidgelineError
├── ConfigError              an option or a combination of options cannot work
├── UnsupportedModelError    the model has a part that cannot run or roll back here
├── ModelLoadError           the model's files are missing, damaged or unreadable
├── OutOfBlocksError         the cache pool is exhausted (the scheduler preempts)
├── DraftError               a drafter proposed something malformed
└── RequestError             one request is wrong; the others go on

Each message is one line that names what was wrong and what would be right.
"""

from __future__ import annotations

_LONGEST_REASON = 300


class RidgelineError(Exception):
    """Root of the tree."""


class ConfigError(RidgelineError):
    """An option, or a combination of options, cannot work."""


class UnsupportedModelError(RidgelineError):
    """The model has a layer that cannot run or roll back here; the message names it."""


class ModelLoadError(RidgelineError):
    """A model's files are missing, damaged or unreadable."""


class OutOfBlocksError(RidgelineError):
    """The block pool has too few free blocks; nothing was allocated."""


class DraftError(RidgelineError):
    """A drafter's proposal is malformed; the message names the drafter."""


class RequestError(RidgelineError):
    """One request is wrong; the message names the field and the allowed values."""


def reason(error: BaseException) -> str:
    """What another library's exception says, in one line of at most 300 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 1] + "…"
