"""Drafters: one file a method. Importing the package registers those that ship with it."""

from ridgeline.draft import auto, eagle, eagle3, medusa, model, mtp, ngram, none
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

__all__ = [
    "DraftContext",
    "DraftRequest",
    "Drafter",
    "Needs",
    "Observation",
    "auto",
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
