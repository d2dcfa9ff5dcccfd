"""How far from the exact result a kernel may be.

Written with u, the unit roundoff of the call's dtype; a, that of the accumulation dtype (float32, float64 for float64, 2^-14 for
float8 queries); D and Dv, the head dims; N, the most keys a query sees; L = |scale| max|q| max|k| max|temperature| + max|mask|, which
bounds the logits (max|x|: the largest Euclidean norm of a row); V = max|v|, the largest value. All are taken from the call's own data.

    delta(logit) = a (sqrt(D) + 4) L        products summed in the accumulation dtype, then scaled, capped and exponentiated
    delta(output) = (4 u + 2 delta(logit) + a (sqrt(N) + 4)) V
    delta(lse) = delta(logit) + a (sqrt(N) + 4) + 2^-23 max|lse|

4 u: the weights and the output are each rounded to the dtype once, with a factor of 2 for block-wise rescaling. A sum of n terms is
given the growth sqrt(n) of random roundings; blocked sums stay below it. A weight is exp of a logit, hence 2 delta(logit).

A decode step that norms and rotates by itself rounds query and new key to the dtype after that. Their figures are those of the exact
ones, and r = u + a (sqrt(D) + 8) is the error of a number as a share of its head's length:

    delta(logit) = (a (sqrt(D) + 4) + 2 r) L        delta(stored key) = r max|k|

Gradients: each is a sum, bounded by the sum of its terms' sizes, S. With p the weights, in float64,
dP = |dO| |v|, ds = p (dP + sum_j p dP + |dlse|): S is max |scale| ds |k| for dq, |scale| ds |q| for dk, p |dO| for dv, ds for the
mask and exp(sink - lse) times the row sums of p dP + |dlse| for the sinks, summed over whatever broadcasts.

    delta(gradient) = (8 u + 4 delta(logit) + a (sqrt(n) + sqrt(D) + 4)) S      n: the most terms in one sum

The gradients of mask and sinks are also rounded to those' own dtypes.

Linear layers, of row x, weight row w and gain g: with n = x g rsqrt(mean(x^2) + eps), or n = x, S = sum |n w| + |bias| of a result y before
the activation, R = |y| + sqrt(sum (n w)^2) + |bias|, the size of its partial sums, and s half the least subnormal step,

    delta(y) = 4 (u R + s) + a (sqrt(In) + 8) S

norm, gain, their product and y itself are each rounded at most once, and roundings of different numbers are independent. With an
activation, whose slope is below 1.13, of gate y and up z,

    delta(output) = 1.13 delta(y) (|z| + delta(z)) + |y| delta(z) + (3 u + 8 a) |y z|

and with a residual r, delta(output) + u (|output| + |r|).

Experts of a mixture: nothing is rounded before the first product. With R, S and s of a product as above,

    delta(y) = 2 (u R + s) + a (sqrt(In) + 8) S

delta(h) follows as above with 5 u, and 3 s more. The second product, of row w and weight g of the choice, gives with R and S of h and w,

    delta(output) = sqrt(sum g^2 (sum delta(h)^2 w^2 + (4 (u R + s))^2)) + sum |g| a (sqrt(Inner) + sqrt(K) + 8) S + u |output| + (K + 1) s

The routing of a mixture chooses the exact experts. With L the largest finite logit,

    delta(weight) = (2 u + a (2 sqrt(E) + 16 + 4 L)) |weight| + s

for the exponent of a logit less another is rounded to a L; exponentials, sums and quotients have some roundings each. 2 u: a conversion to
the dtype may cut off.

Where weights are rounded to the query's dtype before they are added up (`Tolerance.rounded_sums`), their sum is off by one unit
roundoff of that dtype at most, and delta(lse) grows by it.

A kernel's `tolerance` multiplies every figure.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from attnops.core.tensors import Rules, dense_visible
from attnops.ops.attention.reference import padded, reduce_to, scores, softmax
from attnops.ops.experts.mxfp4_reference import decoded_call
from attnops.ops.experts.reference import gated
from attnops.ops.pages.decode_reference import turned
from attnops.ops.sparse.packed_format import unpack
from attnops.testing.calls import QUANTISED, Call

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


def _operands(t: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """query, key and value, the first and last dims being those of the call."""
    if "latent_pages" not in t:
        return t["query"], *((t["k_pages"], t["v_pages"]) if "k_pages" in t else (t["key"], t["value"]))
    pages, latent, rope = t["latent_pages"], t["q_nope"].shape[-1], t["q_pe"].shape[-1]
    pages = unpack(pages, latent, rope) if pages.dtype == torch.uint8 else pages
    return torch.cat([t["q_nope"].double(), t["q_pe"].double()], -1), pages, pages[..., :latent]


class _Sizes:
    """The figures of the module's docstring for one call. `call`: free entries are zero."""

    def __init__(self, call: Call) -> None:
        t = call.tensors()
        latents, dtype = "latent_pages" in t, t["q_nope" if "q_nope" in t else "query"].dtype
        query, key, value = _operands(t)
        turns = call.op == "decode_attention"
        self.stored = 0.0
        norms = _largest(query.double().norm(dim=-1)) * _largest(key.double().norm(dim=-1))
        if turns:
            new = turned(call.map(lambda _, x: x.double() if x.is_floating_point() else x).record)
            longest = [_largest(x.norm(dim=-1)) for x in (*new, key.double())]
            norms, self.stored = longest[0] * max(longest[1:]), longest[1]
            value = torch.cat([value.flatten(), t["value"].flatten()])
        # A quantised query is exact. The output is rounded and, except for latents, the weights to the query's dtype.
        self.rounding = roundoff(dtype)
        self.u = roundoff(t["output"].dtype if dtype in QUANTISED and latents else dtype)
        self.a = FLOAT8_SUMS if dtype in QUANTISED and not latents else min(self.u, roundoff(torch.float32))
        if "page_table" in t:
            keys = t["page_table"].shape[1] * key.shape[1]
        elif "indices" in t:
            keys = t["indices"].shape[1]
        else:
            keys = call.arguments.get("max_seqlen_k", key.shape[1])
        self.root_n, self.root_d = sqrt(keys), sqrt(query.shape[-1])
        factor = {n: _largest(t.get(n)) or 1.0 for n in ("q_scale", "k_scale", "v_scale", "kv_scale", "temperature")}
        logit = abs(call.arguments["scale"]) * norms * factor["q_scale"] * factor["k_scale"] * factor["kv_scale"] * factor["temperature"]
        self.delta = self.a * (self.root_d + 4) * (logit + _largest(t.get("mask")))
        once = self.u + self.a * (self.root_d + 8)
        self.delta, self.stored = self.delta + 2 * once * logit * turns, self.stored * once
        self.value = _largest(value) * factor["v_scale"] * factor["kv_scale"]


def allowance(call: Call, expected: Mapping[str, Tensor], rounded_sums: bool = False) -> Allowed:
    """The absolute error each result of `call` may have. `expected`: the exact results; free entries of the call are zero.

    rounded_sums: the kernel says that its lse adds up rounded weights.
    """
    if call.op in ("merge_state", "merge_states"):
        outputs = [t for n, t in call.tensors().items() if n.startswith("output")]
        root, size = sqrt(outputs[0].shape[1]) if call.op == "merge_states" else 1.0, max(map(_largest, outputs))
        return {"output": (4 * roundoff(outputs[0].dtype) + 2**-20 * root) * size, "lse": 2**-21 * root * (1 + _largest(expected["lse"]))}
    if call.op.endswith("_backward"):
        return _backward(call)
    if call.op == "linear":
        return {"output": _linear(call, expected["output"])}
    if call.op in ("experts", "mxfp4_experts"):
        return {"output": _experts(call, expected["output"])}
    if call.op == "route":
        return {"weights": _route(call, expected["weights"])}
    if not {"query", "q_nope"} & call.arguments.keys():
        return {}  # integers and copies: exact
    s = _Sizes(call)
    growth = s.a * (s.root_n + 4)
    allowed: Allowed = {"output": (4 * s.u + 2 * s.delta + growth) * s.value}
    if call.op == "decode_attention":
        allowed["k_pages"] = s.stored
    if "lse" in expected:
        allowed["lse"] = s.delta + growth + 2**-23 * _largest(expected["lse"]) + s.rounding * rounded_sums
    return allowed


def _product(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(y, R, S) of a product."""
    y, sizes = x @ weight + bias, x.abs() @ weight.abs() + bias.abs()
    return y, y.abs() + (x.square() @ weight.square()).sqrt() + bias.abs(), sizes


def _step(dtype: torch.dtype) -> float:
    """Half the least subnormal step."""
    return roundoff(dtype) * torch.finfo(dtype).smallest_normal


def _linear(call: Call, expected: Tensor) -> Tensor:
    t, width = {n: x.double() for n, x in call.tensors().items()}, call.arguments["x"].shape[1]
    u = roundoff(call.arguments["x"].dtype)
    a = min(u, roundoff(torch.float32))
    x = t["x"]
    if "norm_weight" in t:
        gain = t["norm_weight"] + call.arguments.get("norm_offset", 0.0)
        x = x * gain * torch.rsqrt(x.square().mean(-1, keepdim=True) + call.arguments["norm_eps"])
    y, partial, sizes = _product(x, t["weight"].T, t.get("bias", x.new_zeros(())))
    off = 4 * (u * partial + _step(call.arguments["x"].dtype)) + a * (sqrt(width) + 8) * sizes
    if call.arguments.get("activation"):
        (gate, up), (off, off_up) = y.abs().chunk(2, -1), off.chunk(2, -1)
        off = 1.13 * off * (up + off_up) + gate * off_up + (3 * u + 8 * a) * gate * up
    return off + u * (expected.abs() + t["residual"].abs()) if "residual" in t else off


def _experts(call: Call, expected: Tensor) -> Tensor:
    t, index, x = call.record, call.arguments["top_k_index"], call.arguments["x"].double()
    t = decoded_call(t) if call.op == "mxfp4_experts" else t
    (count, _, inner), k, u = t.down.shape, index.shape[1], roundoff(t.x.dtype)
    a, step = min(u, roundoff(torch.float32)), _step(t.x.dtype)
    total, squares = u * expected.double().abs() + (k + 1) * step, torch.zeros_like(expected, dtype=torch.float64)

    for e in index.unique().tolist():
        if not 0 <= e < count:
            continue
        # A wide copy of one expert at a time.
        weight = torch.where(index == e, t.top_k_weights.double().abs(), 0.0).sum(1)[:, None]
        first, second = t.gate_up[e].double().T, t.down[e].double().T
        bias, last = (x.new_zeros(()) if b is None else b[e].double() for b in (t.gate_up_bias, t.down_bias))
        y, partial, sizes = _product(x, first, bias)
        off = 2 * (u * partial + step) + a * (sqrt(x.shape[1]) + 8) * sizes
        (gate, up), (off, off_up) = ((z[..., ::2], z[..., 1::2]) if t.interleaved else z.chunk(2, -1) for z in (y, off))
        h = gated(t, y, t.x.dtype)
        if t.limit:
            gate, up = gate.clamp(max=t.limit), up.clamp(-t.limit, t.limit)
        gate, up = gate.abs(), up.abs() + abs(t.offset)
        off = 1.13 * off * (up + off_up) + gate * off_up + (5 * u + 8 * a) * gate * up + 3 * step
        _, partial, sizes = _product(h, second, last)
        squares += weight.square() * (off.square() @ second.square() + (4 * (u * partial + step)).square())
        total += weight * a * (sqrt(inner) + sqrt(k) + 8) * sizes
    allowed: Tensor = total + squares.sqrt()
    return allowed


def _route(call: Call, expected: Tensor) -> Tensor:
    logits, wide = call.arguments["logits"], expected.double().abs()
    a = min(roundoff(logits.dtype), roundoff(torch.float32))
    share = 2 * roundoff(call.arguments["weights"].dtype) + a * (2 * sqrt(logits.shape[1]) + 16 + 4 * _largest(logits))
    least = abs(float(call.arguments.get("scale", 1.0))) * torch.finfo(torch.float32).tiny
    return share * wide + _step(call.arguments["weights"].dtype) + least


def _backward(call: Call) -> Allowed:
    s, wide = _Sizes(call), call.map(lambda _, t: t.double() if t.is_floating_point() else t).record
    if call.op == "varlen_attention_backward":
        dense, see = padded(wide)
    else:
        dense, see = wide, dense_visible(wide.query, wide.key, wide.kv_start, wide.kv_end, Rules.of(wide))
    terms = _terms(dense, see)
    rows = dense.query.shape[1] * dense.query.shape[2] / dense.key.shape[2]
    each = 8 * s.u + 4 * s.delta + s.a * (max(s.root_n, sqrt(rows)) + s.root_d + 4)
    # Mask and sinks have dtypes of their own, to which their gradients are rounded.
    own = {f"grad_{n}": roundoff(t.dtype) for n in ("mask", "sinks") if (t := call.arguments.get(n)) is not None and t.is_floating_point()}
    return {n: (each + own.get(n, 0.0)) * _largest(sizes) for n, sizes in terms.items()}


def _terms(t: Any, see: Tensor | None) -> dict[str, Tensor]:
    """S, the sum of the sizes of the terms, of every entry of every gradient, of a backward call whose tensors are dense."""
    rules = Rules.of(t)
    logits = scores(t.query, t.key, see, t.mask, rules)
    weight, top, total = softmax(logits, t.sinks)
    kv_heads = t.key.shape[2]
    group = t.query.shape[2] // kv_heads
    g, q = t.grad_output.abs().transpose(1, 2), t.query.abs().transpose(1, 2)
    k, v = (x.abs().transpose(1, 2).repeat_interleave(group, 1) for x in (t.key, t.value))
    pairs = g @ v.transpose(2, 3)
    rest = (weight * pairs).sum(-1)
    if t.grad_lse is not None:
        rest = rest + t.grad_lse.abs().transpose(1, 2)
    ds = weight * (pairs + rest[..., None])
    scaled = ds * abs(rules.scale)
    by_query = {"grad_key": scaled.transpose(2, 3) @ q, "grad_value": weight.transpose(2, 3) @ g}
    return {
        "grad_query": scaled @ k,
        **{n: x.unflatten(1, (kv_heads, group)).sum(2) for n, x in by_query.items()},
        "grad_mask": ds if t.mask is None else reduce_to(ds, t.mask),
        "grad_sinks": rest.new_zeros(0) if t.sinks is None else (torch.exp(t.sinks[None, :, None] - top) / total * rest).sum((0, 2)),
    }


def stored(exact: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(a number, float64, as stored: saturated; its allowed error: half a step), both as it is and 0 if `dtype` is not quantised."""
    if dtype not in QUANTISED:
        return exact, torch.zeros_like(exact)
    if dtype == torch.int8:
        return exact.clamp(-127.0, 127.0), torch.full_like(exact, 0.5 + 2**-10)
    info = torch.finfo(dtype)
    want = exact.clamp(-info.max, info.max)
    # Below the smallest normal number the steps no longer shrink. 1 + 2^-10: the division may have been made in float32.
    return want, torch.clamp(want.abs(), min=info.smallest_normal) * (info.eps / 2) * (1 + 2**-10)
