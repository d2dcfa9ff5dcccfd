"""The plain formula of attention in float64, a request at a time, and its gradients by torch's
autograd, without any code of attnops."""

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from attnops.testing import Call, oracle
from attnops.testing.check import clone, compare, fill

INF = float("inf")
LEAVES = ("query", "key", "value", "mask", "sinks")


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    t: dict[str, Any],
    start: int = 0,
) -> tuple[Tensor, Tensor]:
    """One request: query `[n, Hq, D]`, key `[L, Hkv, D]`, mask `[Hq or 1, n, L]`. Returns output
    `[n, Hq, Dv]` and lse `[n, Hq]`."""
    n, length, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = torch.einsum("nhd,lhd->hnl", q, k) * t["scale"]
    if cap := t.get("softcap", 0.0):
        s = cap * torch.tanh(s / cap)
    if (factor := t.get("temperature")) is not None:
        s = s * factor[:, None]
    if mask is not None:
        s = s.masked_fill(~mask, -INF) if mask.dtype == torch.bool else s + mask
    position = torch.arange(n, device=q.device)[:, None] + length - n
    j = torch.arange(length, device=q.device)[None]
    hidden = (j < start) | (t["causal"] & (j > position))
    if (left := t.get("window_left", -1)) >= 0:
        hidden = hidden | (j < position - left)
    if (right := t.get("window_right", -1)) >= 0:
        hidden = hidden | (j > position + right)
    if chunk := t.get("attention_chunk", 0):
        hidden = hidden | (j // chunk != position // chunk)
    if mask is not None and mask.dtype != torch.bool:
        hidden = hidden | (
            mask == -INF
        )  # logsumexp has no derivative where all logits are -inf, and masked_fill asks for none
    s = s.masked_fill(hidden, -INF)
    if sinks is not None:
        s = torch.cat([s, sinks[:, None, None].expand(-1, n, 1)], -1)
    lse = torch.logsumexp(s, -1)
    blind = lse == -INF
    p = torch.exp(s - torch.where(blind, 0.0, lse)[..., None])[..., :length]
    return torch.einsum("hnl,lhd->nhd", p, v), lse.T


SCALES = {
    "query": "q_scale",
    "q_nope": "q_scale",
    "q_pe": "q_scale",
    "key": "k_scale",
    "value": "v_scale",
    "k_pages": "k_scale",
}
SCALES |= {"v_pages": "v_scale", "latent_pages": "kv_scale"}


def exact(call: Call) -> dict[str, Any]:
    """The arguments in float64. Stored numbers are multiplied by their scales, of which each serves
    a group of heads."""
    t: dict[str, Any] = {
        n: v.double() if torch.is_tensor(v) and v.is_floating_point() else v
        for n, v in call.arguments.items()
    }
    for name, of in SCALES.items():
        if name in t and t.get(of) is not None:
            each = max(t[name].shape[-2] // len(t[of]), 1) if of == "q_scale" else 1
            t[name] = t[name].double() * t[of].repeat_interleave(each).reshape(-1, 1)
    return t | {"causal": call.record.causal}


def packed(t: dict[str, Any]) -> dict[str, Any]:
    """Requests over pages as packed ones."""
    lengths, latents = t["seq_lens"].tolist(), "q_nope" in t
    pages = [t["latent_pages"][:, :, None]] if latents else [t["k_pages"], t["v_pages"]]
    size = pages[0].shape[1]
    slots = [
        row[j // size] * size + j % size
        for row, n in zip(t["page_table"].tolist(), lengths, strict=True)
        for j in range(n)
    ]
    key, *value = (x.flatten(0, 1)[torch.tensor(slots, dtype=torch.long)] for x in pages)
    if latents:
        t, value = (
            t | {"query": torch.cat([t["q_nope"], t["q_pe"]], -1)},
            [key[..., : t["q_nope"].shape[2]]],
        )
    return t | {
        "key": key,
        "value": value[0],
        "cu_seqlens_k": torch.tensor([0, *accumulate(lengths)]),
    }


def formula(call: Call) -> tuple[Tensor, Tensor]:
    """output and lse of a call of attention, float64, differentiable. Rows of no request are 0 and
    -inf."""
    t = exact(call)
    t = packed(t) if "page_table" in t else t
    query, mask, sinks = t["query"], t.get("mask"), t.get("sinks")
    if call.op == "attention":
        batch, queries, heads, _ = query.shape
        if mask is not None:
            mask = mask.expand(batch, heads, queries, -1)
        starts = t["kv_start"].tolist() if "kv_start" in t else [0] * batch
        ends = t["kv_end"].tolist() if "kv_end" in t else [t["key"].shape[1]] * batch
        parts = [
            plain(
                query[b],
                t["key"][b, :e],
                t["value"][b, :e],
                None if mask is None else mask[b, ..., :e],
                sinks,
                t,
                s,
            )
            for b, (s, e) in enumerate(zip(starts, ends, strict=True))
        ]
        if not parts:
            return query.new_zeros((*query.shape[:3], t["value"].shape[3])), query.new_zeros(
                query.shape[:3]
            )
        output, lse = (torch.stack(x) for x in zip(*parts, strict=True))
        return output, lse
    cu_q, cu_k = t["cu_seqlens_q"].tolist(), t["cu_seqlens_k"].tolist()
    rest = query.shape[0] - cu_q[-1]
    outputs = [query.new_zeros(rest, query.shape[1], t["value"].shape[2])]
    lses = [query.new_full((rest, query.shape[1]), -INF)]
    for b in reversed(range(len(cu_q) - 1)):
        q, k = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        m = None if mask is None else mask[None, q, : k.stop - k.start]
        own = t | {"temperature": t["temperature"][q]} if "temperature" in t else t
        output, lse = plain(query[q], t["key"][k], t["value"][k], m, sinks, own)
        outputs.insert(0, output)
        lses.insert(0, lse)
    return torch.cat(outputs), torch.cat(lses)


def gradients(call: Call) -> dict[str, Tensor]:
    """The results of a `*_backward` call by name: gradients of the formula in float64, `[0]` where
    there is none."""
    given = dict(clean(call).arguments)
    own = ("grad_output", "grad_lse", "output", "lse", "mask_grad")
    asked = {
        n for n in LEAVES if given.get(n) is not None and (n != "mask" or given.get("mask_grad"))
    }
    leaves = {n: given[n].detach().double().requires_grad_() for n in LEAVES if n in asked}
    forward = Call(
        call.op.removesuffix("_backward"),
        {n: v for n, v in (given | leaves).items() if n not in own},
    )
    output, lse = formula(forward)
    loss = (output * given["grad_output"].double()).sum()
    if given.get("grad_lse") is not None:
        loss = loss + (torch.where(lse == -INF, 0.0, lse) * given["grad_lse"].double()).sum()
    values = list(leaves.values())
    found = (
        torch.autograd.grad(loss, values, allow_unused=True, materialize_grads=True)
        if loss.requires_grad
        else map(torch.zeros_like, values)
    )
    empty = output.new_empty(0)
    return {f"grad_{n}": empty for n in LEAVES} | {
        f"grad_{n}": grad for n, grad in zip(leaves, found, strict=True)
    }


def agrees(call: Call) -> None:
    """Raise Mismatch unless the gradients of the op's reference are those of the formula, to the
    rounding of float64."""
    found = oracle(clean(call))
    for name, want in gradients(call).items():
        if name in found:
            compare(
                f"{call.op}: {name}",
                found[name],
                want,
                1e-10 * (1 + float(want.abs().max()) if want.numel() else 1.0),
                1.0,
            )


def clean(call: Call) -> Call:
    """The call with 0 wherever it may hold anything."""
    return call.map(lambda n, t: fill(clone(t), call.free[n], False) if n in call.free else t)
