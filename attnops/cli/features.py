"""The features of every kernel, found by querying it with typical Problems of its op and one feature at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from attnops.kernel import Kernel, all_kernels
from attnops.problem import Extent, Problem, Refusal, Target, altered

TARGETS = ("cpu", "sm80", "sm90", "sm100")
DENSE, PACKED, PAGED = "attention", "varlen_attention", "paged_attention"
MLA, SPARSE, STEP = "mla_attention", "sparse_mla_attention", "decode_attention"
WRITES = ("write_kv", "write_latent", "write_latent_packed")
ATTENTION = (DENSE, PACKED, PAGED, "attention_backward", "varlen_attention_backward")
BF16, F32, E4M3, I32, U8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int32, torch.uint8

Change = dict[str, Any]
_FLOAT8: Change = {"dtype": E4M3, "kv_dtype": E4M3, "kv_scales": True}
_WIDE_KEYS: Change = {"q_heads": 128, "kv_heads": 128, "head_dim": 192, "v_head_dim": 128}


class Feature(NamedTuple):
    """A column of the table: `change` turns a typical Problem of one of `ops` into one that asks for the feature."""

    name: str
    change: Change
    ops: tuple[str, ...] = ATTENTION


FEATURES = (
    Feature("float32", {"dtype": F32, "kv_dtype": F32}, (*ATTENTION, MLA, SPARSE, STEP, *WRITES[:2], "merge_state", "merge_states")),
    Feature("window", {"window": (1023, -1)}, (*ATTENTION, MLA, STEP)),
    Feature("softcap", {"softcap": True}, (*ATTENTION, MLA, STEP)),
    Feature("sinks", {"sinks": True, "sinks_dtype": BF16}, (*ATTENTION, MLA, SPARSE, STEP)),
    Feature("mask", {"mask": "additive"}, (*ATTENTION, MLA)),
    Feature("padding", {"kv_range": True}, (DENSE, "attention_backward")),
    Feature("lse", {"lse": True}, (DENSE, PACKED, PAGED, MLA, SPARSE)),
    Feature("heads 192/128", _WIDE_KEYS, ATTENTION[:2] + ATTENTION[3:]),
    Feature("float8 keys", {"kv_dtype": E4M3, "kv_scales": True}, (DENSE, PACKED, PAGED, MLA, SPARSE, *WRITES[:2])),
    Feature("float8 query", _FLOAT8, (DENSE, PACKED, PAGED, MLA)),
    Feature("equal bits", {"repeatable": "must"}, (*ATTENTION, MLA)),
    Feature("packed latents", {"kv_dtype": U8}, (SPARSE,)),
    Feature("chunk", {"attention_chunk": 8192}, ATTENTION),
    Feature("decode", {"queries": Extent(1, 1, 1), "tokens": Extent(8, 8, 8)}, (PAGED, MLA)),
    *(Feature(f"page {n}", {"page_size": n}, (PAGED, MLA, SPARSE, STEP, *WRITES)) for n in (1, 16, 64, 128)),
)

_NEW: Change = {"tokens": Extent.of(512)}
_BF16: Change = {"dtype": BF16, "kv_dtype": BF16}
_HEADS: Change = {**_BF16, "q_heads": 32, "kv_heads": 8, "head_dim": 128, "v_head_dim": 128}
_SIZES: Change = {"tokens": Extent.of(4096), "batch": Extent.of(8), "queries": Extent.of(512), "context": Extent.of(512)}
_PREFILL: Change = {**_HEADS, **_SIZES, "causal": True}
_EQUAL: Change = {**_PREFILL, "sizes_equal": True}
_DECODE: Change = {"tokens": Extent(8, 8, 8), "queries": Extent(1, 1, 1), "context": Extent.of(4096)}
_LATENT: Change = {"q_heads": 128, "kv_heads": 1, "head_dim": 576, "v_head_dim": 512}
_DEEPSEEK: Change = {**_BF16, **_LATENT, "rope_dim": 64, "page_size": 64}
_LATENT_WRITE: Change = {**_DEEPSEEK, "q_heads": 0, **_NEW}
_PAGES: Change = {**_HEADS, "q_heads": 0, "page_size": 64}
_MERGE: Change = {**_BF16, "q_heads": 32, "v_head_dim": 128, "lse": True, **_NEW}
# Large enough for any kernel. Callers allocate `attnops.explain(...).workspace_bytes`.
_PLANS: tuple[Change, ...] = ({"workspace": 1 << 40}, {"workspace": 1 << 40, "plan": "host"})

# Features are added to the first Problem that a kernel takes: a kernel for latents refuses the heads of a Llama.
_BASES: dict[str, tuple[Change, ...]] = {
    DENSE: (_EQUAL, _PREFILL | _DECODE),
    PACKED: (_PREFILL,),
    PAGED: tuple(
        {**_PREFILL, **more, **plan, "page_size": page}
        for plan in _PLANS
        for page in (64, 16, 128)
        for more in ({}, _DECODE, _DECODE | _LATENT)
    ),
    "plan_paged_attention": (_PREFILL | {"page_size": 64},),
    "attention_backward": (_EQUAL | {"grad": True},),
    "varlen_attention_backward": (_PREFILL | {"grad": True},),
    MLA: tuple({**_SIZES, **_DEEPSEEK, **more, **plan, "causal": True} for plan in _PLANS for more in ({}, _DECODE, _DECODE | _FLOAT8)),
    "plan_mla_attention": ({**_SIZES, **_DEEPSEEK, "causal": True},),
    STEP: ({**_HEADS, **_SIZES, **_DECODE, "page_size": 64, "workspace": 1 << 40},),
    SPARSE: ({**_DEEPSEEK, **_NEW, "context": Extent.of(2048)},),
    "write_latent_packed": (_LATENT_WRITE | {"kv_dtype": U8},),
    "rope_quantize_latent": ({**_DEEPSEEK, "kv_dtype": E4M3, "kv_scales": True, "page_size": 0, **_NEW},),
    "write_latent": (_LATENT_WRITE,),
    "write_kv": (_PAGES | _NEW,),
    "copy_kv": (_PAGES | {"tokens": Extent.of(64)},),
    "vertical_slash_attention": (_PREFILL,),
    "request_starts": ({"dtype": torch.bool, "kv_dtype": torch.bool, "tokens": Extent.of(4096), "batch": Extent(1, 1, 1)},),
    "merge_states": (_MERGE,),
    "merge_state": (_MERGE,),
    "mxfp4_experts": ({**_BF16, "in_features": 2880, "out_features": 2880, "experts": 32, "top_k": 4, "tokens": Extent(8, 8, 8)},),
    "experts": ({**_BF16, "in_features": 2048, "out_features": 768, "experts": 128, "top_k": 8, "tokens": Extent(8, 8, 8)},),
    "route": ({**_BF16, "experts": 128, "top_k": 8, "tokens": Extent(8, 8, 8)},),
    "linear": ({**_BF16, "in_features": 4096, "out_features": 6144, "tokens": Extent(8, 8, 8)},),
}
_NUMBERS: tuple[Change, ...] = ({"dtype": I32, "kv_dtype": I32, "page_size": 64, "tokens": Extent.of(8)},)


def problems(op: str, target: Target) -> tuple[Problem, ...]:
    """Typical Problems of `op` on `target`, the most usual first. An op not known here gets the Problem of a table of integers."""
    return tuple(Problem.of(op=op, target=target, **base) for base in _BASES.get(op, _NUMBERS))


def columns(op: str) -> tuple[Feature, ...]:
    """The features that make sense for `op`."""
    return tuple(f for f in FEATURES if op in f.ops)


class Support(NamedTuple):
    """`runs`: the targets on which the kernel takes a typical Problem. `takes`: by feature, the targets on which it takes that too."""

    kernel: Kernel
    runs: tuple[str, ...]
    takes: Mapping[str, tuple[str, ...]]


def support(kernel: Kernel) -> Support:
    """Query `kernel` for every target and feature, as if its packages were installed."""
    assume = tuple(p.module for p in kernel.packages)
    bases = list(zip(*(problems(kernel.op, Target.parse(t, assume)) for t in TARGETS), strict=True))

    def taken(asked: Iterable[Problem]) -> tuple[str, ...]:
        return tuple(t for t, p in zip(TARGETS, asked, strict=True) if not kernel.refusals(p))

    base = next(filter(taken, bases), bases[0])
    return Support(kernel, taken(base), {f.name: taken(altered(p, **f.change) for p in base) for f in columns(kernel.op)})


def why_not(kernel: Kernel, target: Target) -> tuple[Refusal, ...]:
    """Why `kernel` refuses every typical Problem on `target`: absent packages, or the shared refusals. Empty if it takes one."""
    if absent := kernel.absences(target):
        return absent
    asked = problems(kernel.op, target)
    answers = [kernel.refusals(p) for p in (*asked, *(altered(p, **f.change) for p in asked for f in columns(kernel.op)))]
    if not all(answers):
        return ()
    shared = set.intersection(*({r.field for r in reasons} for reasons in answers))
    return tuple(r for r in answers[0] if r.field in shared) or answers[0]


def ops_of_kernels() -> tuple[str, ...]:
    """Every op that has a kernel: the attention ops first, then the others in order of registration."""
    ops = dict.fromkeys(k.op for k in all_kernels())
    return (*(o for o in ATTENTION if o in ops), *(o for o in ops if o not in ATTENTION))
