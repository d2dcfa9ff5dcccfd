"""Drafts of a text that repeats itself, and the drafts that the target model accepts."""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.core.op import Op, define
from attnops.core.record import INT32, KW_ONLY, Call, Result, arg, record
from attnops.core.select import active_policy
from attnops.ops.speculation import reference

INT, ID = INT32[0], torch.int64
IDS = (ID,)
TYPICAL = ({"dtype": ID, "kv_dtype": ID},)
LONGEST = 32
"""Tokens of an n-gram, at most. Each is a pass over the text."""


@record(
    "lookup_drafts",
    Result("drafts", "B, num_drafts", ID),
    Result("counts", "B", INT),
    least={"L": ">= 1 token"},
    problem={"tokens": "B", "context": "L"},
)
class LookupDrafts(Call):
    """The text of each row."""

    tokens: Tensor = arg("B, L", IDS)
    seq_lens: Tensor = arg("B", INT32)
    _: KW_ONLY
    max_ngram: int = arg(least=1, most=LONGEST)
    num_drafts: int = arg(least=1)


LOOKUP_DRAFTS = define(
    Op(
        LookupDrafts,
        reference.lookup_drafts,
        about="what followed a row's last tokens before",
        typical=TYPICAL,
    )
)


def lookup_drafts(
    tokens: Tensor, seq_lens: Tensor, *, max_ngram: int, num_drafts: int
) -> tuple[Tensor, Tensor]:
    """(drafts int64 `[B, K]`, counts int32 `[B]`): what followed a row's last tokens where they
    stood before. -1 past a row's count.

    The last n tokens of a row are searched in the tokens before its last, for n from max_ngram down
    to 1. The first n with a match decides, and of its matches the one that ends last: the newest
    text is most like what comes. The tokens after that match are the drafts, at most K and no
    further than the row's end. A match may overlap the last n tokens, so a text that repeats a
    period of p tokens gives p drafts.

    transformers' PromptLookupCandidateGenerator takes the same n and of its matches the first. It
    also cuts the drafts before an end-of-sequence token, and drops those that a logits processor
    forbids. Here both are left to the caller.

    Args:
        tokens: int64 `[B, L]`, the text of each row, its first token at 0. L is at least 1.
        seq_lens: int32 `[B]`, how many tokens are written. The others are not read. A number
            outside `[0, L]` is clamped.
        max_ngram: 1 to 32 tokens.
        num_drafts: K, at least 1.

    Raises:
        InvalidInput: a shape, dtype, device or number breaks this contract.
    """
    out: tuple[Tensor, Tensor] = LOOKUP_DRAFTS(
        LookupDrafts(
            tokens, seq_lens, max_ngram=max_ngram, num_drafts=num_drafts, policy=active_policy()
        )
    )
    return out


@record(
    "accept",
    Result("path", "B, N", INT),
    Result("num_accepted", "B", INT),
    Result("next_token", "B", ID),
    least={"N": ">= 1 node"},
    problem={"tokens": "B * N"},
)
class Accept(Call):
    """The nodes of each row, and the target model's tokens after them."""

    tokens: Tensor = arg("B, N", IDS)
    target: Tensor = arg("B, N", IDS)
    parents: Tensor | None = arg("B, N", INT32, default=None, always=True)


ACCEPT = define(
    Op(
        Accept,
        reference.accept,
        about="the drafts that the target model chose, too",
        typical=TYPICAL,
    )
)


def accept(
    tokens: Tensor, target: Tensor, parents: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(path int32 `[B, N]`, num_accepted int32 `[B]`, next_token int64 `[B]`): the way from a row's
    root through the drafts that the target model chose, too.

    From the root the way goes to the child whose token the target model chose after the node, while
    there is one; of equal children to the first. path has the nodes in order, the root included,
    and -1 beyond; num_accepted leaves the root out. next_token is the model's choice after the last
    of them.

    With greedy choices the tokens are those of plain greedy decoding. Where `target` is a sample of
    the model's distribution after each node, drawn without a look at the drafts, the tokens have
    exactly the distribution of plain sampling: each is such a sample after the tokens before it,
    and drafts only decide how many of them one round gives. That holds for drafts of any origin.
    `accept_sampled` accepts more of those that come with probabilities.

    Args:
        tokens: int64 `[B, N]`. Node 0 is the root, the row's last token, and the others are drafts.
            A negative token is an empty node, which is not accepted. N is at least 1.
        target: int64 `[B, N]`, the target model's token after each node.
        parents: int32 `[B, N]`, the node before each node; the root's is not read. None: a chain,
            each node after the one before. A node whose parent is not in `[0, node)` is not
            reached, nor are those below it.

    Raises:
        InvalidInput: a shape, dtype or device breaks this contract.
    """
    out: tuple[Tensor, Tensor, Tensor] = ACCEPT(
        Accept(tokens, target, parents, policy=active_policy())
    )
    return out
