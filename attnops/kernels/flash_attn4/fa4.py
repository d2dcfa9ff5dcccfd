"""`fa4`: FlashAttention-4 (https://github.com/Dao-AILab/flash-attention, flash_attn/cute), for
dense, packed and paged calls.

SM90: no split of the keys, so a decode of few requests leaves most of the GPU idle. SM100 is
declared from its source and never ran here.

Its kernels are compiled at the first call of each kind, which takes seconds and must not happen
while a CUDA graph is captured. Warming is an eager call of that kind, once a process; the warm-up
that torch's CUDA-graph trees make before they record counts.
`FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1` keeps compiled kernels on disk (in
`FLASH_ATTENTION_CUTE_DSL_CACHE_DIR`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnops.core.errors import NotCompiled
from attnops.core.kernel import (
    Invariant,
    Kernel,
    Need,
    Package,
    Tolerance,
    arch,
    demand,
    deterministic,
    one_of,
    register,
)
from attnops.core.problem import Problem, Refusal, Target
from attnops.core.tensors import Rules, compact, no_lse, result_dtype
from attnops.kernels.shared.memory import PACK
from attnops.kernels.shared.parts import in_turns
from attnops.kernels.shared.tokens import (
    blank,
    packed_lse,
    past,
    runs,
    see_nothing,
    with_sinks,
    zeroed,
)
from attnops.measured import Roofline, copy_us

if TYPE_CHECKING:
    from attnops.ops.attention import record as dense, varlen
    from attnops.ops.pages import record as paged

FLOAT8 = torch.float8_e4m3fn
HALF = (torch.float16, torch.bfloat16)
OLDEST = "4.0.0b36"
PACKAGES = (
    Package("flash_attn.cute", ("flash-attn-4",), OLDEST, "pip install flash-attn-4"),
    Package("cutlass", ("nvidia-cutlass-dsl",)),
    Package("quack", ("quack-kernels",)),
    Package("tvm_ffi", ("apache-tvm-ffi",)),
)
USED = (
    "cu_seqlens_q",
    "cu_seqlens_k",
    "seqused_k",
    "max_seqlen_q",
    "max_seqlen_k",
    "page_table",
    "softmax_scale",
    "causal",
    "softcap",
    "window_size_left",
    "window_size_right",
    "learnable_sink",
    "num_splits",
    "out",
    "lse",
    "q_descale",
    "k_descale",
    "v_descale",
)


@in_turns
def attention(call: dense.Attention) -> tuple[Tensor, Tensor]:
    query, key, value = call.query, call.key, call.value
    batch, queries, heads, _ = query.shape
    output = query.new_empty(
        (batch, queries, heads, value.shape[3]), dtype=result_dtype(query, call.q_scale)
    )
    lse = query.new_empty((batch, heads, queries), dtype=torch.float32) if call.return_lse else None
    if query.numel() == 0 or key.numel() == 0:
        see_nothing(output, lse)
    else:
        forward(call, key, value, output, lse, {})
    return output, no_lse(query) if lse is None else compact(
        with_sinks(lse.transpose(1, 2), call.sinks)
    )


def varlen_attention(call: varlen.VarlenAttention) -> tuple[Tensor, Tensor]:
    """The value is copied once and the output cleared, unless the call promises no padding rows."""
    query, key, value, cu_q, cu_k = (
        call.query,
        call.key,
        call.value,
        call.cu_seqlens_q,
        call.cu_seqlens_k,
    )
    tokens, heads, _ = query.shape
    output = query.new_empty(
        (tokens, heads, value.shape[2]), dtype=result_dtype(query, call.q_scale)
    )
    lse = query.new_empty((heads, tokens), dtype=torch.float32) if call.return_lse else None
    some = runs(call)
    if call.padded or not some:
        see_nothing(output, lse)  # the kernel writes no row of no request
    if some:
        batch = {"cu_seqlens_q": cu_q.contiguous(), "cu_seqlens_k": cu_k.contiguous()}
        forward(
            call,
            key,
            zeroed(value, past(cu_k, key.shape[0])) if call.padded else value,
            output,
            lse,
            batch | longest(call),
        )
    return output, no_lse(query) if lse is None else compact(_packed_lse(lse, call))


def paged_attention(call: paged.PagedAttention) -> None:
    """The kernel writes into `output` itself, which is cleared first unless the call promises no
    padding rows."""
    if blank(call):
        return
    output = call.output
    steps = (output.data_ptr(), *(s * output.element_size() for s in output.stride()[:2]))
    fits = output.stride(2) == 1 and not any(n % PACK for n in steps)  # it takes no other strides
    out = output if fits else torch.empty(output.shape, dtype=output.dtype, device=output.device)
    lse = None if call.lse is None else call.lse.new_empty((call.lse.shape[1], call.lse.shape[0]))
    if call.padded:
        see_nothing(out, lse)
    lengths = {
        "cu_seqlens_q": call.cu_seqlens_q.contiguous(),
        "seqused_k": call.seq_lens.contiguous(),
    }
    rest = {"max_seqlen_q": call.max_seqlen_q, "page_table": call.page_table.contiguous()}
    forward(call, call.k_pages, call.v_pages, out, lse, lengths | rest)
    if out is not output:
        output.copy_(out)
    if call.lse is not None and lse is not None:
        call.lse.copy_(_packed_lse(lse, call))


WIDEST_TILE = 256
"""Rows that no tile of any kernel exceeds."""


def longest(call: Any) -> dict[str, int]:
    """The lengths of the longest request. A batch of one tile has a kernel of its own, which a
    deterministic policy shall not give it."""
    least = WIDEST_TILE + 1 if deterministic(call.policy) else 0
    return {
        "max_seqlen_q": max(call.max_seqlen_q, least),
        "max_seqlen_k": max(call.max_seqlen_k, least),
    }


def _packed_lse(lse: Tensor, call: varlen.VarlenAttention | paged.PagedAttention) -> Tensor:
    # Tokens of no request have -inf already, and only sinks would change it.
    return packed_lse(lse, call.sinks, call.cu_seqlens_q, call.padded and call.sinks is not None)


@functools.cache
def interface() -> Callable[..., Any]:
    """`_flash_attn_fwd`. Raises ImportError, or RuntimeError for a version that takes other
    arguments."""
    return function_of("_flash_attn_fwd", USED)


def function_of(name: str, used: tuple[str, ...]) -> Callable[..., Any]:
    """The vendor's function of this name. Raises ImportError, or RuntimeError for a version that
    does not take the arguments `used`."""
    from flash_attn.cute import interface as vendor  # type: ignore[import-not-found, unused-ignore]

    function: Callable[..., Any] = getattr(vendor, name)
    taken = inspect.signature(function).parameters
    if absent := [n for n in used if n not in taken]:
        raise RuntimeError(
            f"flash_attn.cute: got a version without {', '.join(absent)}, want {OLDEST}, which "
            "was read"
        )
    return function


@functools.cache
def _kinds() -> set[tuple[Any, ...]]:
    """The kinds of calls that have been compiled: the vendor's cache is of the process too, and
    cannot be asked without compiling."""
    return set()


def once(kind: tuple[Any, ...], query: Tensor, rules: Rules, run: Callable[[], Any]) -> Any:
    """`run()`, the vendor's call. Raises NotCompiled while a CUDA graph is captured, unless a call
    of this kind came before.

    kind: at least as fine as the vendor's key, so that calls of one kind share a compiled kernel.
    """
    if kind not in _kinds() and query.is_cuda and torch.cuda.is_current_stream_capturing():
        raise NotCompiled("fa4", f"{tuple(query.shape)} {query.dtype} query, {rules}")
    found = run()
    _kinds().add(kind)
    return found


def forward(
    call: Any, key: Tensor, value: Tensor, output: Tensor, lse: Tensor | None, batch: dict[str, Any]
) -> None:
    """Write output and, if given, lse with the heads first.

    call: gives query, rules, sinks and scales. batch: the arguments of `_flash_attn_fwd` that say
    where requests are. Raises NotCompiled while a CUDA graph is captured, unless a call of this
    kind came before.
    """
    rules = Rules.of(call)
    sinks = None if call.sinks is None else detached_sinks(call.sinks)
    # It asks requires_grad of its inputs, whatever the grad mode.
    query, key, value = (x.detach() if x.requires_grad else x for x in (call.query, key, value))
    requests = batch["cu_seqlens_q"].shape[0] - 1 if "cu_seqlens_q" in batch else query.shape[0]
    if call.q_scale is not None:
        batch = batch | _scales(call, (requests, key.shape[-2]))
    rows_q = batch.get("max_seqlen_q", query.shape[-3])
    group = query.shape[-2] // key.shape[-2]
    kind = (
        *common_kind(rules, sinks, query, key, value, output),
        lse is None,
        tuple(
            rows_q * rows <= limit for rows in (1, group) for limit in (64, 128, 192, WIDEST_TILE)
        ),
        requests > 256,
        tuple(n for n, v in batch.items() if v is not None),
        value.shape[1] if "page_table" in batch else 0,
    )
    once(
        kind,
        query,
        rules,
        lambda: interface()(
            query,
            key,
            value,
            softmax_scale=rules.scale,
            causal=rules.causal,
            softcap=rules.softcap if rules.softcap > 0 else None,
            window_size_left=rules.left if rules.left >= 0 else None,
            window_size_right=rules.right if rules.right >= 0 else None,
            learnable_sink=sinks,
            num_splits=1,
            out=output,
            lse=lse,
            **batch,
        ),
    )


def detached_sinks(sinks: Tensor) -> Tensor:
    """Sinks without a graph, in a dtype that the vendor takes."""
    sinks = sinks.detach() if sinks.requires_grad else sinks
    return sinks.float() if sinks.dtype == torch.float64 else sinks


def common_kind(rules: Rules, sinks: Tensor | None, *tensors: Tensor) -> tuple[Any, ...]:
    """What kinds of calls forward and backward differ by. tensors: query and key come first."""
    query, key = tensors[:2]
    return (
        query.device,
        query.dtype,
        tuple((x.shape[-1], tuple(s == 0 for s in x.stride())) for x in tensors),
        query.shape[-2] // key.shape[-2],
        None if sinks is None else sinks.dtype,
        rules.causal,
        rules.left < 0,
        rules.right < 0,
        rules.softcap,
    )


def _scales(call: Any, shape: tuple[int, int]) -> dict[str, Tensor | None]:
    """Each for every request and key head."""
    scales = {"q_descale": call.q_scale, "k_descale": call.k_scale, "v_descale": call.v_scale}
    return {n: None if s is None else s.expand(shape).contiguous() for n, s in scales.items()}


DENSE = Roofline(14.0, 1.0, 0.74, 0.011)  # by direct calls on an H200, which split no keys


def _cost_us(p: Problem) -> float:
    copies = p.op == "varlen_attention" and p.step.padded
    return DENSE(p) + copies * copy_us(
        p, p.sizes.batch.hint * p.sizes.context.hint * p.kv_heads * p.v_head_dim
    )


def tile(p: Problem) -> int:
    """Keys a tile of SM90's and SM100's forward kernels (`_tile_size_fwd_sm90`, FwdConfig)."""
    d, narrow = p.head_dim, p.rules.windowed
    if p.target.arch != 90 or d <= 64 or 96 < d <= 128:
        return 128
    if d <= 96:
        return 128 if p.rules.causal or narrow else 144
    if d <= 192:
        return 96 if narrow else 128 if p.v_head_dim <= 128 else 112
    return 64 if narrow else 80


def head_dims(p: Problem) -> Refusal | None:
    """The head dims that `_validate_head_dims` lets through and whose value is no wider than the
    query, for which tiles are chosen."""
    d, dv = p.head_dim, p.v_head_dim
    unit = 16 // p.dtype.itemsize
    for field, size in (("head_dim", d), ("v_head_dim", dv)):
        if size % unit or size < 8:
            return Refusal(field, size, f"a multiple of {unit}")
    if dv > d:
        return Refusal("v_head_dim", dv, f"<= {d}, the query's")
    if p.target.arch == 90:
        return Refusal("head_dim", d, "<= 256") if d > 256 else None
    return (
        None
        if d <= 128 or (d, dv) in ((192, 128), (256, 256))
        else Refusal("head_dim", d, "<= 128, or 192 with 128, or 256")
    )


FAMILIES = (90, 100, 103, 110)


def one_family(target: Target) -> Refusal | None:
    """A probe: the package asks for an architecture once, of the GPU that calls it first, and
    compiles for it ever after."""
    if target.assume is not None or target.device != "cuda":
        return None
    found = {
        10 * major + minor
        for major, minor in map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
    }
    served = [f"sm{family}" for family in FAMILIES if family in found]
    return (
        Refusal(
            "devices", " and ".join(served), "GPUs of one of these, visible (CUDA_VISIBLE_DEVICES)"
        )
        if len(served) > 1
        else None
    )


NEEDS: tuple[Need, ...] = (
    arch(*FAMILIES),
    # float8_e4m3fn, all through and with scales, on SM100 alone.
    demand(
        "dtype",
        "float16 | bfloat16 (float8_e4m3fn on sm100)",
        lambda p: p.dtype != FLOAT8 or p.target.arch in (100, 103),
    ),
    demand("kv_scales", "no", lambda p: p.dtype not in HALF or not p.pages.kv_scales),
    head_dims,
    one_of("last_dim_contiguous", True),
)
TAKES = frozenset(
    {"causal", "window_left", "window_right", "softcap", "sinks", "q_scale", "k_scale", "v_scale"}
)
# A page that is a tile is loaded by TMA, stale keys past a request's end with it, and a weight of 0
# does not silence NaN.
whole_pages = demand("page_size", "not {p.page_size}, a tile", lambda p: p.page_size != tile(p))
# Read for SM90: tiles follow from head dims and rules, heads of a group share a tile whatever the
# length, and no key is split. Over pages a decode step of few requests wants splits, so that
# kernels with splits of a fixed size serve such a policy.
STEADY = Invariant((arch(90),))
for _run, _lse, _more, _steady in (
    (attention, "return_lse", (), STEADY),
    (varlen_attention, "return_lse", (), STEADY),
    (paged_attention, "lse", (whole_pages,), None),
):
    register(
        Kernel(
            "fa4",
            _run.__name__,
            _run,
            takes=TAKES | {_lse},
            dtypes=(*HALF, FLOAT8),
            needs=(*NEEDS, *_more),
            packages=PACKAGES,
            probe=one_family,
            # The tanh of a softcap is the hardware's approximation; lse, which is exact to float32
            # otherwise, shows it.
            tolerance=Tolerance(4.0),
            cost_us=_cost_us,
            invariant=_steady,
            about="FlashAttention-4 (CuTe DSL), compiled at first use",
        )
    )
