"""Paged tree attention: the truth in plain torch, and its hook into transformers."""
