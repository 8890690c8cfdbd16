"""Training of draft heads: data, the target's hidden states on disk, losses, the loop."""

METHODS = ("medusa", "eagle", "eagle3", "mtp")
"""Kinds of heads that can be trained."""
