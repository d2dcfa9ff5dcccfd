"""Stand-ins for the functions of fla-core 0.6.0 that `fla` calls: their arguments and shapes, and
float32 bodies in torch on CPU. Not the kernels.

They share these traits with the real ones, for which the wrapper allows:

- Rows of no request stay as they were allocated.
- Each slot of `chunk_indices` has a program, which neither reads nor writes rows past its request's
  end. States of the chunks lie by slot.
- The convolution takes a state of W inputs and ignores the first.
- Inputs are read as if they were contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.functional import silu

NAN = float("nan")
LN_2 = 0.6931471805599453


@contextmanager
def installed() -> Iterator[list[str]]:
    """Put the stand-ins where the wrapper looks within the block; yields the names of the calls."""
    from attnops.kernels.fla import recurrent

    calls: list[str] = []

    def noted(name: str) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return BODIES[name](*args, **kwargs)

        return run

    class Step:
        """A Triton kernel: `kernel[grid](...)`."""

        def __getitem__(self, grid: tuple[int]) -> Any:
            def run(**given: Any) -> None:
                calls.append(recurrent.STEP)
                requests = given["cu_seqlens"].shape[0] - 1
                columns = -(-given["V"] // given["BV"])
                assert grid == (requests * given["HV"] * columns,)
                step(**given)

            return run

    with (
        patch.object(recurrent, "function", noted),
        patch.object(recurrent, "step_kernel", Step),
    ):
        yield calls


def chunks(tokens: int, size: int, cu_seqlens: Any, chunk_indices: Any) -> Iterator[Any]:
    """(slot, request, the rows of the chunk) of every program."""
    if cu_seqlens is None:
        assert chunk_indices is None
        for slot in range(-(-tokens // size)):
            yield slot, 0, slice(slot * size, min(slot * size + size, tokens))
        return
    starts = cu_seqlens.tolist()
    assert cu_seqlens.dtype == chunk_indices.dtype == torch.int32
    for slot, (n, i) in enumerate(chunk_indices.tolist()):
        first, end = starts[n] + i * size, starts[n + 1]
        if first < end:
            yield slot, n, slice(first, min(first + size, end))


def packed(*tensors: Any) -> None:
    assert all(x is None or x.is_contiguous() for x in tensors), "read as if contiguous"


def l2norm_fwd(x: Any, eps: float = 1e-6) -> Any:
    rstd = (x.float().square().sum(-1) + eps).rsqrt()
    return (x.float() * rstd[..., None]).to(x.dtype), rstd


def chunk_local_cumsum(
    g: Any, chunk_size: int, scale: float, cu_seqlens: Any = None, chunk_indices: Any = None
) -> Any:
    packed(g)
    found = torch.full_like(g, NAN)
    for _, _, at in chunks(g.shape[1], chunk_size, cu_seqlens, chunk_indices):
        found[0, at] = g[0, at].cumsum(0) * scale
    return found


def _lower(g: Any, strict: int) -> Any:
    """`[H, C, C]`: what is left of token j at token i, below the diagonal."""
    between = ((g[:, None] - g[None]) * LN_2).movedim(-1, 0)
    return between.masked_fill(torch.ones(between.shape[1:]).triu(1 - strict) > 0, -torch.inf).exp()


def _heads(x: Any, heads: int) -> Any:
    """`[C, Hk, D]` as `[Hv, C, D]` in float32."""
    return x.float().repeat_interleave(heads // x.shape[1], 1).movedim(1, 0)


def chunk_gated_delta_rule_fwd_intra(
    k: Any, v: Any, g: Any, beta: Any, cu_seqlens: Any, chunk_size: int, chunk_indices: Any
) -> Any:
    packed(k, v, g, beta)
    heads = v.shape[2]
    w, u = v.new_full((*v.shape[:3], k.shape[3]), NAN), torch.full_like(v, NAN)
    for _, _, at in chunks(k.shape[1], chunk_size, cu_seqlens, chunk_indices):
        key, value = _heads(k[0, at], heads), _heads(v[0, at], heads)
        b = beta[0, at].float().T[..., None]
        system = torch.eye(key.shape[1]) + key @ key.mT * b * _lower(g[0, at], 1)
        left = (g[0, at] * LN_2).exp().T[..., None]
        w[0, at] = torch.linalg.solve(system, key * b * left).movedim(0, 1).to(w.dtype)
        u[0, at] = torch.linalg.solve(system, value * b).movedim(0, 1).to(u.dtype)
    return w, u, None


def chunk_gated_delta_rule_fwd_h(
    k: Any,
    w: Any,
    u: Any,
    g: Any,
    initial_state: Any,
    output_final_state: bool,
    chunk_offsets: Any,
    cu_seqlens: Any,
    chunk_indices: Any,
) -> Any:
    packed(k, initial_state)
    heads, size = u.shape[2], 64
    slots = -(-k.shape[1] // size) if chunk_indices is None else len(chunk_indices)
    h = u.new_full((1, slots, *initial_state.shape[1:]), NAN)
    state, new = initial_state.clone(), torch.full_like(u, NAN)
    for slot, n, at in chunks(k.shape[1], size, cu_seqlens, chunk_indices):
        if chunk_offsets is not None:
            first = int(cu_seqlens[n])
            assert slot == int(chunk_offsets[n]) + (at.start - first) // size
        h[0, slot] = state[n]
        value = _heads(u[0, at], heads) - _heads(w[0, at], heads) @ state[n]
        new[0, at] = value.movedim(0, 1).to(new.dtype)
        last = g[0, at][-1]
        left = ((last - g[0, at]) * LN_2).exp().T[..., None]
        state[n] *= (last * LN_2).exp()[:, None, None]
        state[n] += _heads(k[0, at], heads).mT @ (value * left)
    return h, new, state


def chunk_fwd_o(
    q: Any, k: Any, v: Any, h: Any, g: Any, scale: float, cu_seqlens: Any, chunk_indices: Any
) -> Any:
    packed(q, k)
    output, heads = torch.full_like(v, NAN), v.shape[2]
    for slot, _, at in chunks(q.shape[1], 64, cu_seqlens, chunk_indices):
        query, key = _heads(q[0, at], heads), _heads(k[0, at], heads)
        left = (g[0, at] * LN_2).exp().T[..., None]
        seen = query @ key.mT * _lower(g[0, at], 0)
        found = query @ h[0, slot].float() * left + seen @ _heads(v[0, at], heads)
        output[0, at] = (found * scale).movedim(0, 1).to(output.dtype)
    return output


def step(**a: Any) -> None:
    """Every program reads its part of a state before it writes it."""
    packed(*(a[n] for n in ("q", "k", "v", "g", "beta", "o", "h0", "ht", "cu_seqlens")))
    assert a["gk"] is a["gv"] is a["A_log"] is a["dt_bias"] is None
    assert a["BK"] >= a["K"] and a["BK"] & (a["BK"] - 1) == 0
    starts, heads = a["cu_seqlens"].tolist(), a["HV"]
    for n, (first, end) in enumerate(pairwise(starts)):
        state = a["h0"][n].clone()
        for t in range(first, end):
            q, k = (_heads(a[x][t][None], heads)[:, 0] for x in "qk")
            if a["USE_QK_L2NORM_IN_KERNEL"]:
                q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
            state *= a["g"][t].exp()[:, None, None]
            read = torch.einsum("hk,hkv->hv", k, state)
            new = (a["v"][t].float() - read) * a["beta"][t].float()[:, None]
            state += k[..., None] * new[:, None]
            a["o"][t] = torch.einsum("hk,hkv->hv", q * a["scale"], state).to(a["o"].dtype)
        a["ht"][n] = state


def causal_conv1d_fwd(
    x: Any,
    weight: Any,
    bias: Any,
    residual: Any,
    initial_state: Any,
    activation: Any,
    cu_seqlens: Any,
    chunk_indices: Any,
    chunk_size: int,
) -> Any:
    packed(weight, bias, initial_state)
    width, y = weight.shape[1], torch.full(x.shape, NAN, dtype=x.dtype)
    assert residual is None and initial_state.shape[2] == width
    for _, n, at in chunks(x.shape[1], chunk_size, cu_seqlens, chunk_indices):
        first = 0 if cu_seqlens is None else int(cu_seqlens[n])
        whole = torch.cat([initial_state[n].T, x[0, first : at.stop]]).float()
        found = sum(
            whole[at.start - first + w + 1 :][: at.stop - at.start] * weight[:, w].float()
            for w in range(width)
        )
        y[0, at] = _ended(found, bias, activation).to(y.dtype)
    return y, None


def _ended(y: Any, bias: Any, activation: Any) -> Any:
    y = y if bias is None else y + bias.float()
    return silu(y) if activation == "silu" else y


def causal_conv1d_update(
    x: Any, cache: Any, residual: Any, weight: Any, bias: Any, activation: Any
) -> Any:
    packed(cache, weight, bias)
    assert residual is None and cache.shape == (x.shape[0], *weight.shape)
    cache.copy_(torch.cat([cache[:, :, 1:], x[:, :, None]], 2))
    return _ended((cache.float() * weight.float()).sum(2), bias, activation).to(x.dtype), cache


def causal_conv1d_update_states(
    x: Any, state_len: int, initial_state: Any = None, cu_seqlens: Any = None
) -> Any:
    packed(initial_state, cu_seqlens)
    starts = [0, x.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    rows = [x[0, a:b].T for a, b in pairwise(starts)]
    assert initial_state.shape == (len(rows), x.shape[2], state_len)
    return torch.stack(
        [torch.cat([s, r], 1)[:, -state_len:] for s, r in zip(initial_state, rows, strict=True)]
    )


BODIES = {
    f.__name__: f
    for f in (
        l2norm_fwd,
        chunk_local_cumsum,
        chunk_gated_delta_rule_fwd_intra,
        chunk_gated_delta_rule_fwd_h,
        chunk_fwd_o,
        causal_conv1d_fwd,
        causal_conv1d_update,
        causal_conv1d_update_states,
    )
}
