"""Drafts that come with probabilities, accepted so that sampling keeps its distribution."""

from __future__ import annotations

from torch import Tensor

from attnops.core.op import Op, define
from attnops.core.record import FLOAT32, INT32, Call, Result, arg, record
from attnops.core.select import active_policy
from attnops.ops.speculation import reference
from attnops.ops.speculation.record import ID, IDS, INT, TYPICAL


@record(
    "accept_sampled",
    Result("path", "B, N", INT),
    Result("num_accepted", "B", INT),
    Result("next_token", "B", ID),
    least={"N": ">= 1 node", "V": ">= 1 token"},
    problem={"tokens": "B * N", "context": "V"},
)
class AcceptSampled(Call):
    """The nodes of each row, and what they and the tokens after them were or are drawn from."""

    tokens: Tensor = arg("B, N", IDS)
    target_probs: Tensor = arg("B, N, V", FLOAT32)
    draft_probs: Tensor = arg("B, N, V", FLOAT32)
    noise: Tensor = arg("B, N + 1", FLOAT32)
    parents: Tensor | None = arg("B, N", INT32, default=None, always=True)


ACCEPT_SAMPLED = define(
    Op(
        AcceptSampled,
        reference.accept_sampled,
        about="drafts that rejection sampling accepts",
        typical=TYPICAL,
    )
)


def accept_sampled(
    tokens: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    noise: Tensor,
    parents: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(path, num_accepted, next_token) as of `accept`, by rejection sampling: the tokens of a round
    have exactly the distribution of plain sampling from `target_probs`.

    At a node with the distribution p, its children are tried in order. A child with the token x
    that was drawn from q is accepted with the probability `min(1, p(x) / q(x))`
    (https://arxiv.org/abs/2211.17192). If it is refused, p becomes `max(p - q, 0)`, divided by its
    sum, for the next child. The next token is drawn from the p of the last accepted node.

    That is lossless for any q that may depend on the parent and on the siblings before, but not on
    the node itself: a token leaves with `min(p, q)`, or else with what p has above q. So q is

    - of an only child, the draft model's distribution after the parent;
    - of siblings drawn with replacement, the same for each;
    - of siblings drawn without replacement, the draft model's with 0 at the tokens of the siblings
      before, divided by its sum;
    - of a token that was not drawn, such as one of the best k, 1 at that token. Such drafts need no
      probabilities: `accept` with a sample for target accepts as many.

    A tree may not leave out drawn nodes because of their tokens.

    Args:
        tokens, parents: as in `accept`. A token from V on is an empty node, too.
        target_probs: float32 `[B, N, V]`, the target model's distribution after each node, with
            temperature, top-k, top-p and min-p applied. Each sums to 1.
        draft_probs: float32 `[B, N, V]`, the q of each node. The root's is not read.
        noise: float32 `[B, N + 1]`, uniform in `[0, 1)` and independent: of each node, of which the
            root's is not read, and last of the next token.

    Raises:
        InvalidInput: a shape, dtype or device breaks this contract.
    """
    out: tuple[Tensor, Tensor, Tensor] = ACCEPT_SAMPLED(
        AcceptSampled(tokens, target_probs, draft_probs, noise, parents, policy=active_policy())
    )
    return out
