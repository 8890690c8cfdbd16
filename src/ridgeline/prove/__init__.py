"""Proof on a user's own models that speculation changes nothing."""
