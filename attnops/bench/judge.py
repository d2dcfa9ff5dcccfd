"""How many calls of a grid a GPU leaves to the reference: what `attnops tune` times, and what no table has.

The calls that tune times, training, masks, float8 pages, sparse latents. A Problem is data, so any machine answers for any GPU.
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
from attnops.bench.verdict import Row
from attnops.lowering.explain import explain, packages_of_kernels
from attnops.measured import Grid, in_force
from attnops.problem import Problem, Target
from attnops.select import Decision, select_by
from attnops.tune.calls import problem_of
from attnops.tune.run import lengths
from attnops.tune.shapes import FULL

H200 = Target("cuda", 90, packages_of_kernels(), "NVIDIA H200")
BF16, F32 = torch.bfloat16, torch.float32
LLAMA = (32, 8, 128, 128)
HEADS = {"32/8 d128": LLAMA, "12/12 d64": (12, 12, 64, 64), "16/8 d256": (16, 8, 256, 256), "16/16 d192/128": (16, 16, 192, 128)}
RULES: Mapping[str, Mapping[str, Any]] = {
    "causal": {"causal": True},
    "not causal": {},
    "window": {"causal": True, "window": (1023, 0)},
    "soft cap": {"causal": True, "softcap": 30.0},
    "sinks": {"causal": True, "sinks": True},
    "bool mask": {"mask": torch.bool},
    "additive mask": {"mask": BF16},
}
SIZES = ((1, 512), (2, 4096))
"""Requests and tokens of each."""


def problems(target: Target = H200) -> dict[str, Problem]:
    """The grid's calls as selection sees them on `target`, by name."""
    found = {}
    for plan in FULL:
        s = plan.shape
        for at in filter(plan.allows, Grid(s, plan.batch, plan.queries, plan.ratio, {}).points()):
            problem = problem_of(s, *lengths(s, at), target)
            found[f"{s.op}: {problem.summary()}"] = problem
    with FakeTensorMode():
        for name, call in _calls():
            for site in explain(call, target=H200, quiet=True).sites:
                found[f"{site.decision.problem.op}: {name}"] = replace(site.decision.problem, target=target)
    return found


def left_to_reference(target: Target = H200) -> tuple[int, dict[str, Decision]]:
    """How many calls the grid has, and the decisions by name of those that the reference answers."""
    table, asked = in_force(target).table, problems(target)
    decided = {name: select_by(table, problem) for name, problem in asked.items()}
    return len(asked), {name: d for name, d in decided.items() if d.kernel is None or d.by_judge}


def row(target: Target = H200) -> Row:
    """The count as a row of a suite, with the calls by op."""
    asked, left = left_to_reference(target)
    by_op = Counter(name.partition(":")[0] for name in left)
    more = {"calls": asked, "at_reference": len(left), "by_op": ", ".join(f"{op} {count}" for op, count in sorted(by_op.items()))}
    return Row("calls left to the reference", target.gpu or str(target), more=more)


def _calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    """On fake tensors: calls by name."""
    for (heads, dims), (rule, more), (batch, length) in product(HEADS.items(), RULES.items(), SIZES):
        name = f"{batch}x{length}, {heads}, {rule}"
        yield f"{name}, trained", _trained(ops.attention, _dense(batch, length, dims), more)
        yield f"{name}, trained", _trained(ops.varlen_attention, _packed(batch, length, dims), more)
        yield name, _called(ops.varlen_attention, _packed(batch, length, dims), more)
        if "mask" in more:
            yield name, _called(ops.attention, _dense(batch, length, dims), more)
    yield "2x4096, 32/8 d128, causal, float32, trained", _trained(ops.attention, _dense(2, 4096, LLAMA, F32), {"causal": True})
    for mask, (batch, queries, keys) in product((None, torch.bool, BF16), ((8, 1, 4096), (8, 4, 4096), (1, 512, 4096))):
        name = f"{batch}x{queries} of {keys}, " + {None: "no mask", torch.bool: "bool mask", BF16: "additive mask"}[mask]
        yield name, _over_pages(batch, queries, keys, mask)
        yield f"{name}, float8 pages", _over_pages(batch, queries, keys, mask, torch.float8_e4m3fn)
        yield name, _over_latents(batch, queries, keys, mask)
    for heads, packed, tokens, sinks in product((16, 64, 128), (False, True), (1, 64, 4096), (False, True)):
        name = f"{tokens} tokens, {heads} heads, {'packed' if packed else 'bfloat16'} latents" + ", sinks" * sinks
        yield name, _sparse(heads, packed, tokens, sinks)


def _tensor(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _ints(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32)


def _dense(batch: int, length: int, dims: tuple[int, ...], dtype: torch.dtype = BF16) -> dict[str, Any]:
    hq, hkv, d, dv = dims
    query, key, value = (_tensor(batch, length, h, n, dtype=dtype) for h, n in ((hq, d), (hkv, d), (hkv, dv)))
    return {"query": query, "key": key, "value": value, "mask_shape": (batch, 1, length, length)}


def _packed(batch: int, length: int, dims: tuple[int, ...]) -> dict[str, Any]:
    found = {n: x.flatten(0, 1) if isinstance(x, Tensor) else x for n, x in _dense(batch, length, dims).items()}
    cu = {"cu_seqlens_q": _ints(batch + 1), "cu_seqlens_k": _ints(batch + 1), "max_seqlen_q": length, "max_seqlen_k": length}
    return found | cu | {"mask_shape": (batch * length, length)}


def _called(op: Callable[..., Any], given: dict[str, Any], more: Mapping[str, Any]) -> Callable[[], Any]:
    shape, arguments = given["mask_shape"], {n: x for n, x in given.items() if n != "mask_shape"} | dict(more)
    if "mask" in more:
        arguments["mask"] = _tensor(*shape, dtype=more["mask"])
    if "sinks" in more:
        arguments["sinks"] = _tensor(given["query"].shape[-2])
    return lambda: op(**arguments)


def _trained(op: Callable[..., Any], given: dict[str, Any], more: Mapping[str, Any]) -> Callable[[], Any]:
    leaves = {n: x.detach().requires_grad_() if n in ("query", "key", "value") else x for n, x in given.items()}
    run = _called(op, leaves, more)
    return lambda: run().sum().backward()


def _over_pages(batch: int, queries: int, keys: int, mask: torch.dtype | None, stored: torch.dtype = BF16) -> Callable[[], Any]:
    pages = _tensor(batch * keys // 16, 16, 8, 128, dtype=stored)
    given: dict[str, Any] = _paged(batch, queries, keys, 16)
    given |= {} if mask is None else {"mask": _tensor(batch * queries, keys, dtype=mask)}
    given |= {} if stored == BF16 else {n: _tensor(1, dtype=F32) for n in ("k_scale", "v_scale")}
    return lambda: ops.paged_attention(_tensor(batch * queries, 32, 128), pages, pages, **given)


def _over_latents(batch: int, queries: int, keys: int, mask: torch.dtype | None) -> Callable[[], Any]:
    latents, rows = _tensor(batch * keys // 64, 64, 576), batch * queries
    given: dict[str, Any] = _paged(batch, queries, keys, 64) | ({} if mask is None else {"mask": _tensor(rows, keys, dtype=mask)})
    return lambda: ops.mla_attention(_tensor(rows, 128, 512), _tensor(rows, 128, 64), latents, scale=0.07, **given)


def _paged(batch: int, queries: int, keys: int, page: int) -> dict[str, Any]:
    tables = {"page_table": _ints(batch, keys // page), "seq_lens": _ints(batch), "cu_seqlens_q": _ints(batch + 1)}
    return {**tables, "max_seqlen_q": queries}


def _sparse(heads: int, packed: bool, tokens: int, sinks: bool) -> Callable[[], Any]:
    latents = _tensor(512, 64, 656, dtype=torch.uint8) if packed else _tensor(512, 64, 576)
    query = _tensor(tokens, heads, 576)
    more: dict[str, Any] = {"sinks": _tensor(heads, dtype=F32), "topk_length": _ints(tokens)} if sinks else {}
    return lambda: ops.sparse_mla_attention(query[..., :512], query[..., 512:], latents, _ints(tokens, 2048), scale=0.07, **more)
