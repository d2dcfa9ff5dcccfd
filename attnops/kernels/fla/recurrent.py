"""`fla`: flash-linear-attention's Triton kernels (https://github.com/fla-org/flash-linear-attention,
the package fla-core) of layers that carry a state.

The functions that launch one kernel each are called, without the dispatch that fla wraps around
them: it would run whatever else is installed. What follows from lengths is made here at every call,
on the device: fla reads it on the host, and keeps it by the identity of `cu_seqlens`, whose numbers
change in place between steps.

The token-by-token kernel writes the states where it read them. The others return new ones, which
are copied. Chunks round queries and keys to their dtype once they are normalised, and products take
bfloat16 or float16. fla times its kernels at the first call of each kind, so a call of the kind
must run before a CUDA graph is captured.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnops.core.errors import NotCompiled
from attnops.core.kernel import Kernel, Package, arch_from, at_most, register
from attnops.core.problem import Problem
from attnops.core.record import changed
from attnops.kernels.shared.parts import FEW_HEADS
from attnops.kernels.shared.recurrent import (
    CHUNK,
    CONV_TAKES,
    chunks_of,
    conv_us,
    goes_by_chunks,
    in_one_piece,
    rule_us,
)
from attnops.kernels.shared.sizes import power
from attnops.kernels.shared.tokens import clear
from attnops.measured.cost import decodes
from attnops.ops.recurrent.reference import is_blank, state_before

if TYPE_CHECKING:
    from attnops.ops.recurrent.conv import CausalConv1d
    from attnops.ops.recurrent.record import GatedDeltaRule

HALF = (torch.float16, torch.bfloat16)
PACKAGES = (
    Package("fla", ("fla-core",), "0.6.0", "pip install 'fla-core>=0.6,<0.7'", below="0.7"),
    Package("triton", ("triton",), "3.3"),
    Package("einops", ("einops",)),
)
FEW_TOKENS = 64
"""fla's own layers take requests of up to so many tokens one after the other."""
STEP_VALUES = 8
"""Columns of the state that a program holds, token after token."""
NORMS_ALIKE = 65536
"""Rows in whose number the kernel of norms is timed anew."""
FUNCTIONS = {
    "chunk_local_cumsum": "ops.utils.cumsum",
    "l2norm_fwd": "modules.norm.l2norm",
    "chunk_gated_delta_rule_fwd_intra": "ops.gated_delta_rule.chunk_fwd",
    "chunk_gated_delta_rule_fwd_h": "ops.common.chunk_delta_h",
    "chunk_fwd_o": "ops.common.chunk_o",
    "causal_conv1d_fwd": "modules.causal_conv1d.ops",
    "causal_conv1d_update": "modules.causal_conv1d.ops",
    "causal_conv1d_update_states": "modules.causal_conv1d.ops",
}
"""By name the module of fla that has the function."""
LOG2_E = 1.0 / math.log(2.0)
STEP = "fused_recurrent_gated_delta_rule_fwd_kernel"
STEP_MODULE = "ops.gated_delta_rule.fused_recurrent"


@functools.cache
def function(name: str) -> Any:
    """A function of fla without its decorators: no dispatch, and no copy of what is contiguous."""
    return inspect.unwrap(getattr(import_module(f"fla.{FUNCTIONS[name]}"), name))


@functools.cache
def step_kernel() -> Any:
    """The kernel that goes token after token, to be launched as `kernel[grid](...)`."""
    return getattr(import_module(f"fla.{STEP_MODULE}"), STEP)


@functools.cache
def kinds() -> set[tuple[Any, ...]]:
    """The kinds of calls whose kernels were timed: fla's own cache is of the process too, and
    cannot be asked."""
    return set()


def once(kind: tuple[Any, ...], like: Tensor, run: Callable[[], None]) -> None:
    """`run()`. Raises NotCompiled while a CUDA graph is captured, unless a call of this kind came
    before.

    kind: at least as fine as the keys that fla times by.
    """
    if kind not in kinds() and like.is_cuda and torch.cuda.is_current_stream_capturing():
        raise NotCompiled("fla", ", ".join(map(str, kind)))
    run()
    kinds().add(kind)


# Lengths ------------------------------------------------------------------------------------------


def lengths_of(call: Any) -> dict[str, Tensor | None]:
    """Where requests and their chunks are, as fla's functions take it; nothing for one request that
    has all tokens.

    `chunk_indices` int32 `[slots, 2]` has request and number of each chunk. The slots are as many
    as the chunks can be; those of no chunk name one past the first request's last, which no
    program reads or writes.
    """
    starts, tokens = call.cu_seqlens_q, call.output.shape[0]
    requests = starts.shape[0] - 1
    if requests == 1 and not call.padded:
        return {"cu_seqlens": None, "chunk_indices": None}
    slots = min(tokens // CHUNK + requests, requests * -(-call.max_seqlen_q // CHUNK))
    ends = _chunk_ends(starts)
    at = torch.arange(slots, device=starts.device)
    owner = torch.searchsorted(ends, at, right=True)
    there = owner < requests
    owner = torch.where(there, owner, 0)
    number = torch.where(there, at - pad(ends, (1, 0))[owner], slots)
    return {
        "cu_seqlens": starts.contiguous(),
        "chunk_indices": torch.stack([owner, number], 1).int(),
    }


def _chunk_ends(starts: Tensor) -> Tensor:
    """int64 `[B]`: the chunks of each request and of those before it."""
    return ((starts.diff() + (CHUNK - 1)) // CHUNK).cumsum(0)


# The gated delta rule -----------------------------------------------------------------------------


@in_one_piece
def gated_delta_rule(call: GatedDeltaRule) -> None:
    if is_blank(call):
        return
    parts = {n: getattr(call, n).contiguous() for n in ("query", "key", "value", "decay", "beta")}
    call = changed(call, **parts)
    if by_chunks(call):
        _by_chunks(call)
    else:
        _in_turn(call)
    if call.padded:
        clear((call.cu_seqlens_q, call.output, 0.0))


def by_chunks(call: GatedDeltaRule) -> bool:
    """Do its tokens go by chunks?"""
    dk, dv = call.state.shape[2:]
    return call.max_seqlen_q > FEW_TOKENS and goes_by_chunks(
        "gated_delta_rule", call.query.dtype, dk, dv
    )


def _in_turn(call: GatedDeltaRule) -> None:
    """One launch. A program reads its part of a state before it writes it."""
    if call.fresh:
        call.state.copy_(state_before(call))
    (tokens, heads, dv), (_, groups, dk) = call.value.shape, call.key.shape
    requests, width = call.state.shape[0], min(STEP_VALUES, power(dv))
    step_kernel()[(requests * heads * -(-dv // width),)](
        q=call.query,
        k=call.key,
        v=call.value,
        g=call.decay,
        gk=None,
        gv=None,
        beta=call.beta,
        A_log=None,
        dt_bias=None,
        o=call.output,
        h0=call.state,
        ht=call.state,
        cu_seqlens=call.cu_seqlens_q.contiguous(),
        scale=call.scale,
        T=tokens,
        H=groups,
        HV=heads,
        K=dk,
        V=dv,
        BK=power(dk),
        BV=width,
        USE_QK_L2NORM_IN_KERNEL=call.normalize,
        IS_BETA_HEADWISE=True,
        STATE_V_FIRST=False,
        APPLY_BETA_SIGMOID=False,
        ALLOW_NEG_EIGVAL=False,
        num_warps=1,
        num_stages=3,
    )


def _by_chunks(call: GatedDeltaRule) -> None:
    """fla's `chunk_gated_delta_rule_fwd`, with the places of chunks made here."""
    (tokens, heads, dv), (_, groups, dk) = call.value.shape, call.key.shape
    kind = (
        call.query.device,
        call.query.dtype,
        call.beta.dtype,
        (heads, groups, dk, dv),
        call.normalize,
        tokens // NORMS_ALIKE,
        call.padded or call.state.shape[0] > 1,
    )
    once(kind, call.query, lambda: _chunks(call))


def _chunks(call: GatedDeltaRule) -> None:
    q, k, v, g, beta = (x[None] for x in (call.query, call.key, call.value, call.decay, call.beta))
    if call.normalize:
        q, k = (function("l2norm_fwd")(x)[0] for x in (q, k))
    where = lengths_of(call)
    starts = where["cu_seqlens"]
    offsets = None if starts is None else pad(_chunk_ends(starts), (1, 0))
    # Powers of two are what its kernels work out.
    g = function("chunk_local_cumsum")(g, chunk_size=CHUNK, scale=LOG2_E, **where)
    w, u, _ = function("chunk_gated_delta_rule_fwd_intra")(
        k=k, v=v, g=g, beta=beta, chunk_size=CHUNK, **where
    )
    states, v, state = function("chunk_gated_delta_rule_fwd_h")(
        k=k,
        w=w,
        u=u,
        g=g,
        initial_state=state_before(call),
        output_final_state=True,
        chunk_offsets=offsets,
        **where,
    )
    output = function("chunk_fwd_o")(q=q, k=k, v=v, h=states, g=g, scale=call.scale, **where)
    call.output.copy_(output[0])
    call.state.copy_(state)


# The convolution ----------------------------------------------------------------------------------


@in_one_piece
def causal_conv1d(call: CausalConv1d) -> None:
    if is_blank(call):
        return
    tokens, (requests, _, kept) = call.x.shape[0], call.state.shape
    weight = call.weight.contiguous()
    bias = None if call.bias is None else call.bias.contiguous()
    # Requests of one token at most that have a token a request have one each.
    each_one = call.max_seqlen_q == 1 and tokens == requests and not call.padded
    step = each_one and kept == weight.shape[1]
    kind = call.x.device, call.x.dtype, weight.shape, bias is None, call.activation, step
    run = _conv_step if step else _conv
    once(kind, call.x, lambda: run(changed(call, weight=weight, bias=bias)))
    if call.padded:
        clear((call.cu_seqlens_q, call.output, 0.0))


def _conv_step(call: CausalConv1d) -> None:
    """One launch, which changes the states where they are."""
    if call.fresh:
        call.state.zero_()
    output, _ = function("causal_conv1d_update")(
        call.x, call.state, None, call.weight, call.bias, call.activation or None
    )
    call.output.copy_(output)


def _conv(call: CausalConv1d) -> None:
    """fla's initial state has W inputs; it ignores the first, since W - 1 precede a token."""
    before, x, width = state_before(call), call.x[None], call.weight.shape[1]
    kept = before.shape[2]
    first = before[:, :, kept - width :] if kept >= width else pad(before, (1, 0))
    where = lengths_of(call)
    output, _ = function("causal_conv1d_fwd")(
        x,
        call.weight,
        call.bias,
        None,
        initial_state=first.contiguous(),
        activation=call.activation or None,
        chunk_size=CHUNK,
        **where,
    )
    call.output.copy_(output[0])
    if kept:
        update = function("causal_conv1d_update_states")
        call.state.copy_(update(x, kept, before, where["cu_seqlens"]))


# Costs --------------------------------------------------------------------------------------------

CHUNK_US, TOKEN_US, LAUNCHES_US = 1.9, 1.3, 22.0
"""Of a chunk after the one before it, and of the launches: what was published of an H100 (0.144 ms
for 4k tokens, 1.95 ms for 64k). That of a token is an estimate."""


def _rule_us(p: Problem) -> float:
    """One launch and the bytes of a step; not measured."""
    if decodes(p):
        return 5.0 + rule_us(p)
    tokens = p.sizes.queries.hint
    if tokens > FEW_TOKENS and goes_by_chunks(p.op, p.dtype, p.head_dim, p.v_head_dim):
        return LAUNCHES_US + max(3.0 * rule_us(p), CHUNK_US * chunks_of(p))
    return 5.0 + rule_us(p) + TOKEN_US * tokens


def _conv_us(p: Problem) -> float:
    """Its launches, and copies of the result; not measured."""
    return 12.0 + 4.0 * conv_us(p)


register(
    Kernel(
        "fla",
        "gated_delta_rule",
        gated_delta_rule,
        dtypes=(*HALF, torch.float32),
        needs=(arch_from(80), FEW_HEADS, at_most("head_dim", 256)),
        packages=PACKAGES,
        cost_us=_rule_us,
        about="flash-linear-attention's, by chunks of 64 tokens, or token after token",
    )
)
register(
    Kernel(
        "fla",
        "causal_conv1d",
        causal_conv1d,
        CONV_TAKES,
        (*HALF, torch.float32),
        needs=(arch_from(80),),
        packages=PACKAGES,
        cost_us=_conv_us,
        about="flash-linear-attention's, a tile of tokens and channels a program",
    )
)
