"""Drafters: one file a method. Importing the package registers those that ship with it."""

from ridgeline.draft import model, ngram, none
from ridgeline.draft.base import (
    DraftContext,
    Drafter,
    DraftRequest,
    Needs,
    Observation,
    create_drafter,
    drafter_names,
    register,
)

WEIGHTLESS = "ngram"
"""A drafter that needs no weights of its own: the one to try first."""

__all__ = [
    "WEIGHTLESS",
    "DraftContext",
    "DraftRequest",
    "Drafter",
    "Needs",
    "Observation",
    "create_drafter",
    "drafter_names",
    "model",
    "ngram",
    "none",
    "register",
]
