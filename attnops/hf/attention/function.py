"""The attention function that transformers calls in place of its own: request -> visibility ->
dense, packed or over pages."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from attnops.core.eager_cache import overheard, side
from attnops.core.errors import InvalidInput, fail
from attnops.core.kernel import own_kernel
from attnops.core.private_torch import autocasting
from attnops.core.select import key_for
from attnops.core.tracers import is_recorded
from attnops.hf.attention import over_pages
from attnops.hf.attention.in_torch import in_torch, in_torchs_ops
from attnops.hf.attention.request import (
    Lengths,
    Request,
    check_layer,
    flat_sinks,
    is_causal_call,
)
from attnops.hf.attention.straight import Facts, StraightCalls, Tensors, is_plain
from attnops.hf.attention.visibility import Visible, visible_of
from attnops.hf.cache.paged_cache import PagedKeyCache, View
from attnops.hf.models.attention_modules import HARMLESS, cached_routed
from attnops.ops.attention.record import ATTENTION as attend, Attention
from attnops.ops.attention.varlen import varlen_attention

_WEIGHTS = (
    "attnops: output_attentions=True computes attention in plain torch, because kernels "
    "return no attention weights"
)

_collector: Any = None
try:
    from transformers.utils.output_capturing import _active_collector

    if hasattr(_active_collector, "context_var"):
        _collector = _active_collector
except (
    ImportError
):  # another version: then only the layers that receive output_attentions return weights
    pass

_own = object.__getattribute__

AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]


def attention_function(
    kernel: str | None, additive: bool = False, proven: bool = False
) -> AttentionFunction:
    """A function for `AttentionInterface.register`.

    Args:
        kernel: forced on every call of an op that has a kernel of that name.
        additive: the mask alone decides, as in eager attention. None means that all keys are
            visible; `is_causal` is ignored.
        proven: serve modules of any class. False: only those whose masks transformers itself leaves
            out, see `routed`.
    """
    kernels = tuple(
        own_kernel(op, kernel)
        for op in ("attention", "paged_attention", "mla_attention", "varlen_attention")
    )
    packs = kernel == kernels[3]
    trusted = additive or proven
    straight = StraightCalls()

    def answered(
        module: Any, request: Request, cache: Any, is_causal: bool | None, facts: Facts | None
    ) -> tuple[Tensor, Tensor | None]:
        """(output, weights or None) of a call that is not remembered. facts: to remember it by,
        from now on."""
        if request.key.dim() == 5 or isinstance(cache, (PagedKeyCache, View)):
            output = over_pages.attend(
                over_pages.Asked(module, request, cache, is_causal), *kernels
            )
            if output is not None:
                return output, None
            # The first latents of an empty cache attend to each other in expanded form.
            key, value = type(module).expand_kv(module, request.key[0], request.value[0])
            request = request._replace(key=key, value=value)
        visible = visible_of(request, not additive and is_causal_call(module, is_causal), packs)
        if visible.packed is not None:
            return packed(request, visible, visible.packed, kernel), None
        call, given = dense_call(request, visible, kernels[0])
        if request.dropout > 0.0 or request.weights:
            return with_weights(request, call)
        if is_recorded():
            return in_torchs_ops(call), None
        # Only a call whose keys are not cut off is remembered.
        return dense(
            call, given, straight, facts if visible.keys is None else None, request.window
        ), None

    def attention(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        scaling: float | Tensor | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        sinks: Tensor | None = None,
        position_bias: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        attnops_cache: Any = None,
        output_attentions: bool | None = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention as a transformers layer asks for it, through `attnops.attention`.

        Args:
            query, key, value: `[B, Hq, S, D]`, `[B, Hkv, T, D]`, `[B, Hkv, T, Dv]`.
            attention_mask: None; bool (True: visible) or float `[B or 1, Hq or 1, S, T]`; or a
                descriptor. With a mask, the mask alone decides which keys are visible; packed
                requests go to `attnops.varlen_attention`. None is causal when `is_causal` (or the
                module's own flag) is true; query i is then at key i, as in transformers' sdpa, and
                keys past the last query are cut off.
            scaling: factor on q.k, default `1 / sqrt(D)`; a tensor is multiplied into the query.
            dropout: on the probabilities. When it is above 0 and the module trains, the call is
                computed in plain torch.
            sliding_window: keys visible, the own included; used only when a causal call comes
                without a mask.
            s_aux, sinks: `[Hq]` sink logits. position_bias: float `[B or 1, Hq, S, T]`, added to
                the logits.
            cu_seq_lens_q, ...: packed requests in one row: `attnops.varlen_attention`. Beside a
                mask, the requests of a row are kept apart and the mask decides the rest. The
                documents of a descriptor give way to these.
            attnops_cache: the layer's paged cache. key and value are then the new ones
                `[1, B, Hkv, S, D]` (attnops.hf.attention.over_pages), or latents `[1, B, 1, S, Dc]`
                and rotated keys `[1, B, 1, S, Dr]`.
            output_attentions: return the weights, too, as eager attention does: the call is then
                computed in plain torch.

        Returns:
            output `[B, S, Hq, Dv]` contiguous; the attention weights `[B, Hq, S, T]` if they are
            asked for, else None.

        Raises:
            InvalidInput: an argument that would change the result and is not known here, or a mask
                of a wrong shape or dtype.
        """
        compiling = is_dynamo_compiling()
        drops = dropout > 0.0 and module.training
        recorded = weights_recorded(module, compiling)
        facts: Facts | None = None
        # Calls over pages are remembered by their op.
        if not (compiling or drops or recorded or attnops_cache is not None):
            asks = (
                attention_mask,
                s_aux,
                sinks,
                position_bias,
                cu_seq_lens_q,
                output_attentions,
            )
            if is_plain(query, scaling, asks, others):
                given = query, key, value
                facts, answer = straight.answer(
                    module, given, is_causal, scaling, sliding_window, softcap
                )
                if answer is not None:
                    return answer, None
        cls: Any = type(module)
        # Layers that pass, which are most, cost no call; `check_layer` makes the errors of others.
        served = trusted or (not compiling and cached_routed(cls))
        if compiling or not (served and others.keys() <= HARMLESS):
            check_layer(cls, others, compiling, trusted)
        if isinstance(scaling, Tensor):
            query, scaling = query * scaling, 1.0
        lengths: Lengths | None = None
        if cu_seq_lens_q is not None:
            lengths = Lengths(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
        cap = float(softcap or 0.0)
        if s_aux is not None or sinks is not None:
            sinks = flat_sinks(s_aux, sinks)
        weights = bool(output_attentions) or recorded
        p = dropout if drops else 0.0
        request = Request(
            query,
            key,
            value,
            attention_mask,
            position_bias,
            lengths,
            sinks,
            scaling,
            cap,
            sliding_window,
            p,
            weights,
        )
        return answered(module, request, attnops_cache, is_causal, facts)

    return attention


def weights_recorded(module: Any, compiling: bool) -> bool:
    """Does transformers record attention weights now? Not every layer receives the argument that
    asks for them."""
    config = getattr(module, "config", None)
    # A config's own way to look an attribute up makes three calls.
    if config is not None and (config.__dict__ if compiling else _own(config, "__dict__")).get(
        "_output_attentions"
    ):
        return True
    if _collector is None or compiling:
        return False
    found = _collector.global_var if _collector.compiling else _collector.context_var.get()
    return bool(found) and any(kind.endswith("attentions") for kind in found)


def dense(
    call: Attention,
    given: Tensors,
    straight: StraightCalls,
    facts: Facts | None,
    window: int | None,
) -> Tensor:
    """`[B, S, Hq, Dv]` of a call, which is remembered where there are facts to remember it by.

    given: its query, key and value, heads first.
    """
    run = None if facts is None or overheard() or autocasting() else attend.find(call)
    if run is None or facts is None:
        output: Tensor = attend(call)[0]
        return output
    known = straight.remember(facts, call, run, given, window)
    output = run(call)[0] if known is None else known(*given)
    return output


def dense_call(request: Request, visible: Visible, kernel: str | None) -> tuple[Attention, Tensors]:
    """(the op's call of a request that is not packed, its query, key and value, heads first)."""
    query, key, value = given = cast(request, visible.keys)
    scale = query.shape[3] ** -0.5 if request.scale is None else request.scale
    call = Attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        visible.mask,
        request.sinks,
        None,
        None,
        visible.start,
        visible.end,
        scale=scale,
        causal=visible.causal,
        window_left=side(visible.left),
        softcap=request.softcap,
        policy=key_for("attention", kernel),
    )
    return call, given


def cast(request: Request, keys: int | None = None) -> Tensors:
    """Query, key and value as autocast wants them. keys: how many of them; None: all."""
    query, key, value = request.query, request.key, request.value
    if keys is not None:
        key, value = key[:, :, :keys], value[:, :, :keys]
    device = query.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return query, key, value


def with_weights(request: Request, call: Attention) -> tuple[Tensor, Tensor | None]:
    """A call with dropout, or whose weights are asked for, in plain torch."""
    output, weights = in_torch(call, request.dropout, request.key.shape[2])
    if not request.weights:
        return output, None
    if not is_dynamo_compiling():
        warnings.warn(_WEIGHTS, stacklevel=4)
    return output, weights


def _check_packed(request: Request, visible: Visible, lengths: Lengths) -> None:
    """Raise InvalidInput where no kernel of packed requests does what is asked for."""
    if request.dropout > 0.0 or request.weights:
        field, got, want = (
            ("dropout", request.dropout, "0")
            if request.dropout
            else ("output_attentions", True, "False")
        )
        fail(
            InvalidInput,
            field,
            got,
            f"{want} for packed requests without a mask: no kernel does that",
        )
    beside_it = {
        "cu_seq_lens_k": lengths.starts_k,
        "max_length_q": lengths.longest_q,
        "max_length_k": lengths.longest_k,
    }
    missing = ", ".join(name for name, too in beside_it.items() if too is None)
    rows, biased = request.query.shape[0], visible.mask is not None
    if missing or (lengths.padded and (biased or rows != 1)):
        fault = (
            f"no {missing}" if missing else f"a batch of {rows}" + " with position_bias" * biased
        )
        want = "one row, with cu_seq_lens_k, max_length_q and max_length_k, and no position_bias"
        fail(InvalidInput, "cu_seq_lens_q", fault, want)


def packed(request: Request, visible: Visible, lengths: Lengths, kernel: str | None) -> Tensor:
    """`[B, S, Hq, Dv]` of packed requests. Raises InvalidInput where no kernel of packed requests
    does what is asked for."""
    _check_packed(request, visible, lengths)
    starts_k: Any = lengths.starts_k
    query, key, value = cast(request)
    tokens = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    output = varlen_attention(
        tokens[0],
        tokens[1],
        tokens[2],
        lengths.starts_q,
        starts_k,
        max_seqlen_q=_int(lengths.longest_q),
        max_seqlen_k=_int(lengths.longest_k),
        scale=query.shape[3] ** -0.5 if request.scale is None else request.scale,
        causal=visible.causal,
        window=(visible.left, -1 if visible.causal else visible.left),
        softcap=request.softcap,
        sinks=request.sinks,
        padded=lengths.padded,
        kernel=kernel,
    )
    found: Tensor = output.unflatten(0, (query.shape[0], query.shape[2]))
    return found


def _int(longest: Any) -> Any:
    """A length as `varlen_attention` takes it. A symbol stays one: `int()` of it would make it a
    constant in torch.export."""
    return longest if isinstance(longest, torch.SymInt) else int(longest)
