"""Drafters: one file a method. Importing the package registers those that ship with it."""

from ridgeline.draft import eagle, eagle3, medusa, model, mtp, ngram, none
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
    "eagle",
    "eagle3",
    "medusa",
    "model",
    "mtp",
    "ngram",
    "none",
    "register",
]
