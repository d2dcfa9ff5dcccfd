"""The end of a round: what each row gets, and the input of its next step."""

from __future__ import annotations

from torch import Tensor

from attnops.core.op import Op, define
from attnops.core.record import INT32, KW_ONLY, Call, arg, record
from attnops.core.select import active_policy
from attnops.ops.speculation import reference
from attnops.ops.speculation.record import IDS, TYPICAL

COUNTER = arg("B", IDS, written=True, holds="states")


@record(
    "advance_rows",
    least={"N": ">= 1 node"},
    problem={"tokens": "B * N"},
)
class AdvanceRows(Call):
    """The nodes of each row, the target model's tokens after them, and where the rows stand."""

    drafts: Tensor = arg("B, N", IDS)
    target: Tensor = arg("B, N", IDS)
    eos: Tensor = arg("E", IDS)
    most: Tensor = arg("1", IDS)
    parents: Tensor | None = arg("B, N", INT32, default=None, always=True)
    _: KW_ONLY
    tokens: Tensor = arg("B, L", IDS, written=True, holds="states")
    seq_lens: Tensor = arg("B", INT32, written=True, holds="states")
    stored: Tensor = COUNTER
    position: Tensor = COUNTER
    unfinished: Tensor = COUNTER
    accepted: Tensor = arg("B, N", INT32, written=True)
    news: Tensor = arg("B, N + 1", IDS, written=True)


ADVANCE_ROWS = define(
    Op(
        AdvanceRows,
        reference.advance_rows,
        about="appends to each row what a round gives it",
        typical=TYPICAL,
    )
)


def advance_rows(
    drafts: Tensor,
    target: Tensor,
    eos: Tensor,
    most: Tensor,
    parents: Tensor | None = None,
    *,
    tokens: Tensor,
    seq_lens: Tensor,
    stored: Tensor,
    position: Tensor,
    unfinished: Tensor,
    accepted: Tensor,
    news: Tensor,
) -> None:
    """Append to each row what a round gives it: the tokens along the way of `accept`, and the next
    one.

    A row gets the tokens up to its first end token, and none past `most`. With either it ends. A
    row that has ended gets none.

    Args:
        drafts: int64 `[B, N]`, the nodes: the `tokens` of `accept`.
        target, parents: as in `accept`.
        eos: int64 `[E]`, the tokens that end a row; E may be 0.
        most: int64 `[1]`, the most tokens of a row. More than L have no room.
        tokens: int64 `[B, L]`, the texts, which are appended to.
        seq_lens: int32 `[B]`, how many tokens of a text are written, at most L. It is moved on.
        stored, position: int64 `[B]`, moved on as `seq_lens` is.
        unfinished: int64 `[B]`, 0 for a row that has ended. It becomes 0 for one that ends.
        accepted: int32 `[B, N]`, written: the accepted nodes in order, the root included, as many
            as the row gets tokens, and -1 beyond.
        news: int64 `[B, N + 1]`, written: how many tokens the row gets, these tokens, and -1
            beyond.

    Raises:
        InvalidInput: a shape, dtype or device breaks this contract.
    """
    ADVANCE_ROWS(
        AdvanceRows(
            drafts,
            target,
            eos,
            most,
            parents,
            policy=active_policy(),
            tokens=tokens,
            seq_lens=seq_lens,
            stored=stored,
            position=position,
            unfinished=unfinished,
            accepted=accepted,
            news=news,
        )
    )


@record(
    "next_inputs",
    least={"L": ">= 1 token", "N": ">= 1 node"},
    problem={"tokens": "B * N"},
)
class NextInputs(Call):
    """The texts, and what was drafted for them."""

    found: Tensor = arg("B, K", IDS)
    tokens: Tensor = arg("B, L", IDS)
    seq_lens: Tensor = arg("B", INT32)
    position: Tensor = arg("B", IDS)
    last_position: Tensor = arg("B", IDS)
    _: KW_ONLY
    words: int = arg(least=1)
    drafts: Tensor = arg("B, N", IDS, written=True)
    next_ids: Tensor = arg("B, N", IDS, written=True)
    positions: Tensor = arg("B, N", IDS, written=True)
    offered: Tensor = arg("B", IDS, written=True)


NEXT_INPUTS = define(
    Op(
        NextInputs,
        reference.next_inputs,
        about="a row's last token and its drafts as the input of a step",
        typical=TYPICAL,
    )
)


def next_inputs(
    found: Tensor,
    tokens: Tensor,
    seq_lens: Tensor,
    position: Tensor,
    last_position: Tensor,
    *,
    words: int,
    drafts: Tensor,
    next_ids: Tensor,
    positions: Tensor,
    offered: Tensor,
) -> None:
    """Make the input of the next step: the last token of each row, and the chain of its drafts.

    Args:
        found: int64 `[B, K]`, the drafts, negative where there is none. Those past N - 1 are left
            out.
        tokens: int64 `[B, L]`, the texts. L is at least 1.
        seq_lens: int32 `[B]`, how many tokens of a text are written, 1 to L.
        position: int64 `[B]`, of the last token.
        last_position: int64 `[B]`, the greatest of the model. Later positions are clamped to it.
        words: the size of the model's vocabulary, at least 1.
        drafts: int64 `[B, N]`, written: the nodes for `advance_rows`, -1 where there is no draft. N
            is at least 1.
        next_ids: int64 `[B, N]`, written: the nodes, clamped to `[0, words - 1]`.
        positions: int64 `[B, N]`, written.
        offered: int64 `[B]`, written: how many drafts there are.

    Raises:
        InvalidInput: a shape, dtype, device or number breaks this contract.
    """
    NEXT_INPUTS(
        NextInputs(
            found,
            tokens,
            seq_lens,
            position,
            last_position,
            words=words,
            policy=active_policy(),
            drafts=drafts,
            next_ids=next_ids,
            positions=positions,
            offered=offered,
        )
    )
