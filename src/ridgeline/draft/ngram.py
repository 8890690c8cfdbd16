"""Prompt lookup: what followed the last few tokens when they occurred before is likely to follow.

Source: Saxena, "Prompt Lookup Decoding" (2023), with several occurrences merged into one tree.
Costs no forward pass; pays where the output repeats the prompt or itself (edits, JSON, quotations).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ridgeline.core.tree import DraftProposal
from ridgeline.draft.base import DraftContext, DraftRequest, Needs, Observation, register
from ridgeline.errors import ConfigError

SHORTEST = 2
"""Default of the shortest suffix whose earlier occurrences count."""
LONGEST = 16
"""Default length from which matches count as equally good, so that the latest one wins."""
TRUST = 2
"""Tokens that one token of a match vouches for: short matches are not worth deep drafts."""
OCCURRENCES = 128
"""Latest occurrences that are looked at, so that a lookup costs the same in any context."""


class NGramDrafter:
    """Drafts continuations of earlier occurrences of the sequence's last tokens."""

    name = "ngram"
    needs = Needs()

    def __init__(self, shortest: int = SHORTEST, longest: int = LONGEST) -> None:
        self._shortest = shortest
        self._longest = longest
        self._indexes: dict[int, _Index] = {}

    def bind(self, store: object, first_layer: int) -> None:
        """It has no layers."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftProposal]:
        """One tree a request; empty where the last tokens occur nowhere else."""
        return [self._propose(request) for request in requests]

    def _propose(self, request: DraftRequest) -> DraftProposal:
        sequence = request.sequence
        index = self._indexes.setdefault(sequence.id, _Index(self._shortest))
        index.extend(sequence.tokens)
        matches = index.matches(sequence.tokens, self._longest)
        return _merge(sequence.tokens, matches, request.nodes, request.depth)

    def observe(self, observations: Sequence[Observation]) -> None:
        """Nothing to learn: `propose` reads the tokens."""

    def forget(self, sequence_id: int) -> None:
        """Drops the sequence's index."""
        self._indexes.pop(sequence_id, None)


class _Index:
    """Earlier occurrences of the n-grams of one sequence; one dictionary entry per new token.

    An occurrence is named by its end: the index of the token that follows it. The occurrences of an
    n-gram form a linked list from the latest to the first.
    """

    def __init__(self, n: int) -> None:
        self._n = n
        self._latest: dict[tuple[int, ...], int] = {}
        self._earlier = [0] * n  # per end: the end of the occurrence before it; 0 if there is none

    def extend(self, tokens: Sequence[int]) -> None:
        """Takes in the tokens that it has not seen. A sequence's tokens are only ever appended."""
        for end in range(len(self._earlier), len(tokens) + 1):
            gram = tuple(tokens[end - self._n : end])
            self._earlier.append(self._latest.get(gram, 0))
            self._latest[gram] = end

    def matches(self, tokens: Sequence[int], longest: int) -> list[tuple[int, int]]:
        """The suffix's earlier occurrences, (length, end): longest first, then latest first."""
        found: list[tuple[int, int]] = []
        last = len(tokens)
        end = self._earlier[last]
        while end and len(found) < OCCURRENCES:
            length = self._n
            while (
                length < min(longest, end) and tokens[end - length - 1] == tokens[last - length - 1]
            ):
                length += 1
            found.append((length, end))
            end = self._earlier[end]
        return sorted(found, reverse=True)


def _merge(
    tokens: Sequence[int], matches: Iterable[tuple[int, int]], nodes: int, depth: int
) -> DraftProposal:
    """A trie of what followed each match, first matches first, of at most `nodes` nodes.

    An occurrence that overlaps the suffix is continued by itself, as in LZ77: the last token of a
    run of period d is followed by the one d before, and so on.
    """
    drafted: list[int] = []
    parents: list[int] = []
    children: dict[tuple[int, int], int] = {}
    for length, end in matches:
        period = len(tokens) - end
        node = -1
        for i in range(min(depth, TRUST * length)):
            edge = (node, tokens[end + i % period])
            if edge not in children:
                children[edge] = len(drafted)
                drafted.append(edge[1])
                parents.append(node)
            node = children[edge]
        if len(drafted) >= nodes:
            break
    return DraftProposal(np.array(drafted[:nodes], np.int64), np.array(parents[:nodes], np.int32))


@register("ngram")
def ngram_drafter(argument: str, context: DraftContext) -> NGramDrafter:
    """`ngram` or `ngram:min=2,max=16`, the shortest suffix that counts and the longest compared.

    Raises:
        ConfigError: an unknown name, or not 1 <= min <= max.
    """
    given: dict[str, int] = {}
    for setting in filter(None, argument.split(",")):
        name, _, value = setting.partition("=")
        if name not in ("min", "max") or name in given or not value.isdecimal():
            raise ConfigError(
                f"drafter 'ngram' cannot read {setting!r}; write for example ngram:min=2,max=16"
            )
        given[name] = int(value)
    shortest = given.get("min", SHORTEST)
    longest = given.get("max", max(LONGEST, shortest))
    if not 1 <= shortest <= longest:
        raise ConfigError(
            f"drafter 'ngram' has min={shortest} and max={longest}; right is 1 <= min <= max"
        )
    return NGramDrafter(shortest, longest)
