"""`fa4` of the gradients: `_flash_attn_bwd` of FlashAttention-4
(https://github.com/Dao-AILab/flash-attention, flash_attn/cute).

Read from its source, 4.0.0b36: lse comes heads first, natural, with the sink in it; delta is the
row sum of grad_output * output less grad_lse; the gradient of a sink is the sum of -exp(sink - lse)
* delta. It loads whole tiles past a request's end, where NaN would spread, and does not write rows
of no request.

Programs add their parts of a query's gradient, and of grouped heads those of a key's and a value's,
in the order in which they come. With `deterministic=True` each waits for its turn: by blocks of the
request's own keys, and by heads of a group. So it does under a deterministic policy and under
torch.use_deterministic_algorithms. Tiles follow from head dims and rules alone, and the gradient of
sinks is added up by one program a head either way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnops.core.kernel import (
    Invariant,
    Kernel,
    Need,
    Tolerance,
    arch,
    demand,
    deterministic,
    one_of,
    register,
)
from attnops.core.problem import Problem, Refusal, repeatable
from attnops.core.tensors import Rules, without_faint
from attnops.kernels.flash_attn4.fa4 import (
    FAMILIES,
    HALF,
    PACKAGES,
    common_kind,
    detached_sinks,
    function_of,
    longest,
    once,
    one_family,
)
from attnops.kernels.shared.parts import in_turns
from attnops.kernels.shared.tokens import clear, past, runs, zeroed
from attnops.measured import Roofline, copy_us

if TYPE_CHECKING:
    from attnops.ops.attention import record as dense, varlen

USED = (
    "softmax_scale",
    "causal",
    "softcap",
    "window_size_left",
    "window_size_right",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "max_seqlen_q",
    "max_seqlen_k",
    "deterministic",
    "dq",
    "dk",
    "dv",
    "dlse",
    "learnable_sink",
)


@in_turns
def attention_backward(
    call: dense.AttentionBackward,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    none = call.query.new_empty(0)
    if call.query.numel() == 0 or call.key.numel() == 0:
        *grads, grad_sinks = _without_keys(call, call.grad_lse)
    else:
        *grads, grad_sinks = backward(
            call, (call.query, call.key, call.value, call.grad_output), {}
        )
    return grads[0], grads[1], grads[2], none, grad_sinks


def varlen_attention_backward(
    call: varlen.VarlenAttentionBackward,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value and the output's gradient are copied once, and the results' padding rows
    cleared, unless the call promises none."""
    given: tuple[Tensor, ...] = call.query, call.key, call.value, call.grad_output
    cu_q, cu_k = call.cu_seqlens_q.contiguous(), call.cu_seqlens_k.contiguous()
    if not runs(call):
        of_lse = (
            None
            if call.grad_lse is None
            else call.grad_lse.masked_fill(past(cu_q, call.query.shape[0])[:, None], 0.0)
        )
        return _without_keys(call, of_lse)
    if call.padded:
        after_q, after_k = past(cu_q, call.query.shape[0]), past(cu_k, call.key.shape[0])
        given = tuple(
            zeroed(x, where)
            for x, where in zip(given, (after_q, after_k, after_k, after_q), strict=True)
        )
    batch = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k} | longest(call)
    grad_q, grad_k, grad_v, grad_sinks = backward(call, given, batch)
    if call.padded:
        clear((cu_q, grad_q, 0.0), (cu_k, grad_k, 0.0), (cu_k, grad_v, 0.0))
    return grad_q, grad_k, grad_v, grad_sinks


Gradients = tuple[Tensor, Tensor, Tensor, Tensor]
"""Those of query, key, value and sinks, contiguous; that of the sinks is `[0]` where there are
none."""


def _without_keys(call: Any, grad_lse: Tensor | None) -> Gradients:
    """Where no query sees a key: lse is the sink. grad_lse: 0 in rows of no request."""
    grads = (x.new_zeros(x.shape) for x in (call.query, call.key, call.value))
    if call.sinks is None:
        return *grads, call.query.new_empty(0)
    found = torch.zeros(call.sinks.shape, dtype=torch.float32, device=call.query.device)
    return *grads, (found if grad_lse is None else grad_lse.flatten(0, -2).sum(0)).to(
        call.sinks.dtype
    )


@functools.cache
def interface() -> Callable[..., Any]:
    """`_flash_attn_bwd`. Raises as `function_of`."""
    return function_of("_flash_attn_bwd", USED)


def backward(call: Any, given: tuple[Tensor, ...], batch: dict[str, Any]) -> Gradients:
    """The gradients of a call with these query, key, value and grad_output; rows of no request hold
    anything.

    batch: the arguments of `_flash_attn_bwd` that say where requests are. Raises NotCompiled as
    `once`.
    """
    # It asks requires_grad of its inputs, whatever the grad mode.
    query, key, value, grad_output, output = (x.detach() for x in (*given, call.output))
    rules, grad_lse = Rules.of(call), call.grad_lse
    sinks = None if call.sinks is None else detached_sinks(call.sinks)
    grad_output, output = (
        x.contiguous() if 0 in x.stride() else x
        for x in (grad_output.to(query.dtype), output.to(query.dtype))
    )
    longest_q = batch.get("max_seqlen_q", query.shape[-3])
    longest_k = batch.get("max_seqlen_k", key.shape[-3])
    steady = deterministic(call.policy) or repeatable() != "no"
    kind = (
        "backward",
        *common_kind(rules, sinks, query, key, value),
        len(batch),
        grad_lse is None,
        len(batch) > 0 and batch["cu_seqlens_q"].shape[0] - 1 > 256,
        # Tiles of queries and of keys: a call of one tile is a kind of its own.
        tuple(longest_q <= n for n in (64, 80, 128)),
        tuple(longest_k <= n for n in (48, 64, 96, 128)),
        steady,
    )
    grads = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value))
    found = once(
        kind,
        query,
        rules,
        lambda: interface()(
            query,
            key,
            value,
            output,
            grad_output,
            without_faint(call.lse.detach().transpose(-1, -2)),
            softmax_scale=rules.scale,
            causal=rules.causal,
            softcap=rules.softcap,
            window_size_left=rules.left if rules.left >= 0 else None,
            window_size_right=rules.right if rules.right >= 0 else None,
            dq=grads[0],
            dk=grads[1],
            dv=grads[2],
            dlse=None if grad_lse is None else _heads_first(grad_lse),
            learnable_sink=sinks,
            deterministic=steady,
            **batch,
        ),
    )
    return (
        grads[0],
        grads[1],
        grads[2],
        query.new_empty(0) if call.sinks is None else found[3].to(call.sinks.dtype),
    )


def _heads_first(x: Tensor) -> Tensor:
    """`[..., S, Hq]` -> `[..., Hq, S]`, contiguous."""
    return x.detach().transpose(-1, -2).contiguous()


BACKWARD = Roofline(16.1, 0.087, 0.257, 0.022)


def _cost_us(p: Problem) -> float:
    """With the copies of a call that may have padding rows."""
    if not (p.op.startswith("varlen") and p.step.padded):
        return BACKWARD(p)
    rows = p.q_heads * p.sizes.tokens.hint + p.kv_heads * p.sizes.batch.hint * p.sizes.context.hint
    return BACKWARD(p) + 10.0 + copy_us(p, (p.head_dim + p.v_head_dim) * rows)


def _steady_us(p: Problem) -> float:
    """Programs wait for their turn. Whole steps take 4 to 28% longer on an H200 (training.json)."""
    return 1.2 * _cost_us(p)


HEAD_DIMS = (64, 96, 128, 192, 256)


def head_dims(p: Problem) -> Refusal | None:
    """Those the vendor tests. Between them its kernel and the pass that reads its sums pad a row of
    a query's gradient differently."""
    d, dv = p.head_dim, p.v_head_dim
    if d not in HEAD_DIMS:
        return Refusal("head_dim", d, " | ".join(map(str, HEAD_DIMS)))
    if dv != d and ((d, dv) != (192, 128) or p.group_size > 1):
        return Refusal(
            "v_head_dim",
            dv,
            f"{d}, the query's (or 128 with 192, and as many key heads as query heads)",
        )
    if p.target.arch != 90 and (d, dv) == (192, 192):
        return Refusal("v_head_dim", dv, "128 with 192 (sm100)")
    return None


def _plain_256(p: Problem) -> bool:
    return (
        p.target.arch == 90
        or p.head_dim != 256
        or not (p.rules.sinks or p.rules.softcap or p.results.lse_grad)
    )


NEEDS: tuple[Need, ...] = (
    arch(*FAMILIES),
    head_dims,
    demand("head_dim", "<= 192 with sinks, softcap or a gradient of lse (sm100)", _plain_256),
    one_of("last_dim_contiguous", True),
)
for _run in (attention_backward, varlen_attention_backward):
    register(
        Kernel(
            "fa4",
            _run.__name__,
            _run,
            takes=frozenset({"causal", "window_left", "window_right", "softcap", "sinks"}),
            dtypes=HALF,
            needs=NEEDS,
            packages=PACKAGES,
            probe=one_family,
            tolerance=Tolerance(4.0),
            cost_us=_cost_us,
            # The order of turns was read in SM90's kernel alone.
            invariant=Invariant((arch(90),), _steady_us),
            repeats=(arch(90),),
            about="FlashAttention-4's gradient",
        )
    )
