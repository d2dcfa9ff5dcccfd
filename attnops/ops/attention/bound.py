"""How far from the exact result a kernel of attention may be.

Written with u, the unit roundoff of the call's dtype; a, that of the accumulation dtype (float32,
float64 for float64, 2^-14 for float8 queries); D and Dv, the head dims; N, the most keys a query
sees; L = |scale| max|q| max|k| max|temperature| + max|mask|, which bounds the logits (max|x|: the
largest Euclidean norm of a row); V = max|v|, the largest value. All are taken from the call's own
data.

    delta(logit) = a (sqrt(D) + 4) L        products summed in the accumulation dtype, then scaled,
    capped and exponentiated delta(output) = (4 u + 2 delta(logit) + a (sqrt(N) + 4)) V delta(lse) =
    delta(logit) + a (sqrt(N) + 4) + 2^-23 max|lse|

4 u: the weights and the output are each rounded to the dtype once, with a factor of 2 for
block-wise rescaling. A sum of n terms is given the growth sqrt(n) of random roundings; blocked sums
stay below it. A weight is exp of a logit, hence 2 delta(logit).

Gradients: each is a sum, bounded by the sum of its terms' sizes, S. With p the weights, in float64,
dP = |dO| |v|, ds = p (dP + sum_j p dP + |dlse|): S is max |scale| ds |k| for dq, |scale| ds |q| for
dk, p |dO| for dv, ds for the mask and exp(sink - lse) times the row sums of p dP + |dlse| for the
sinks, summed over whatever broadcasts.

    delta(gradient) = (8 u + 4 delta(logit) + a (sqrt(n) + sqrt(D) + 4)) S      n: the most terms in
    one sum

The gradients of mask and sinks are also rounded to those' own dtypes.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
from torch import Tensor

from attnops.core.arguments import QUANTISED
from attnops.core.record import values
from attnops.core.rounding import Allowed, Results, in_float64, largest, roundoff
from attnops.core.tensors import Rules, dense_visible
from attnops.ops.attention.reference import padded, reduce_to, scores, softmax

FLOAT8_SUMS = 2.0**-14
"""Error of a sum of float8 products, as SM90's tensor cores add them: 14 bits. DeepSeek-V3,
https://arxiv.org/abs/2412.19437, 3.3.2."""
FACTORS = ("q_scale", "k_scale", "kv_scale", "temperature")


class Figures:
    """Those of the module's docstring for one call. keys: N.

    norms: max|q| max|k|. u: for results of another dtype than the query's, whose products are not
    float8's.
    """

    def __init__(
        self,
        call: Any,
        query: Tensor,
        value: Tensor,
        keys: int,
        norms: float,
        u: float | None = None,
    ) -> None:
        factor = {n: largest(getattr(call, n, None)) or 1.0 for n in (*FACTORS, "v_scale")}
        dtype = query.dtype
        self.u = roundoff(dtype) if u is None else u
        # A quantised query is exact. The output is rounded and, except for latents, the weights to
        # the query's dtype.
        self.a = (
            FLOAT8_SUMS
            if dtype in QUANTISED and u is None
            else min(self.u, roundoff(torch.float32))
        )
        self.root_n, self.root_d = sqrt(keys), sqrt(query.shape[-1])
        self.logit = abs(call.scale) * norms
        for n in FACTORS:
            self.logit *= factor[n]
        self.delta = (
            self.a * (self.root_d + 4) * (self.logit + largest(getattr(call, "mask", None)))
        )
        self.value = largest(value) * factor["v_scale"] * factor["kv_scale"]

    def allowed(self, expected: Results) -> Allowed:
        """That of output and lse."""
        growth = self.a * (self.root_n + 4)
        allowed: Allowed = {"output": (4 * self.u + 2 * self.delta + growth) * self.value}
        return allowed | (
            {"lse": self.delta + growth + 2**-23 * largest(expected["lse"])}
            if "lse" in expected
            else {}
        )


def norm(x: Tensor) -> float:
    """The largest Euclidean norm of a row."""
    return largest(x.double().norm(dim=-1))


def _figures(call: Any) -> Figures:
    keys = getattr(call, "max_seqlen_k", call.key.shape[1])
    return Figures(call, call.query, call.value, keys, norm(call.query) * norm(call.key))


def attention(call: Any, expected: Results) -> Allowed:
    """Of attention over keys and values."""
    return _figures(call).allowed(expected)


def _merge(call: Any, expected: Results) -> Allowed:
    outputs = [
        x for n, x in zip(call.spec.names, values(call), strict=True) if n.startswith("output")
    ]
    root = sqrt(outputs[0].shape[1]) if outputs[0].dim() == 4 else 1.0
    size = max(map(largest, outputs))
    return {
        "output": (4 * roundoff(outputs[0].dtype) + 2**-20 * root) * size,
        "lse": 2**-21 * root * (1 + largest(expected["lse"])),
    }


def _gradient(call: Any, dense: Any, see: Tensor | None) -> Allowed:
    """dense: the call in float64, of tensors whose requests are rows."""
    s, terms = _figures(call), _terms(dense, see)
    rows = dense.query.shape[1] * dense.query.shape[2] / dense.key.shape[2]
    each = 8 * s.u + 4 * s.delta + s.a * (max(s.root_n, sqrt(rows)) + s.root_d + 4)
    # Mask and sinks have dtypes of their own, to which their gradients are rounded.
    own = {
        f"grad_{n}": roundoff(t.dtype)
        for n in ("mask", "sinks")
        if (t := getattr(call, n)) is not None and t.is_floating_point()
    }
    return {n: (each + own.get(n, 0.0)) * largest(sizes) for n, sizes in terms.items()}


def _dense_gradient(call: Any, expected: Results) -> Allowed:
    t = in_float64(call)
    return _gradient(call, t, dense_visible(t.query, t.key, t.kv_start, t.kv_end, Rules.of(t)))


def _packed_gradient(call: Any, expected: Results) -> Allowed:
    return _gradient(call, *padded(in_float64(call)))


def _terms(t: Any, see: Tensor | None) -> dict[str, Tensor]:
    """S, the sum of the sizes of the terms, of every entry of every gradient, of a backward call
    whose tensors are dense."""
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
        "grad_sinks": rest.new_zeros(0)
        if t.sinks is None
        else (torch.exp(t.sinks[None, :, None] - top) / total * rest).sum((0, 2)),
    }


BOUNDS = {
    "attention": attention,
    "attention_backward": _dense_gradient,
    "varlen_attention": attention,
    "varlen_attention_backward": _packed_gradient,
    "merge_state": _merge,
    "merge_states": _merge,
}
