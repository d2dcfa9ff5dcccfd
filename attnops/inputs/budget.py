"""How far from the exact result a kernel may be.

Written with u, the unit roundoff of the call's dtype; a, that of the accumulation dtype (float32, float64 for float64, 2^-14 for
float8 queries); D and Dv, the head dims; N, the most keys a query sees; L = |scale| max|q| max|k| max|temperature| + max|mask|, which
bounds the logits (max|x|: the largest Euclidean norm of a row); V = max|v|, the largest value. All are taken from the call's own data.

    delta(logit) = a (sqrt(D) + 4) L        products summed in the accumulation dtype, then scaled, capped and exponentiated
    delta(output) = (4 u + 2 delta(logit) + a (sqrt(N) + 4)) V
    delta(lse) = delta(logit) + a (sqrt(N) + 4) + 2^-23 max|lse|

4 u: the weights and the output are each rounded to the dtype once, with a factor of 2 for block-wise rescaling. A sum of n terms is
given the growth sqrt(n) of random roundings; blocked sums stay below it. A weight is exp of a logit, hence 2 delta(logit).

Gradients: each is a sum, bounded by the sum of its terms' sizes, S. With p the weights, in float64,
dP = |dO| |v|, ds = p (dP + sum_j p dP + |dlse|): S is max |scale| ds |k| for dq, |scale| ds |q| for dk, p |dO| for dv, ds for the
mask and exp(sink - lse) times the row sums of p dP + |dlse| for the sinks, summed over whatever broadcasts.

    delta(gradient) = (8 u + 4 delta(logit) + a (sqrt(n) + sqrt(D) + 4)) S      n: the most terms in one sum

The gradients of mask and sinks are also rounded to those' own dtypes.

Where weights are rounded to the query's dtype before they are added up (`Tolerance.rounded_sums`), their sum is off by one unit
roundoff of that dtype at most, and delta(lse) grows by it.

A kernel's `tolerance` multiplies every figure.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from attnops.inputs.call import QUANTISED, Call
from attnops.reference.attention import Rules, dense_visible, logsumexp, reduce_to, scores
from attnops.reference.latent_format import unpack

FLOAT8_SUMS = 2.0**-14
"""Error of a sum of float8 products, as SM90's tensor cores add them: 14 bits. DeepSeek-V3, https://arxiv.org/abs/2412.19437, 3.3.2."""

Allowed = dict[str, "float | Tensor"]


def roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding to `dtype`."""
    return torch.finfo(dtype).eps / 2


def _largest(x: Tensor | None) -> float:
    """Largest finite absolute entry; 0 for none."""
    if x is None or x.numel() == 0 or x.dtype == torch.bool:
        return 0.0
    return float(torch.nan_to_num(x.double().abs(), nan=0.0, posinf=0.0).amax())


def _norm(x: Tensor) -> float:
    """Largest norm of a row."""
    return float(x.double().norm(dim=-1).amax()) if x.numel() else 0.0


def _operands(t: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """query, key and value, the first and last dims being those of the call."""
    if "latent_pages" in t:
        query = torch.cat([_plain(t["q_nope"]), _plain(t["q_pe"])], -1)
        pages, latent, rope = t["latent_pages"], t["q_nope"].shape[-1], t["q_pe"].shape[-1]
        pages = unpack(pages, latent, rope) if pages.dtype == torch.uint8 else pages
        return query.to(t["q_nope"].dtype), pages, pages[..., :latent]
    return t["query"], *((t["k_pages"], t["v_pages"]) if "k_pages" in t else (t["key"], t["value"]))


def _plain(x: Tensor) -> Tensor:
    return x.float() if x.dtype in QUANTISED else x


class _Sizes:
    """The figures of the module's docstring for one call. `call`: free entries are zero."""

    def __init__(self, call: Call) -> None:
        t = call.tensors()
        query, key, value = _operands(t)
        q_factor = _largest(t.get("q_scale")) or 1.0
        k_scale, v_scale = (t.get("kv_scale"),) * 2 if "latent_pages" in t else (t.get("k_scale"), t.get("v_scale"))
        self.k_factor, self.v_factor = _largest(k_scale) or 1.0, _largest(v_scale) or 1.0
        # A quantised query is exact. The output is rounded and, except for latents, the weights to the query's dtype.
        self.rounding = roundoff(query.dtype)
        self.u = roundoff(t["output"].dtype if query.dtype in QUANTISED and "latent_pages" in t else query.dtype)
        self.a = FLOAT8_SUMS if query.dtype in QUANTISED and "latent_pages" not in t else min(self.u, roundoff(torch.float32))
        if "page_table" in t:
            keys = t["page_table"].shape[1] * key.shape[1]
        elif "indices" in t:
            keys = t["indices"].shape[1]
        else:
            keys = call.arguments.get("max_seqlen_k", key.shape[1])
        self.root_n, self.root_d = sqrt(keys), sqrt(query.shape[-1])
        self.scale = abs(float(call.arguments["scale"]))
        products = self.scale * _norm(query) * q_factor * _norm(key) * self.k_factor * (_largest(t.get("temperature")) or 1.0)
        self.logit = products + _largest(t.get("mask"))
        self.delta = self.a * (self.root_d + 4) * self.logit
        self.value = _largest(value) * self.v_factor


def allowance(call: Call, expected: Mapping[str, Tensor], rounded_sums: bool = False) -> Allowed:
    """The absolute error each result of `call` may have. `expected`: the exact results; free entries of the call are zero.

    rounded_sums: the kernel says that its lse adds up rounded weights.
    """
    if call.op in ("write_kv", "write_latent", "write_latent_packed"):
        return {}  # check.py compares it slot by slot
    if call.op == "copy_kv":
        return {}  # copies are exact
    if call.op == "merge_state":
        u = roundoff(call.arguments["output_a"].dtype)
        size = max(_largest(call.arguments["output_a"]), _largest(call.arguments["output_b"]))
        return {"output": (4 * u + 2**-20) * size, "lse": 2**-21 * (1 + _largest(expected["lse"]))}
    if call.op == "merge_states":
        u = roundoff(call.arguments["outputs"].dtype)
        root = sqrt(call.arguments["outputs"].shape[1])
        size = _largest(call.arguments["outputs"])
        return {"output": (4 * u + 2**-20 * root) * size, "lse": 2**-21 * root * (1 + _largest(expected["lse"]))}
    if call.op.endswith("_backward"):
        return _backward(call)
    if not {"query", "q_nope"} & call.arguments.keys():
        return {}  # integers: exact
    s = _Sizes(call)
    growth = s.a * (s.root_n + 4)
    allowed: Allowed = {"output": (4 * s.u + 2 * s.delta + growth) * s.value}
    if "lse" in expected:
        allowed["lse"] = s.delta + growth + 2**-23 * _largest(expected["lse"]) + s.rounding * rounded_sums
    return allowed


def _backward(call: Call) -> Allowed:
    s = _Sizes(call)
    parts = [_terms(part) for part in _requests(call)]
    queries = call.arguments.get("max_seqlen_q", call.arguments["query"].shape[1])
    group = call.arguments["query"].shape[-2] / call.arguments["key"].shape[-2]
    each = 8 * s.u + 4 * s.delta + s.a * (max(s.root_n, sqrt(queries * group)) + s.root_d + 4)
    largest = {n: max((_largest(p[n]) for p in parts), default=0.0) for n in ("grad_query", "grad_key", "grad_value", "grad_mask")}
    sinks = sum((p["grad_sinks"] for p in parts), torch.zeros(1, dtype=torch.float64))
    # Mask and sinks have dtypes of their own, to which their gradients are rounded.
    own = {f"grad_{n}": roundoff(t.dtype) for n in ("mask", "sinks") if (t := call.arguments.get(n)) is not None and t.is_floating_point()}
    return {n: (each + own.get(n, 0.0)) * size for n, size in (*largest.items(), ("grad_sinks", _largest(sinks)))}


def _requests(call: Call) -> list[dict[str, Any]]:
    """The call as dense calls in float64; one for each request of a varlen call."""
    given = {n: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in call.arguments.items()}
    if "cu_seqlens_q" not in given:
        return [given]
    out = []
    ends = zip(given["cu_seqlens_q"].tolist(), given["cu_seqlens_k"].tolist(), strict=True)
    for (q0, k0), (q1, k1) in pairwise(ends):
        rows: dict[str, Any] = {n: given[n][None, q0:q1] for n in ("query", "grad_output", "grad_lse") if n in given}
        rows |= {n: given[n][None, k0:k1] for n in ("key", "value")}
        if "mask" in given:
            rows["mask"] = given["mask"][None, None, q0:q1, : k1 - k0]
        out.append(given | rows)
    return out


def _terms(t: Mapping[str, Any]) -> dict[str, Tensor]:
    """S, the sum of the sizes of the terms, of every entry of every gradient."""
    query, key, value, grad, mask, sinks = t["query"], t["key"], t["value"], t["grad_output"], t.get("mask"), t.get("sinks")
    window = t.get("window_left", -1), t.get("window_right", -1)
    rules = Rules(t["scale"], t["causal"], *window, t.get("softcap", 0.0), t.get("attention_chunk", 0))
    logits = scores(query, key, dense_visible(query, key, t.get("kv_start"), t.get("kv_end"), rules), mask, rules)
    lse = logsumexp(logits, sinks)[..., None]
    lse = torch.where(lse == float("-inf"), torch.zeros_like(lse), lse)
    weight = torch.exp(logits - lse)
    group = query.shape[2] // key.shape[2]
    g, q = grad.abs().transpose(1, 2), query.abs().transpose(1, 2)
    k, v = (x.abs().transpose(1, 2).repeat_interleave(group, 1) for x in (key, value))
    pairs = g @ v.transpose(2, 3)
    rest = (weight * pairs).sum(-1, keepdim=True)
    if t.get("grad_lse") is not None:
        rest = rest + t["grad_lse"].abs().transpose(1, 2)[..., None]
    ds = weight * (pairs + rest)
    scaled = ds * abs(rules.scale)

    def per_key_head(x: Any) -> Any:
        return x.unflatten(1, (key.shape[2], group)).sum(2)

    sink = torch.zeros(1, dtype=torch.float64) if sinks is None else (torch.exp(sinks[None, :, None, None] - lse) * rest).sum((0, 2, 3))
    return {
        "grad_query": scaled @ k,
        "grad_key": per_key_head(scaled.transpose(2, 3) @ q),
        "grad_value": per_key_head(weight.transpose(2, 3) @ g),
        "grad_mask": ds if mask is None else reduce_to(ds, mask),
        "grad_sinks": sink.cpu(),
    }


def stored(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """The allowed error of a number stored as `dtype`, from `exact` (float64, saturated): half a step; 0 if not quantised."""
    if dtype not in QUANTISED:
        return torch.zeros_like(exact)
    if dtype == torch.int8:
        return torch.full_like(exact, 0.5 + 2**-10)
    info = torch.finfo(dtype)
    # Below the smallest normal number the steps no longer shrink. 1 + 2^-10: the division may have been made in float32.
    return torch.clamp(exact.abs(), min=info.smallest_normal) * (info.eps / 2) * (1 + 2**-10)
