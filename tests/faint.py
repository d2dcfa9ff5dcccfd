"""Faint rows, whose logits are all finite and below -1e6: what every kernel owes them, and the rows
beside them.

Two calls that differ in these rows alone: in the calm one they see no key, or are all zeros, and
have no gradient. The results of all other rows are those of the calm call, within its budget.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from attnops.core.kernel import Kernel, kernels_of
from attnops.testing import Call, Features, Source, gradient_call, make_call, oracle
from attnops.testing.check import compare
from attnops.testing.error_bounds import allowance

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
PLAIN = Features(head_dim=64, q_heads=4, kv_heads=2, lse=True)
MASKED = replace(PLAIN, mask="additive", head_dim=16)
FORWARD = ("attention", "varlen_attention", "paged_attention", "mla_attention")
BACKWARD = ("attention_backward", "varlen_attention_backward")
WAYS = ("lowest", "billion", "products")
"""A mask of the least number of its dtype, one of -1e9, and products."""


def forward(op: str, f: Features, device: str) -> Call:
    source = Source(1, device)
    if op == "attention":
        return make_call("attention", source, 2, 5, 9, f)
    if op == "varlen_attention":
        return make_call("varlen_attention", source, (5, 3), (9, 7), f, padding=(0, 0))
    if op == "paged_attention":
        return make_call("paged_attention", source, (5, 3), (9, 7), 4, f, padding=0)
    return make_call(
        "mla_attention",
        source,
        (5, 3),
        (9, 7),
        4,
        replace(f, head_dim=20, v_head_dim=16),
        padding=0,
    )


@dataclass(frozen=True)
class Pair:
    """The two calls. faint: bool `[..., rows, heads]`, as lse."""

    wild: Call
    calm: Call
    faint: Tensor


def pair(op: str, way: str, dtype: torch.dtype, device: str = "cpu") -> Pair:
    """Forward calls. In those with a mask, the rows that it hides, all or some keys, are faint, or
    keep their other keys."""
    if way == "products":
        return _by_products(op, dtype, device)
    calm = forward(op, replace(MASKED, dtype=dtype), device)
    mask = calm.arguments["mask"]
    low = torch.finfo(dtype).min if way == "lowest" else -1e9
    wild = calm.with_(mask=mask.masked_fill(mask == float("-inf"), low))
    return Pair(wild, calm, _lse(calm) == float("-inf"))


def _by_products(op: str, dtype: torch.dtype, device: str) -> Pair:
    """One number of every key is large, and 0 in all queries but one."""
    low, ones = (-2e3, 2e3) if dtype == F16 else (-1e15, 1.0)
    call = forward(op, replace(PLAIN, dtype=dtype, scale=1.0), device)
    query, key = call.arguments["query"].clone(), call.arguments["key"].clone()
    row = (0,) * (query.dim() - 2)
    query[..., 0], key[..., 0] = 0.0, ones
    query[row] = 0.0
    calm = call.with_(query=query, key=key)
    query = query.clone()
    first = (*row, ..., 0)
    query[first] = low
    wild = call.with_(query=query, key=key)
    return Pair(wild, calm, _lse(wild) < -1e6)


def _lse(call: Call) -> Tensor:
    expected = oracle(call.with_(return_lse=True) if "return_lse" in call.spec.names else call)
    return expected["lse"]


def gradients(of: Pair, kernel: Kernel, loud: bool, unseen: bool) -> Pair:
    """Backward calls, with the gradient of a mask where the kernel has it.

    loud: the faint rows' output has a gradient. unseen: their lse is -inf, as of a forward in which
    they see no key.
    """
    graded = "mask_grad" in kernel.takes and "mask" in of.wild.arguments
    wild, calm = (
        gradient_call(Source(2, of.faint.device), call, mask_grad=graded)
        for call in (of.wild, of.calm)
    )
    here = of.faint[..., None]
    quiet = {"grad_output": wild.arguments["grad_output"].masked_fill(here, 0.0)}
    wild = wild if loud else wild.with_(**quiet)
    if unseen:
        wild = wild.with_(lse=wild.arguments["lse"].masked_fill(of.faint, float("-inf")))
    return Pair(wild, calm.with_(**quiet), of.faint)


def check(kernel: Kernel, of: Pair, shared: bool = True) -> None:
    """Run a kernel on the wild call, without lse where it gives none. shared: compare results that
    rows share, too."""
    wild = of.wild
    if any(r.field == "lse" for r in kernel.refusals(wild.problem)):
        wild = wild.with_(lse=None, return_lse=None)
    if refused := kernel.refusals(wild.problem):
        pytest.skip("; ".join(map(str, refused)))
    with torch.no_grad():
        found = kernel.run(wild.record)
    names = [r.name for r in wild.spec.results]
    results = (
        dict(zip(names, found, strict=True))
        if names
        else {n: wild.arguments[n] for n in wild.mutated}
    )
    expected = oracle(of.calm)
    allowed = allowance(of.calm, expected, kernel.tolerance.rounded_sums)
    assert of.faint.any() and not of.faint.all()
    for name, got in results.items():
        if not got.numel():
            continue
        where, want = f"{kernel.op}.{kernel.name}: {name}", expected[name]
        if name not in ("output", "lse", "grad_query", "grad_mask"):
            assert torch.isfinite(got).all(), where
            if shared:
                compare(where, got, want, allowed[name], kernel.tolerance.factor)
            continue
        rows = of.faint if name == "lse" else of.faint[..., None]
        if name == "grad_mask":
            rows = of.faint.transpose(1, 2)[..., None]
        rows = rows.expand(got.shape)
        assert torch.isfinite(got[rows]).all(), where
        compare(where, got[~rows], want[~rows], allowed[name], kernel.tolerance.factor)


def checked(kernel: Kernel, way: str, dtype: torch.dtype, device: str = "cpu") -> None:
    """Calls of the kernel's op with faint rows; gradients with and without one of their output, of
    lse both ways."""
    of = pair(kernel.op.removesuffix("_backward"), way, dtype, device)
    if not kernel.op.endswith("_backward"):
        check(kernel, of)
        return
    for loud in (False, True):
        for unseen in (False, True):
            check(kernel, gradients(of, kernel, loud, unseen), shared=not loud)


def runs() -> list[tuple[str, str, str, torch.dtype]]:
    """(op, kernel, way, dtype) of every kernel that might take such a call."""
    found = []
    for op in (*FORWARD, *BACKWARD):
        ways = WAYS if op.endswith("_backward") else WAYS[:2]
        for kernel in kernels_of(op).values():
            for way, dtype in ((way, dtype) for way in ways for dtype in (BF16, F32, F16)):
                # The least number of float16 is above -1e6, and -1e9 is -inf.
                told = (
                    way == "products"
                    if dtype == F16
                    else "mask" in kernel.takes or way == "products"
                )
                if told and dtype in kernel.dtypes:
                    found.append((op, kernel.name, way, dtype))
    return found


def merges(kernel: Kernel) -> None:
    """Of partial results whose lse is that of faint rows, in all parts of some rows and in one part
    of others."""
    shape = (5, 4, 16) if kernel.op == "merge_state" else (5, 3, 4, 16)
    calm = make_call(kernel.op, Source(1), shape, F32)
    lses = {n: t.clone() for n, t in calm.tensors().items() if n.startswith("lse")}
    for lse in lses.values():
        lse[0] = torch.finfo(F32).min
        lse[1] = -1e9
    first = next(iter(lses.values()))
    first[2] = torch.finfo(F32).min
    found = [kernel.run(call.record) for call in (calm.with_(**lses), calm)]
    for faint, plain in zip(*found, strict=True):
        assert torch.isfinite(faint).all()
        assert torch.equal(faint[3:], plain[3:])
