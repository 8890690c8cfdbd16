"""The losses of Medusa's heads: head k predicts the token k+2 places on from its hidden state.

Source: Medusa (Cai et al., arXiv 2401.10774, section 2.3, Medusa-1: the target stays as it is). The
target's own distribution at that place is imitated, not the token that was drawn there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.draft.medusa import MedusaHeads
from ridgeline.train.unroll import DECAY, Batch, Losses


def medusa_losses(network: MedusaHeads, head: Tensor, batch: Batch) -> Losses:
    """The decayed losses of all heads.

    Args:
        network: the heads; their LM heads are `head` where they have none.
        head: f32[Vd,H], the target's LM head for the ids that can be drafted.
        batch: B texts.
    """
    states = network.hidden(batch.final)
    total = batch.final.new_zeros(())
    alive = torch.ones_like(batch.weight, dtype=torch.bool)
    passed, reached = [], []
    with torch.no_grad():
        written = batch.weight > 0
        target = batch.final.new_zeros(*written.shape, len(head))
        target[written] = (batch.final[written] @ head.T).softmax(-1).to(target.dtype)
    for k, state in enumerate(states):
        ahead = k + 1  # the distribution after the token so many places on
        lm_head = network.heads[k].weight if network.heads else head
        counted = written[:, ahead:]
        guess = (state[:, :-ahead][counted] @ lm_head.T).log_softmax(-1)
        cross = -(target[:, ahead:][counted] * guess).sum(-1)
        total = total + DECAY**k * cross.sum() / counted.sum().clamp(min=1)
        if batch.likeliest is not None:
            right = torch.zeros_like(counted)
            right[counted] = guess.argmax(-1) == batch.likeliest[:, ahead:][counted]
            alive = alive[:, : counted.shape[1]]
            reached.append(int((alive & counted).sum()))
            alive = alive & right
            passed.append(int((alive & counted).sum()))
    return Losses(total, passed, reached)
