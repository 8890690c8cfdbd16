"""Drafts where they raise the tokens per second of the whole batch, and nowhere else.

Source: SmartSpec (Liu et al., arXiv 2406.14066): of all ways to speculate, none included, take the
one with the most expected tokens over expected time. docs/policy.md says how they are estimated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from ridgeline.core.sequence import Sequence as TokenSequence
from ridgeline.schedule.acceptance import Acceptance
from ridgeline.schedule.allocation import Floats, Ints, Prospect
from ridgeline.schedule.cost import Cost, DraftCost, LearnedCost, Pace
from ridgeline.schedule.policy import NOTHING, Budget, Outcome, Step, nodes_for

SAMPLES = 2
"""Steps of a size that must have been measured before others are compared with it, and steps with
all drafts that may be made for the sake of being measured, once for a power of two of sequences."""
PROBE_SHARE = 0.005
"""Share of the time that may go into drafts that are not expected to pay."""
SAVED_STEPS = 100
"""Steps whose share may be saved up for one probe."""
FIRST_REVIEW, REVIEW = 4, 8
"""Steps for which a plan with drafts stands while the same sequences run: twice as many each time
that the next one confirms it, as estimates that are young move fast."""
IDLE_REVIEW = 16
"""Likewise the most for a plan without drafts, of which little is learnt."""
HORIZON = 32
"""Steps over which the cost of catching up after a pause is spread."""


class GoodputPolicy:
    """Allots each step the drafts of the highest expected rate, and a probe now and then."""

    def __init__(self, nodes: int, depth: int, guess: Cost, *, draft_layers: bool) -> None:
        """At most `nodes` and `depth` a sequence; a shallower tree has fewer nodes in proportion.

        Args:
            nodes: of one sequence, 1 or more.
            depth: likewise.
            guess: the shape of the cost of a step; its scale is learnt.
            draft_layers: whether the drafter keeps keys and values, which lag behind in a pause.
        """
        depth = min(nodes, depth)
        self._most = Budget(nodes, depth)
        self._budgets = [Budget(nodes_for(nodes, depth, d), d) for d in range(depth + 1)]
        self._least = self._budgets[1].nodes
        self._sizes = np.array([budget.nodes for budget in self._budgets])
        self._acceptance = Acceptance(np.diff(self._sizes).tolist())
        self._cost = LearnedCost(guess)
        self._draft_cost = DraftCost()
        self._pace = Pace()
        self._draft_layers = draft_layers
        self._now = 0
        self._explorations: Counter[int] = Counter()  # by the bits of sequences
        self._asked: dict[int, int] = {}  # sequence: the step in which it was last drafted for
        self._saved = 0.0  # seconds for probes, at pace 1 like all that are kept here
        self._lag = 0  # tokens that the drafts of this step must catch up with
        self._situation: tuple[list[int], int, int] = ([], 0, 0)  # that was planned for ...
        self._depths: list[int] = []  # ... what the plan says, probes aside ...
        self._stands = FIRST_REVIEW  # ... for how many steps ...
        self._review = 0  # ... and the step from which on another is made

    def budget(
        self, sequences: Sequence[TokenSequence], trunks: int, tokens_left: int
    ) -> list[Budget]:
        """See `Policy.budget`."""
        n, self._lag = len(sequences), 0
        if tokens_left < self._least or not n or self._cost.count(n, n, self._now) < SAMPLES:
            return [NOTHING] * n
        situation = ([sequence.id for sequence in sequences], trunks, tokens_left)
        if situation != self._situation or self._now >= self._review:
            before = self._depths if situation == self._situation else None
            self._depths, depths = self._plan(sequences, trunks, tokens_left)
            longest = REVIEW if any(self._depths) else IDLE_REVIEW
            same = self._depths == before
            self._stands = min(2 * self._stands, longest) if same else FIRST_REVIEW
            self._situation, self._review = situation, self._now + self._stands
        else:
            depths = self._depths
        if self._draft_layers:
            self._lag = sum(self._lag_of(s) for s, d in zip(sequences, depths, strict=True) if d)
        return [self._budgets[depth] for depth in depths]

    def observe(self, step: Step) -> None:
        """See `Policy.observe`."""
        self._now += 1
        n, seconds = len(step.outcomes), step.seconds - step.draft_seconds
        context = sum(outcome.start for outcome in step.outcomes) // max(n, 1)
        if step.decodes and self._cost.count(step.rows, n, self._now) >= SAMPLES:
            self._pace.follow(seconds, self._cost.usual(step.rows, n, context))
        pace = self._pace.value
        drafted = [outcome for outcome in step.outcomes if outcome.depth]
        if drafted:
            for outcome in drafted:
                self._learn_acceptance(outcome)
            depths = [outcome.depth for outcome in drafted]
            draft_seconds = step.draft_seconds / pace
            self._draft_cost.add(max(depths), sum(depths), self._lag, draft_seconds, self._now)
        if step.decodes:
            self._cost.add(step.rows, n, context, seconds / pace, self._now)
            share = PROBE_SHARE * step.seconds / pace
            self._saved = min(self._saved + share, SAVED_STEPS * share)

    def forget(self, sequence_id: int) -> None:
        """See `Policy.forget`."""
        self._acceptance.forget(sequence_id)
        self._asked.pop(sequence_id, None)

    def _plan(
        self, sequences: Sequence[TokenSequence], trunks: int, tokens_left: int
    ) -> tuple[list[int], list[int]]:
        """Depths for each sequence, and the same with this step's probes."""
        lags = np.array([self._lag_of(sequence) for sequence in sequences])
        prospect = self._prospect(sequences, lags, trunks, tokens_left)
        depths = prospect.best(tokens_left)
        ids = [sequence.id for sequence in sequences]
        tried = self._explored(ids, prospect, depths, lags, tokens_left)
        if tried is None:
            tried = self._probed(ids, prospect, depths, lags, tokens_left)
        return depths.tolist(), tried.tolist()

    def _lag_of(self, sequence: TokenSequence) -> int:
        """Tokens that the drafter's layers lack, beside what a step with drafts may leave out."""
        if not self._draft_layers:
            return 0
        return max(0, len(sequence.tokens) - sequence.draft_len - len(self._sizes))

    def _prospect(
        self, sequences: Sequence[TokenSequence], lags: Ints, trunks: int, tokens_left: int
    ) -> Prospect:
        n = len(sequences)
        survival = self._acceptance.survival([sequence.id for sequence in sequences])
        context = sum(sequence.kv_len for sequence in sequences) // n
        most = min(tokens_left, n * int(self._sizes[-1]))
        rows, seconds = self._cost.between(trunks, trunks + most, n, context, self._now)
        catch_up = np.zeros(n)
        if lags.any():
            left = np.array([sequence.limit - len(sequence.tokens) for sequence in sequences])
            catch_up = lags * self._draft_cost.catching_up(self._now) / np.clip(left, 1, HORIZON)
        return Prospect(
            survival.gain,
            survival.nodes,
            self._sizes,
            catch_up,
            rows - trunks,
            seconds,
            self._draft_cost,
            self._now,
        )

    def _explored(
        self, ids: Sequence[int], prospect: Prospect, depths: Ints, lags: Ints, most: int
    ) -> Ints | None:
        """The plan with full depth for some, to learn of drafts while little is known of them.

        They have about as many nodes as there are sequences, so that the step takes twice its time
        at most. What that costs is the time less the worth of the tokens that it is expected to
        bring. The first one may cost more than was saved, and probes wait until it is paid back.
        None: not now.
        """
        n, (nodes, depth) = len(ids), self._most
        if self._explorations[n.bit_length()] == SAMPLES:
            return None
        some = self._waited(ids)[: max(1, n // nodes)]
        tried = depths.copy()
        tried[some] = depth
        if self._sizes[tried].sum() > most:
            return None
        price = float(prospect.times(tried)[0])
        price += lags[some].sum() * self._draft_cost.catching_up(self._now)
        tokens, more = (n + _gained(prospect.gain, d) for d in (depths, tried))
        price -= more / tokens * float(prospect.times(depths)[0])
        if price > self._saved and self._explorations:
            return None
        self._saved -= max(price, 0.0)
        self._explorations[n.bit_length()] += 1
        return tried

    def _probed(
        self, ids: Sequence[int], prospect: Prospect, depths: Ints, lags: Ints, most: int
    ) -> Ints:
        """The plan with one level for sequences that it has no drafts for, as far as savings go.

        Of those that can be paid for, those that waited longest. What a probe costs is its time
        less the worth of the tokens that it is expected to bring.
        """
        probed = depths.copy()
        waited = self._waited(ids)
        without = waited[depths[waited] == 0]
        left = most - int(self._sizes[depths].sum())
        room = min(len(without), left // int(self._sizes[1]))
        if not room:
            return probed
        times = prospect.times(depths, room)
        tokens = len(ids) + _gained(prospect.gain, depths)
        due = lags[without] * self._draft_cost.catching_up(self._now)
        due -= prospect.gain[without, 0] * times[0] / tokens
        further = np.diff(times)
        payable = np.flatnonzero(due + further[0] <= self._saved)[: len(further)]
        prices = np.cumsum(np.maximum(further[: len(payable)] + due[payable], 0.0))
        paid = int(np.searchsorted(prices, self._saved, side="right"))
        probed[without[payable[:paid]]] = 1
        if paid:
            self._saved -= float(prices[paid - 1])
        return probed

    def _waited(self, ids: Sequence[int]) -> Ints:
        """Positions of the sequences, those first that were not drafted for the longest."""
        asked = [self._asked.get(sequence_id, -1) for sequence_id in ids]
        return np.argsort(asked, kind="stable")

    def _learn_acceptance(self, outcome: Outcome) -> None:
        tree, path = outcome.tree, outcome.check.path
        passed = len(path) - 1
        reached = passed + bool(tree.children(int(path[-1])))
        nodes = np.bincount(tree.depth[tree.trunk :] - tree.root)[1:].tolist()
        self._acceptance.add(outcome.sequence.id, outcome.depth, reached, passed, nodes)
        self._asked[outcome.sequence.id] = self._now


def _gained(gain: Floats, depths: Ints) -> float:
    """Tokens that drafts of these depths are expected to add."""
    return float(gain[np.arange(gain.shape[1]) < depths[:, None]].sum())
