"""Attention of a patched layer over the pages of a `PagedModelCache`, of keys and values or of
latents.

A hook hands the layer's cache to the attention function (`hand_over`). The layer hands its new keys
and values, or latents, to the cache, which hands them on; the attention function writes them into
the layer's pages and attends through its page table. The batch `[B, H, S, D]` becomes B requests of
S tokens each, one after the other. In a request of n new tokens and L in all, new token i sees the
first L - n + i + 1, so padding on the left, which is not stored, sees no token and gives 0.

The first tokens of an empty cache attend to each other directly, without pages; in a packed prompt
(attnops.hf.steps.prompt), a row of the tokens of all requests, those of each request. So do the
tokens of a long step or chunk over a sliding window, beside copies of the window's tokens, whose
pages the step overwrites.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnops.core.errors import InvalidInput, fail
from attnops.core.private_torch import capturing, count_dispatch_modes
from attnops.core.record import name
from attnops.core.select import active_policy
from attnops.hf.attention import descriptor
from attnops.hf.attention.descriptor import Range
from attnops.hf.attention.request import Request
from attnops.hf.cache.described import Tree
from attnops.hf.cache.meanwhile import Meanwhile
from attnops.hf.cache.model_pages import Past
from attnops.hf.cache.paged_cache import Behind, PagedModelCache, View
from attnops.hf.generation import running_generation
from attnops.hf.models.latents import ABSORB_UP_TO, dims_of
from attnops.nn.latent import absorbed_weights, attend_absorbed, renew
from attnops.ops import decode_attention, paged_attention, write_kv, write_latent
from attnops.ops.attention.record import attention as dense_attention
from attnops.ops.attention.varlen import varlen_attention


def hand_over(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A forward pre-hook of an attention module: hands its paged cache, under any argument name, on
    to the attention function."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, (PagedModelCache, View)):
            kwargs["attnops_cache"] = value
            break
    return args, kwargs


class Asked(NamedTuple):
    """The call of one layer whose new keys or latents go into pages.

    request: its key and value are the new ones `[1, B, Hkv, S, D]`, `[1, B, Hkv, S, Dv]`, or
    latents `[1, B, 1, S, Dc]` and rotated keys
        `[1, B, 1, S, Dr]`; its mask is a descriptor (see `attnops.hf.attention.mask`).
    cache: the module's cache or its view of a step, from `hand_over`.
    """

    module: Any
    request: Request
    cache: Any
    is_causal: bool | None = None


def attend(
    asked: Asked, dense: str | None, paged: str | None, latent: str | None, varlen: str | None
) -> Tensor | None:
    """`[B, S, Hq, Dv]`: write a layer's new keys and values, or latents, into its pages and attend
    to the tokens there.

    dense, paged, latent, varlen: kernels forced for `attention`, `paged_attention`, `mla_attention`
    and `varlen_attention`, or None. Returns None for the first latents of an empty cache, which are
    only written: the caller expands them. Raises InvalidInput: a mask that pages cannot follow,
    dropout, a window larger than that of the pages, a position_bias, packed lengths, weights, or
    sinks over latents.
    """
    request, cache = asked.request, asked.cache
    query, key = request.query, request.key
    if key.dim() != 5:
        fail(
            InvalidInput,
            "key.dim()",
            key.dim(),
            "5, new keys from a cache of pages: this layer did not ask its cache for them",
        )
    if not isinstance(cache, (PagedModelCache, View)):
        fail(
            InvalidInput,
            "attnops_cache",
            type(cache).__name__,
            "a PagedModelCache, which the hook of a patched module passes on",
        )
    found = _checked(asked)
    if not cache.latent:
        return attend_keys(asked, found, dense, paged, varlen)
    layer = asked.module.layer_idx
    view = cache.view(layer, found.start, query.shape[2], query.shape[1])
    [pages] = view.pages
    latents, rotated = (x.flatten(0, 3).to(pages.dtype) for x in (key, request.value))
    write_latent(latents, rotated, pages, view.batch.slots)
    _wrote(cache, layer)
    if view.fresh or (
        query.shape[2] > 1 and running_generation() is None
    ):  # a prompt: see `PagedMode.prepare` for others
        with _exactly(query.device.type):
            renew(asked.module.kv_b_proj, key[0])
    # In expanded form where the cache has no tokens but the step's own, which need no gather.
    if not view.fresh or view.batch.max_seqlen_q <= ABSORB_UP_TO:
        return absorbed(asked, view, found.window_left, latent)
    return _unfolded(asked, view, found, varlen) if view.packed else None


def _checked(asked: Asked) -> Range:
    """The range that the mask describes. Raises InvalidInput for a call that pages cannot serve."""
    _refuse_arguments(asked)
    request, mask = asked.request, asked.request.mask
    if mask is None or mask.dtype != descriptor.DTYPE:
        got = "None" if mask is None else f"{name(mask.dtype)} {list(mask.shape)}"
        want = (
            "a 2-D mask [B, tokens so far] of ones, with zeros on the left only: pages hold "
            'no other pattern. Use cache="hf" for it'
        )
        fail(InvalidInput, "attention_mask", got, want)
    found = _range_of(mask, request.query.shape[0])
    if not found.causal:
        fail(InvalidInput, "attention_mask", "bidirectional", "causal, with a paged cache")
    return found


def _refuse_arguments(asked: Asked) -> None:
    request = asked.request
    if request.weights:
        want = (
            "False with a cache of pages, or transformers' own cache: kernels return no "
            "attention weights"
        )
        fail(InvalidInput, "output_attentions", True, want)
    if request.dropout > 0.0:
        want = "0 with a paged cache: no kernel has dropout. Train without a cache, or call .eval()"
        fail(InvalidInput, "dropout", request.dropout, want)
    if asked.is_causal is False:
        fail(InvalidInput, "is_causal", False, "True with a paged cache")
    lengths = None if request.lengths is None else request.lengths.starts_q
    sinks = request.sinks if asked.cache.latent else None
    for field, value in (
        ("position_bias", request.bias),
        ("cu_seq_lens_q", lengths),
        ("sinks", sinks),
    ):
        if value is not None:
            fail(InvalidInput, field, type(value).__name__, "None with a paged cache")


def _range_of(mask: Tensor, batch: int) -> Range:
    """What a descriptor says: what it was built of, or else what it holds."""
    # A tracer or a graph would take what an attribute holds for constants.
    traced = torch.compiler.is_compiling() or count_dispatch_modes() > 0
    if traced or (mask.is_cuda and capturing(mask)) or mask.shape[0] != batch:
        return descriptor.read(mask, batch)
    built: Range | None = getattr(mask, descriptor.BUILT, None)
    return descriptor.read(mask, batch) if built is None else built


class _Step(NamedTuple):
    """New tokens of one layer, `[B, S, H, D]`, in the dtype of its pages.

    view: the layer's part of the step.
    """

    request: Request
    found: Range
    view: View
    query: Tensor
    key: Tensor
    value: Tensor


def _is_whole(step: _Step) -> bool:
    """Are all keys those of these tokens, without padding? Not under a policy, which may name
    kernels: a row of a deterministic one does not follow the padding of others."""
    return step.found.whole and step.view.past is None and not active_policy()


def _rules(step: _Step) -> dict[str, Any]:
    """Arguments of each op but `decode_attention`, which has one window."""
    request = step.request
    return {
        "scale": request.scale,
        "window": (step.found.window_left, -1),
        "softcap": request.softcap,
        "sinks": request.sinks,
    }


_CHOSEN = Meanwhile(None, None)


def attend_keys(
    asked: Asked, found: Range, dense: str | None, paged: str | None, varlen: str | None = None
) -> Tensor:
    """As `attend`, of keys and values, by the range that a mask describes."""
    request, cache, layer = asked.request, asked.cache, asked.module.layer_idx
    batch, heads, count, _ = request.query.shape
    window = cache.window_of(layer)
    if window and not 0 <= found.window_left < window:
        _refuse_window(layer, found.window_left, window)
    view = cache.view(layer, found.start, count, heads)
    k_pages, v_pages = view.pages
    query = request.query.transpose(1, 2)
    key = request.key[0].transpose(1, 2)
    value = request.value[0].transpose(1, 2)
    stored = k_pages.dtype
    if not query.dtype == key.dtype == value.dtype == stored:  # under autocast
        query, key, value = query.to(stored), key.to(stored), value.to(stored)
    step = _Step(request, found, view, query, key, value)
    if view.one_launch:
        if count > 1:  # the tokens see each other
            write_kv(key.flatten(0, 1), value.flatten(0, 1), k_pages, v_pages, view.batch.slots)
        out = _in_one_launch(step)
        _wrote(cache, layer)
        return out.view(batch, count, heads, out.shape[2]).to(request.query.dtype)
    new = key.flatten(0, 1), value.flatten(0, 1)
    # Copied before the step overwrites the pages of the window.
    packed = behind = None
    if isinstance(view.past, Behind):
        packed = view.past
        keys = _joined(k_pages, packed, new[0]), _joined(v_pages, packed, new[1])
    elif view.past is not None:
        behind = _with_window(step, view.past)
    there = view.meanwhile or _CHOSEN
    write_kv(*new, k_pages, v_pages, view.batch.slots, kernel=there.write)
    _wrote(cache, layer)
    if packed is not None:
        out = _packed(step, keys, varlen, packed)
    elif view.fresh and (view.packed or _packs(step, dense, varlen)):
        out = _packed(step, new, varlen)
    elif behind is not None or (view.fresh and count > 1):
        out = _alone(step, behind, dense)
    else:
        out = _over_pages(step, paged or there.attention)
    return out.to(request.query.dtype)


def _in_one_launch(step: _Step) -> Tensor:
    """`[B, H, Dv]` of one token a request, which is written in the same launch."""
    request, now, (k_pages, v_pages) = step.request, step.view.batch, step.view.pages
    return decode_attention(
        step.query.flatten(0, 1),
        step.key.flatten(0, 1),
        step.value.flatten(0, 1),
        k_pages,
        v_pages,
        now.page_table,
        now.seq_lens,
        now.slots,
        scale=request.scale,
        window_left=step.found.window_left,
        softcap=request.softcap,
        sinks=request.sinks,
        holes=False,
        workspace=now.workspace,
    )


def _packs(step: _Step, dense: str | None, varlen: str | None) -> bool:
    """Are the rows, which have no padding, packed requests? No kernel needs a mask for these, or a
    plan of their length. A kernel that is forced for dense rows alone keeps them."""
    forced = dense is not None and varlen is None
    several = step.query.shape[1] > 1
    return several and _is_whole(step) and descriptor.far(step.query.device) and not forced


def _packed(
    step: _Step, keys: tuple[Tensor, Tensor], kernel: str | None, past: Behind | None = None
) -> Tensor:
    """The rows' own tokens attend to each other, as packed requests, and to copies of `past`.
    keys: keys and values `[T, H, D]`, or `[N, H, D]` of `past`."""
    starts, count = step.view.batch.cu_seqlens_q, step.query.shape[1]
    out: Tensor = varlen_attention(
        step.query.flatten(0, 1),
        *keys,
        starts,
        starts if past is None else past.starts,
        max_seqlen_q=count,
        max_seqlen_k=count if past is None else past.most + count,
        causal=True,
        padded=past is not None,
        kernel=kernel,
        **_rules(step),
    )
    return out.view(*step.query.shape[:3], out.shape[2])


def _unfolded(asked: Asked, view: View, found: Range, kernel: str | None) -> Tensor:
    """As `_packed`, of latents in expanded form."""
    request, module = asked.request, asked.module
    unfolded = type(module).expand_kv(module, request.key[0], request.value[0])
    query, key, value = (x.transpose(1, 2) for x in (request.query, *unfolded))
    step = _Step(request, found, view, query, key, value)
    return _packed(step, (key.flatten(0, 1), value.flatten(0, 1)), kernel)


_Keys = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Keys and values `[B, T, H, D]`, and `[B]`, the first of a row's that is seen, and the end."""


def _with_window(step: _Step, past: Past) -> _Keys:
    """The window's keys, and the new ones behind them."""
    (slots, start), (k_pages, v_pages) = past, step.view.pages
    keys, values = _behind(k_pages, slots, step.key), _behind(v_pages, slots, step.value)
    return keys, values, start, torch.full_like(start, keys.shape[1])


def _own(step: _Step) -> _Keys:
    """The new keys. A kernel that is given no bounds builds no mask of them."""
    if _is_whole(step):
        return step.key, step.value, None, None
    return step.key, step.value, step.found.start, step.found.end


def _alone(step: _Step, behind: _Keys | None, kernel: str | None) -> Tensor:
    """The rows' own tokens attend to each other, and to what they are behind, if it is given."""
    keys, values, start, end = behind or _own(step)
    out: Tensor = dense_attention(
        step.query,
        keys,
        values,
        causal=True,
        kv_start=start,
        kv_end=end,
        kernel=kernel,
        **_rules(step),
    )
    return out


def _over_pages(step: _Step, kernel: str | None) -> Tensor:
    """The tokens attend to all of their rows in the pages, or nodes to what a mask says."""
    now, (k_pages, v_pages) = step.view.batch, step.view.pages
    rules = _rules(step)
    if (tree := step.view.tree) is not None:
        left = _window_of_nodes(tree, step.found.window_left, step.query.shape[1])
        rules |= {"mask": tree.mask, "window": (left, -1)}
    out = paged_attention(
        step.query.flatten(0, 1),
        k_pages,
        v_pages,
        now.page_table,
        now.seq_lens,
        now.cu_seqlens_q,
        max_seqlen_q=1 if step.view.apart else step.query.shape[1],
        plan=now.plan,
        workspace=now.workspace,
        padded=False,
        holes=False,
        kernel=kernel,
        **rules,
    )
    return out.view(*step.query.shape[:3], out.shape[2])


def _window_of_nodes(tree: Tree, window_left: int, nodes: int) -> int:
    """The keys before its own place that a node of a tree may see, as far as its mask, which counts
    positions, lets it. -1: all of them.

    Raises InvalidInput for another window than that of the mask.
    """
    if window_left + 1 != tree.sees:
        want = f"{tree.sees}, the window of its pages, in a step that verifies a tree"
        fail(InvalidInput, "window", window_left + 1, want)
    return window_left + nodes - 1 if tree.sees else -1


def _refuse_window(layer: int, window_left: int, most: int) -> None:
    got = "unbounded" if window_left < 0 else window_left + 1
    want = f"at most {most}, the window that its pages were made for"
    fail(InvalidInput, f"window of layer {layer}", got, want)


def _behind(pages: Tensor, slots: Tensor, new: Tensor) -> Tensor:
    """`[B, W + S, H, D]`: the new tokens `[B, S, H, D]` behind those in the slots `[B * W]`."""
    old = pages.flatten(0, 1)[slots].unflatten(0, (new.shape[0], -1))
    return torch.cat([old, new], 1)


def _joined(pages: Tensor, past: Behind, new: Tensor) -> Tensor:
    """`[N, H, D]`: the new tokens `[T, H, D]` of each request behind copies of its window."""
    return pages.flatten(0, 1)[past.slots].index_copy_(0, past.new, new)


def _wrote(cache: PagedModelCache | View, layer: Any) -> None:
    """Tell the cache that its last layer has written; a view's number of a layer may not be
    read."""
    last = cache.last_layer
    if last is not None and layer == last:
        cache.wrote(layer)


def absorbed(asked: Asked, view: View, window_left: int, kernel: str | None) -> Tensor:
    """`[B, S, H, v]`: attention of the step's tokens to the pages, without unfolding them."""
    module, request, query = asked.module, asked.request, asked.request.query
    batch, heads, queries, _ = query.shape
    dims, [pages] = dims_of(module), view.pages
    mask = None
    if view.tree is not None:
        mask, window_left = view.tree.mask, _window_of_nodes(view.tree, window_left, queries)
    tokens = query.transpose(1, 2).reshape(batch * queries, heads, -1).to(pages.dtype)
    scale = query.shape[3] ** -0.5 if request.scale is None else request.scale
    with _exactly(query.device.type):
        w_uk, w_uv = (
            w.to(pages.dtype)
            for w in absorbed_weights(module.kv_b_proj, dims.nope, dims.v, request.key[0])
        )
        q_nope, q_pe = tokens.split([dims.nope, dims.rope], -1)
        out = attend_absorbed(
            dims,
            q_nope,
            q_pe,
            (w_uk, w_uv),
            pages,
            view.batch,
            scale=scale,
            window_left=window_left,
            softcap=request.softcap,
            mask=mask,
            kernel=kernel,
        )
    return out.to(query.dtype).reshape(batch, queries, heads, dims.v)


def _exactly(kind: str) -> AbstractContextManager[Any]:
    """No autocast on devices of this kind: it would compute the products in another dtype than that
    of the pages."""
    return (
        torch.autocast(kind, enabled=False)
        if torch.is_autocast_enabled(kind)
        else contextlib.nullcontext()
    )
