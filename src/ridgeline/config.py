"""Options of the engine, checked once."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.core.tree import MAX_DRAFTED
from ridgeline.core.verify import RULES
from ridgeline.errors import ConfigError
from ridgeline.schedule.choice import check_policy


@dataclass(frozen=True)
class EngineConfig:
    """How the engine runs.

    Raises:
        ConfigError: a value is out of range; the message names it and the allowed values.
    """

    max_batch: int = 32
    """sequences running at once"""
    max_batch_tokens: int = 512
    """tokens of one forward pass, prefill chunks and drafts included"""
    kv_tokens: int | None = None
    """capacity of the cache in tokens; None sizes it from free memory"""
    prefix_sharing: bool = True
    """whether requests reuse cached blocks of an equal prefix"""
    verify: str = "match"
    """the verification rule: match, rejection or block"""
    depth: int = 5
    """longest path of drafted tokens below the root; 0 is plain decoding"""
    nodes: int | None = None
    """drafted nodes per sequence and step; None means as many as `depth`"""
    confidence: float = 0.5
    """a draft ends where the drafter thinks it less likely than this to be accepted; 0: never"""
    policy: str | None = None
    """how drafts are allotted: `fixed` (always `nodes` and `depth`), `table` or
    `table:SEQUENCES=DEPTH,...`, or `goodput`; None means `goodput` under `match`, whose tokens no
    allotment changes, and `fixed` under the other rules, where a seed gives the same text again"""

    def __post_init__(self) -> None:
        at_least = {"max_batch": 1, "max_batch_tokens": 1, "kv_tokens": 1, "depth": 0, "nodes": 0}
        for name, least in at_least.items():
            value = getattr(self, name)
            if value is None and name in ("kv_tokens", "nodes"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name} is {value!r}; it must be an integer, at least {least}")
        confidence = self.confidence
        if not isinstance(confidence, int | float) or not 0 <= confidence < 1:
            raise ConfigError(f"confidence is {confidence!r}; it must be at least 0 and below 1")
        if not isinstance(self.prefix_sharing, bool):
            raise ConfigError(
                f"prefix_sharing is {self.prefix_sharing!r}; it must be true or false"
            )
        if self.max_batch > self.max_batch_tokens:
            raise ConfigError(
                f"max_batch is {self.max_batch}; it must be at most max_batch_tokens, "
                f"{self.max_batch_tokens}, so that every running sequence can decode in every step"
            )
        for name in ("depth", "nodes"):
            value = getattr(self, name)
            if value is not None and value > MAX_DRAFTED:
                raise ConfigError(f"{name} is {value}; at most {MAX_DRAFTED} nodes can be drafted")
        if not isinstance(self.verify, str) or self.verify not in RULES:
            raise ConfigError(f"verify is {self.verify!r}; it must be one of {', '.join(RULES)}")
        if self.policy is not None:
            check_policy(self.policy)

    @property
    def chosen_policy(self) -> str:
        """The policy, the default resolved."""
        if self.policy is None:
            return "goodput" if self.verify == "match" else "fixed"
        return self.policy

    @property
    def draft_nodes(self) -> int:
        """Drafted nodes per sequence and step."""
        return self.depth if self.nodes is None else self.nodes
