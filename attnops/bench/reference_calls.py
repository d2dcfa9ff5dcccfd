"""The calls of a grid that a GPU leaves to the reference: those that `attnops tune` times, and training, masks, float8, sparse latents.

A Problem is data, so any machine answers for any GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from attnops import ops
from attnops.bench.rows import Row
from attnops.inputs import lengths, problem_of
from attnops.lowering.explain import explain, packages_of_kernels
from attnops.measured import in_force
from attnops.problem import Problem, Target
from attnops.select import Decision, select_by
from attnops.tune.shapes import FULL

H200 = Target("cuda", 90, packages_of_kernels(), "NVIDIA H200")
BF16, F32 = torch.bfloat16, torch.float32
HEADS = {
    "32/8 d128": (32, 8, 128, 128),
    "12/12 d64": (12, 12, 64, 64),
    "16/8 d256": (16, 8, 256, 256),
    "16/16 d192/128": (16, 16, 192, 128),
}
RULES: Mapping[str, Mapping[str, Any]] = {
    "causal": {"causal": True}, "not causal": {}, "window": {"causal": True, "window": (1023, 0)},
    "soft cap": {"causal": True, "softcap": 30.0}, "sinks": {"causal": True, "sinks": True}, "bool mask": {"mask": torch.bool},
    "additive mask": {"mask": BF16},
}  # fmt: skip
SIZES = ((1, 512), (2, 4096))
"""Requests and tokens of each."""

MASKS = {None: "no mask", torch.bool: "bool mask", BF16: "additive mask"}


def problems(target: Target = H200) -> dict[str, Problem]:
    """The Problems of the grid on `target`, by name."""
    timed = [problem_of(p.shape, *lengths(p.shape, at), target) for p in FULL for at in p.points() if p.allows(at)]
    found = {f"{problem.op}: {problem.summary()}": problem for problem in timed}
    with FakeTensorMode():
        for name, call in (*_dense_calls(), *_paged_calls(), *_sparse_calls()):
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


Named = Iterator[tuple[str, Callable[[], Any]]]


def _empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _ints(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32)


def _dense_calls() -> Named:
    """`attention` and `varlen_attention`, with and without gradients."""
    for op, trained, (heads, dims), (rule, rules), (batch, length) in product(
        (ops.attention, ops.varlen_attention), (False, True), HEADS.items(), RULES.items(), SIZES
    ):
        if trained or op is ops.varlen_attention or "mask" in rules:
            yield f"{batch}x{length}, {heads}, {rule}" + ", trained" * trained, _dense(op, dims, batch, length, rules, trained)
    wide = _dense(ops.attention, HEADS["32/8 d128"], 2, 4096, {"causal": True}, True, F32)
    yield "2x4096, 32/8 d128, causal, float32, trained", wide


def _dense(
    op: Callable[..., Any], dims: tuple[int, ...], batch: int, length: int, rules: Mapping[str, Any], trained: bool, dtype: Any = BF16
) -> Callable[[], Any]:  # fmt: skip
    packed, (heads, kv_heads, dim, v_dim) = op is ops.varlen_attention, dims
    rows, sizes = ((batch * length,), (batch * length, length)) if packed else ((batch, length), (batch, 1, length, length))
    shapes = {"query": (heads, dim), "key": (kv_heads, dim), "value": (kv_heads, v_dim)}
    given: dict[str, Any] = {n: _empty(*rows, *shape, dtype=dtype).requires_grad_(trained) for n, shape in shapes.items()} | dict(rules)
    if packed:
        given |= {"cu_seqlens_q": _ints(batch + 1), "cu_seqlens_k": _ints(batch + 1), "max_seqlen_q": length, "max_seqlen_k": length}
    given |= {"mask": _empty(*sizes, dtype=rules["mask"])} if "mask" in rules else {}
    given |= {"sinks": _empty(heads)} if "sinks" in rules else {}
    return (lambda: op(**given).sum().backward()) if trained else lambda: op(**given)


def _paged_calls() -> Named:
    """Over pages and over latents."""
    for (mask, masked), (batch, queries, keys) in product(MASKS.items(), ((8, 1, 4096), (8, 4, 4096), (1, 512, 4096))):
        name, rows = f"{batch}x{queries} of {keys}, {masked}", batch * queries
        for page, stored in ((16, BF16), (16, torch.float8_e4m3fn), (64, None)):
            given: dict[str, Any] = {"page_table": _ints(batch, keys // page), "seq_lens": _ints(batch), "cu_seqlens_q": _ints(batch + 1)}
            given |= {"max_seqlen_q": queries} | ({} if mask is None else {"mask": _empty(rows, keys, dtype=mask)})
            if stored is None:
                latents = (_empty(rows, 128, 512), _empty(rows, 128, 64), _empty(batch * keys // page, page, 576))
                yield name, partial(ops.mla_attention, *latents, scale=0.07, **given)
                continue
            scaled, pages = stored != BF16, _empty(batch * keys // page, page, 8, 128, dtype=stored)
            given |= {n: _empty(1, dtype=F32) for n in ("k_scale", "v_scale")} if scaled else {}
            yield name + ", float8 pages" * scaled, partial(ops.paged_attention, _empty(rows, 32, 128), pages, pages, **given)


def _sparse_calls() -> Named:
    for heads, packed, tokens, sinks in product((16, 64, 128), (False, True), (1, 64, 4096), (False, True)):
        latents, query = _empty(512, 64, 656, dtype=torch.uint8) if packed else _empty(512, 64, 576), _empty(tokens, heads, 576)
        more: dict[str, Any] = {"sinks": _empty(heads, dtype=F32), "topk_length": _ints(tokens)} if sinks else {}
        name = f"{tokens} tokens, {heads} heads, {'packed' if packed else 'bfloat16'} latents" + ", sinks" * sinks
        yield name, partial(ops.sparse_mla_attention, query[..., :512], query[..., 512:], latents, _ints(tokens, 2048), scale=0.07, **more)
