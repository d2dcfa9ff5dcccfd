"""The calls of a grid that a GPU leaves to the reference: those that `attnops tune` times, and training, masks, float8, sparse latents.

A Problem is data, so any machine answers for any GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from attnops import ops
from attnops.bench.rows import Row
from attnops.inputs import lengths, problem_of
from attnops.lowering.explain import explain, packages_of_kernels
from attnops.measured import Grid, in_force
from attnops.problem import Problem, Target
from attnops.select import Decision, select_by
from attnops.tune.shapes import FULL

H200 = Target("cuda", 90, packages_of_kernels(), "NVIDIA H200")
BF16, F32 = torch.bfloat16, torch.float32
LLAMA = (32, 8, 128, 128)
HEADS = {"32/8 d128": LLAMA, "12/12 d64": (12, 12, 64, 64), "16/8 d256": (16, 8, 256, 256), "16/16 d192/128": (16, 16, 192, 128)}
RULES: Mapping[str, Mapping[str, Any]] = {
    "causal": {"causal": True}, "not causal": {}, "window": {"causal": True, "window": (1023, 0)},
    "soft cap": {"causal": True, "softcap": 30.0}, "sinks": {"causal": True, "sinks": True}, "bool mask": {"mask": torch.bool},
    "additive mask": {"mask": BF16},
}  # fmt: skip
SIZES = ((1, 512), (2, 4096))
"""Requests and tokens of each."""

Named = Iterator[tuple[str, Callable[[], Any]]]


def problems(target: Target = H200) -> dict[str, Problem]:
    """The Problems of the grid on `target`, by name."""
    found = {}
    for plan in FULL:
        s = plan.shape
        for at in filter(plan.allows, Grid(s, plan.batch, plan.queries, plan.ratio, {}).points()):
            problem = problem_of(s, *lengths(s, at), target)
            found[f"{s.op}: {problem.summary()}"] = problem
    with FakeTensorMode():
        for name, call in (*_dense_calls(), *_cached_calls()):
            for site in explain(call, target=H200, quiet=True).sites:
                found[f"{site.decision.problem.op}: {name}"] = replace(site.decision.problem, target=target)
    return found


def left_to_reference(target: Target = H200) -> tuple[int, dict[str, Decision]]:
    """(number of calls, decisions of those that the reference answers by name)."""
    table, asked = in_force(target).table, problems(target)
    decided = {name: select_by(table, problem) for name, problem in asked.items()}
    return len(asked), {name: d for name, d in decided.items() if d.kernel is None or d.by_judge}


def row(target: Target = H200) -> Row:
    """The count as a row of a suite."""
    asked, left = left_to_reference(target)
    by_op = Counter(name.partition(":")[0] for name in left)
    more = {"calls": asked, "at_reference": len(left), "by_op": ", ".join(f"{op} {count}" for op, count in sorted(by_op.items()))}
    return Row("calls left to the reference", target.gpu or str(target), more=more)


def _empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _ints(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32)


def _dense_calls() -> Named:
    """`attention` and `varlen_attention`, with and without gradients."""

    def called(
        op: Callable[..., Any], dims: tuple[int, ...], batch: int, length: int, rules: Mapping[str, Any], **more: Any
    ) -> Callable[[], Any]:
        packed, trained, dtype = op is ops.varlen_attention, more.get("trained", False), more.get("dtype", BF16)
        hq, hkv, d, dv = dims
        rows = (batch * length,) if packed else (batch, length)
        given = {
            n: _empty(*rows, h, w, dtype=dtype).requires_grad_(trained)
            for n, h, w in (("query", hq, d), ("key", hkv, d), ("value", hkv, dv))
        }
        rest: dict[str, Any] = {"cu_seqlens_q": _ints(batch + 1), "cu_seqlens_k": _ints(batch + 1)} if packed else {}
        rest |= {"max_seqlen_q": length, "max_seqlen_k": length} if packed else {}
        if "mask" in rules:
            rest["mask"] = _empty(*((batch * length, length) if packed else (batch, 1, length, length)), dtype=rules["mask"])
        if "sinks" in rules:
            rest["sinks"] = _empty(hq)
        run = lambda: op(**given, **{**rules, **rest})  # noqa: E731
        return (lambda: run().sum().backward()) if trained else run

    for (heads, dims), (rule, rules), (batch, length) in product(HEADS.items(), RULES.items(), SIZES):
        name = f"{batch}x{length}, {heads}, {rule}"
        yield f"{name}, trained", called(ops.attention, dims, batch, length, rules, trained=True)
        yield f"{name}, trained", called(ops.varlen_attention, dims, batch, length, rules, trained=True)
        yield name, called(ops.varlen_attention, dims, batch, length, rules)
        if "mask" in rules:
            yield name, called(ops.attention, dims, batch, length, rules)
    wide = called(ops.attention, LLAMA, 2, 4096, {"causal": True}, trained=True, dtype=F32)
    yield "2x4096, 32/8 d128, causal, float32, trained", wide


def _cached_calls() -> Named:
    """Over pages, latents and sparse latents."""

    def over(batch: int, queries: int, keys: int, mask: torch.dtype | None, stored: torch.dtype | None) -> Callable[[], Any]:
        rows, page = batch * queries, 16 if stored else 64
        given: dict[str, Any] = {"page_table": _ints(batch, keys // page), "seq_lens": _ints(batch), "cu_seqlens_q": _ints(batch + 1)}
        given |= {"max_seqlen_q": queries} | ({} if mask is None else {"mask": _empty(rows, keys, dtype=mask)})
        if stored is None:
            latents = _empty(batch * keys // page, page, 576)
            return lambda: ops.mla_attention(_empty(rows, 128, 512), _empty(rows, 128, 64), latents, scale=0.07, **given)
        given |= {} if stored == BF16 else {n: _empty(1, dtype=F32) for n in ("k_scale", "v_scale")}
        pages = _empty(batch * keys // page, page, 8, 128, dtype=stored)
        return lambda: ops.paged_attention(_empty(rows, 32, 128), pages, pages, **given)

    for mask, (batch, queries, keys) in product((None, torch.bool, BF16), ((8, 1, 4096), (8, 4, 4096), (1, 512, 4096))):
        name = f"{batch}x{queries} of {keys}, " + {None: "no mask", torch.bool: "bool mask", BF16: "additive mask"}[mask]
        yield name, over(batch, queries, keys, mask, BF16)
        yield f"{name}, float8 pages", over(batch, queries, keys, mask, torch.float8_e4m3fn)
        yield name, over(batch, queries, keys, mask, None)

    def sparse(heads: int, packed: bool, tokens: int, sinks: bool) -> Callable[[], Any]:
        latents, query = _empty(512, 64, 656, dtype=torch.uint8) if packed else _empty(512, 64, 576), _empty(tokens, heads, 576)
        more: dict[str, Any] = {"sinks": _empty(heads, dtype=F32), "topk_length": _ints(tokens)} if sinks else {}
        return lambda: ops.sparse_mla_attention(query[..., :512], query[..., 512:], latents, _ints(tokens, 2048), scale=0.07, **more)

    for heads, packed, tokens, sinks in product((16, 64, 128), (False, True), (1, 64, 4096), (False, True)):
        name = f"{tokens} tokens, {heads} heads, {'packed' if packed else 'bfloat16'} latents" + ", sinks" * sinks
        yield name, sparse(heads, packed, tokens, sinks)
