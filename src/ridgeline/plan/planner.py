"""What to expect of each drafter at each depth and batch size, and what is best."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ridgeline.plan.acceptance import Acceptance, Range
from ridgeline.plan.drafters import Planned
from ridgeline.plan.shape import ModelShape
from ridgeline.schedule.cost import Cost

CostOf = Callable[[ModelShape], Cost]


@dataclass(frozen=True)
class Choice:
    """One drafter at one depth and batch size, beside plain decoding."""

    drafter: str
    depth: int
    batch: int
    rows: int
    """of the pass that checks the drafts"""
    draft_seconds: float
    verify_seconds: float
    tokens: tuple[float, float]
    """expected tokens a step of each sequence: lowest and highest"""
    speed_up: tuple[float, float]

    @property
    def middle(self) -> float:
        """Of the speed-up, by which choices are compared."""
        return sum(self.speed_up) / 2

    @property
    def pays(self) -> bool:
        """Whether a gain is expected."""
        return self.depth > 0 and self.middle > 1


@dataclass(frozen=True)
class Contender:
    """A drafter and what is accepted of it."""

    planned: Planned
    acceptance: Range


class Planner:
    """Speed-ups of a target on some hardware.

    Speed-up = E T(B, B, S) / (drafting + T(B (1 + nodes), B, S)): tokens a step over how many plain
    passes it takes. At depth 0 it is 1.

    Source: Leviathan et al. (arXiv 2211.17192), theorem 3.8, with the time of the checking pass as
    it is instead of that of a plain one; goodput: Liu et al. (arXiv 2406.14066).
    """

    def __init__(self, target: Cost, cost_of: CostOf, context: int) -> None:
        """`cost_of` gives the cost of a drafter's own passes."""
        self._target = target
        self._cost_of = cost_of
        self.context = context
        self._costs: dict[ModelShape, Cost] = {}

    def plain(self, batch: int) -> float:
        """Seconds of a step of plain decoding."""
        return self.forward(1, batch)

    def forward(self, each: int, batch: int) -> float:
        """Seconds of a pass over `each` tokens of `batch` sequences."""
        return self._target.seconds(each * batch, batch, self.context)

    def choice(self, contender: Contender, depth: int, batch: int) -> Choice:
        """What to expect."""
        low, high = contender.acceptance.low, contender.acceptance.high
        # The share of steps that draft at all is that of level 1; a tree has more nodes there.
        drafted = (low.drafted(depth) + high.drafted(depth)) / 2
        share = min((low.drafted(1) + high.drafted(1)) / 2, 1)
        drafting = self._drafting(contender, depth, batch, drafted)
        verify = self._verifying(drafted / share if share else 0, batch, batch * share)
        plain = self.plain(batch)

        def gain(acceptance: Acceptance) -> float:
            return acceptance.tokens(depth) * plain / (drafting + verify)

        return Choice(
            drafter=contender.planned.spec,
            depth=depth,
            batch=batch,
            rows=round(batch * (1 + drafted)),
            draft_seconds=drafting,
            verify_seconds=verify,
            tokens=(low.tokens(depth), high.tokens(depth)),
            speed_up=(gain(low), gain(high)),
        )

    def choices(self, contender: Contender, batch: int, depth: int) -> list[Choice]:
        """Every depth from 0 to `depth`."""
        return [self.choice(contender, each, batch) for each in range(depth + 1)]

    def _verifying(self, drafted: float, batch: int, drafting: float) -> float:
        """Seconds of a pass where `drafting` of `batch` sequences have so many drafts, on average.

        Where only some steps of a sequence have any, that is a mean of two passes and no pass
        over a mean number of rows.
        """
        few = int(drafting)
        less, more = (
            self._target.seconds(batch + round(count * drafted), batch, self.context)
            for count in (few, few + 1)
        )
        return less + (drafting - few) * (more - less)

    def _drafting(self, contender: Contender, depth: int, batch: int, drafted: float) -> float:
        """Seconds of drafting `drafted` tokens in `depth` levels for `batch` sequences together.

        After the first, a level takes a pass where any of them got to the one above.
        """
        planned, acceptance = contender.planned, contender.acceptance
        shape = planned.shape_at(depth)
        if shape is None or depth == 0:
            return 0.0
        if shape not in self._costs:
            self._costs[shape] = self._cost_of(shape)
        cost = self._costs[shape]
        level = round(batch * max(drafted / depth, 1))
        first, further = (cost.seconds(rows, batch, self.context) for rows in (batch, level))
        going = 0.0
        for above in range(1, planned.passes(depth)):
            nodes = (acceptance.low.at(above) + acceptance.high.at(above)) / 2
            going += 1 - (1 - min(nodes, 1)) ** batch
        return first + going * further


def best_of(choices: Iterable[Choice]) -> Choice:
    """The one with the highest speed-up, in the middle of its range; of equal ones the shallowest.

    So drafting nothing is never worse than drafting in vain.
    """
    return max(choices, key=lambda choice: (choice.middle, -choice.depth))


def stops_paying(best: Sequence[Choice]) -> int | None:
    """The smallest batch from which on the best choice is not to draft; None: it always pays.

    Args:
        best: the best choice for each batch size.
    """
    stop = None
    for choice in sorted(best, key=lambda choice: choice.batch, reverse=True):
        if choice.pays:
            break
        stop = choice.batch
    return stop


@dataclass(frozen=True)
class Memory:
    """Bytes that a batch takes."""

    weights: float
    drafter: float
    cache: float
    """of all its sequences, the drafter's layers included"""
    logits: float
    """fp32, of every row of a checking pass"""
    available: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.drafter + self.cache + self.logits

    @property
    def fits(self) -> bool:
        """Whether there is so much."""
        return self.total <= self.available


def memory(
    target: ModelShape, drafter: ModelShape | None, choice: Choice, context: int, available: float
) -> Memory:
    """What a choice takes, with `context` tokens a sequence.

    Activations of other layers are left out: they are smaller than the logits.
    """
    per_token = target.kv_per_token + (drafter.kv_per_token if drafter else 0)
    tokens = choice.batch * (context + choice.rows / choice.batch)
    return Memory(
        weights=target.nbytes,
        drafter=drafter.nbytes if drafter else 0.0,
        cache=tokens * per_token,
        logits=4.0 * choice.rows * target.vocabulary,
        available=available,
    )
