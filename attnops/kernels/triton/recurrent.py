"""`triton`, of layers that carry a state: the gated delta rule by chunks of 64 tokens in two
launches, or token after token in one, the scan of Mamba-2 likewise in one, and the convolution of
each channel with its gradient."""

from __future__ import annotations

from attnops.core.kernel import at_most, one_of
from attnops.core.problem import Problem
from attnops.kernels.shared.parts import FEW_HEADS
from attnops.kernels.shared.recurrent import (
    CONV_TAKES,
    KEPT_OF_CONVS,
    KEPT_OF_RULES,
    KEPT_OF_SCANS,
    chunks_of,
    conv_us,
    goes_by_chunks,
    rule_us,
)
from attnops.kernels.triton.attention import launched, own
from attnops.measured.cost import decodes

CHUNK_US, TOKEN_US, KEPT_US = 2.5, 1.3, 0.3
"""Of a chunk, of a token, and of a token that is loaded while the one before is worked on. Not
measured."""


def _rule_us(p: Problem) -> float:
    """One launch and the bytes; of more tokens the longest request's chunks in turn, or its tokens.
    Not measured."""
    if decodes(p):
        return 4.0 + rule_us(p)
    if "accepted" in p.asks:
        return 4.0 + rule_us(p) + KEPT_US * 2 * p.sizes.queries.hint
    if goes_by_chunks(p.op, p.dtype, p.head_dim, p.v_head_dim):
        return 12.0 + max(2.0 * rule_us(p), CHUNK_US * chunks_of(p))
    return 4.0 + rule_us(p) + TOKEN_US * p.sizes.queries.hint


def _conv_us(p: Problem) -> float:
    return 3.0 + 2.0 * conv_us(p)


def _conv_gradient_us(p: Problem) -> float:
    """A launch and a sum. Not measured."""
    return 12.0 + 6.0 * conv_us(p)


for _op, _module, _takes in (
    ("gated_delta_rule", "recurrent", KEPT_OF_RULES),
    ("mamba2_scan", "scan", KEPT_OF_SCANS),
):
    own(
        _op,
        launched(_module, _op),
        _rule_us,
        "attnops' own, by chunks of 64 tokens, or token after token",
        _takes,
        needs=(
            one_of("last_dim_contiguous", True),
            FEW_HEADS,
            at_most("head_dim", 256),
            at_most("v_head_dim", 256),
        ),
    )
own(
    "causal_conv1d",
    launched("recurrent", "causal_conv1d"),
    _conv_us,
    "attnops' own, a tile of tokens and channels a program",
    CONV_TAKES | KEPT_OF_CONVS,
)
own(
    "causal_conv1d_backward",
    launched("recurrent_gradient", "causal_conv1d_backward"),
    _conv_gradient_us,
    "attnops' own, a tile of inputs and channels a program",
    CONV_TAKES,
)
