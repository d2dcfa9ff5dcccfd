"""The attention function that transformers calls in place of its own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _len_torch_dispatch_stack
from torch.compiler import is_dynamo_compiling
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn.functional import dropout as drop, pad

from attnops.core.eager_cache import KINDS, growth, overheard, side
from attnops.core.errors import InvalidInput, fail
from attnops.core.kernel import _REGISTRY, own_kernel
from attnops.core.private_torch import autocasting, profiling, tracing
from attnops.core.problem import _OVERRIDE
from attnops.core.select import _ACTIVE, key_for
from attnops.core.tensors import Rules, dense_visible, dequantise, wide
from attnops.core.tracers import is_recorded
from attnops.hf.attention import descriptor, packed as requests
from attnops.hf.matching.match import HANDLED, HARMLESS, cached_routed, routed
from attnops.hf.paged import attention as pages
from attnops.hf.paged.cache import PagedKeyCache, View
from attnops.kernels.torch import sdpa
from attnops.ops.attention import by_sdpa
from attnops.ops.attention.record import ATTENTION as attend, Attention
from attnops.ops.attention.reference import scores
from attnops.ops.attention.varlen import varlen_attention

# An argument with one of these words in its name changes the result, even if it is no tensor.
_TELLING = ("window", "softcap", "chunk", "mask", "bias", "sink", "alibi", "indices", "block", "scale", "causal", "page", "cache")

_NUMBERS = (float, type(None))

_collector: Any = None
try:
    from transformers.utils.output_capturing import _active_collector

    if hasattr(_active_collector, "context_var"):
        _collector = _active_collector
except ImportError:  # another version: then only the layers that receive output_attentions return weights
    pass

_WEIGHTS = "attnops: output_attentions=True computes attention in plain torch, because kernels return no attention weights"

AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]


_own = object.__getattribute__


def attention_function(kernel: str | None, additive: bool = False, proven: bool = False) -> AttentionFunction:
    """A function for `AttentionInterface.register`.

    Args:
        kernel: forced on every call of an op that has a kernel of that name.
        additive: the mask alone decides, as in eager attention. None means that all keys are visible; `is_causal` is ignored.
        proven: serve modules of any class. False: only those whose masks transformers itself leaves out, see `routed`.
    """
    kernels = tuple(own_kernel(op, kernel) for op in ("attention", "paged_attention", "mla_attention", "varlen_attention"))
    known: dict[tuple[Any, ...], tuple[range, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {}

    # The body runs once a layer and token, so it makes few calls: in eager decoding the host is slower than the GPU, and the work between
    # two layers drops this code from the processor's caches. `known` maps the facts by which the kernel of a plain call is chosen, less
    # those that SDPA checks itself, to a function that hands SDPA the tensors as they are, and to the numbers of keys that no kernel tells
    # apart. Autocast, torch.func and forward mode see SDPA itself. Policy, registry and target are attributes, which cost less than a call.
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
            attention_mask: None; bool (True: visible) or float `[B or 1, Hq or 1, S, T]`; or a descriptor. With a mask, the mask
                alone decides which keys are visible; packed requests go to `attnops.varlen_attention`. None is causal when `is_causal` (or
                the module's own flag) is true; query i is then at key i, as in transformers' sdpa, and keys past the last query are cut
                off.
            scaling: factor on q.k, default `1 / sqrt(D)`; a tensor is multiplied into the query.
            dropout: on the probabilities. When it is above 0 and the module trains, the call is computed in plain torch.
            sliding_window: keys visible, the own included; used only when a causal call comes without a mask.
            s_aux, sinks: `[Hq]` sink logits. position_bias: float `[B or 1, Hq, S, T]`, added to the logits.
            cu_seq_lens_q, ...: packed requests in one row: `attnops.varlen_attention`. Beside a mask, the requests of a row are kept apart
                and the mask decides the rest. The documents of a descriptor give way to these.
            attnops_cache: the layer's paged cache. key and value are then the new ones `[1, B, Hkv, S, D]`, see attnops.hf.paged.attention,
                or latents `[1, B, 1, S, Dc]` and rotated keys `[1, B, 1, S, Dr]`.
            output_attentions: return the weights, too, as eager attention does: the call is then computed in plain torch.

        Returns:
            output `[B, S, Hq, Dv]` contiguous; the attention weights `[B, Hq, S, T]` if they are asked for, else None.

        Raises:
            InvalidInput: an argument that would change the result and is not known here, or a mask of a wrong shape or dtype.
        """
        compiling = is_dynamo_compiling()
        same: tuple[Any, ...] | None = None
        if not (
            compiling or attention_mask is not None or s_aux is not None or sinks is not None or position_bias is not None
            or cu_seq_lens_q is not None or attnops_cache is not None or output_attentions or (dropout and module.training)
            or type(scaling) not in _NUMBERS or type(query) is not Tensor or not others.keys() <= HARMLESS
            or is_grad_enabled() or _len_torch_dispatch_stack() or profiling() or tracing() or _recorded(module, False)
        ):  # fmt: skip
            query_sizes, sizes, value_sizes = query.shape, key.shape, value.shape
            same = (
                type(module), getattr(module, "is_causal", True), is_causal, scaling, sliding_window, softcap, _ACTIVE.key,
                _REGISTRY.generation, _OVERRIDE.target, query_sizes, sizes[1], value_sizes[-1], query.dtype, query.is_cpu,
            )  # fmt: skip
            kept = known.get(same)
            # SDPA would broadcast a key or a value of another batch, and heads of its own for the value. It refuses all else that differs.
            if kept is not None and sizes[2] in kept[0] and sizes[0] == query_sizes[0] and value_sizes[:3] == sizes[:3]:
                try:
                    return kept[1](query, key, value), None
                except RuntimeError:
                    same = None  # the checks below name the argument
        if others and (compiling or not others.keys() <= HARMLESS):
            check_others(others)
        cls: Any = type(module)
        if not (additive or proven or (routed(cls) if compiling else cached_routed(cls))):
            want = "attnops.patch(model), which tries masks with this model: transformers does not route it through sdpa"
            fail(InvalidInput, "attn_implementation", f"attnops for {cls.__name__}", want)
        if sinks is None:
            sinks = s_aux
        if sinks is not None and sinks.dim() != 1:
            sinks = sinks.reshape(-1)
        if isinstance(scaling, Tensor):
            query, scaling = query * scaling, 1.0
        cap = float(softcap or 0.0)
        weights_too = output_attentions or _recorded(module, compiling)
        if key.dim() == 5 or isinstance(attnops_cache, (PagedKeyCache, View)):
            odd = {"position_bias": position_bias, "cu_seq_lens_q": cu_seq_lens_q, "output_attentions": weights_too or None}
            asked = pages.Asked(module, query, key, value, attention_mask, attnops_cache, dropout, is_causal, scaling, cap, sinks, odd)
            if (output := pages.attend(asked, *kernels)) is not None:
                return output, None
            key, value = cls.expand_kv(module, key[0], value[0])
        causal = not additive and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        left, start, end, keys = -1, None, None, key.shape[2]
        drops = dropout > 0.0 and module.training
        packed: tuple[Tensor | None, Tensor | None, int | None, int | None] | None = None
        mask, beside = attention_mask, cu_seq_lens_q is not None and attention_mask is not None
        if mask is None:
            if cu_seq_lens_q is not None:
                packed = cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k
                left = sliding_window - 1 if sliding_window else -1
            elif causal:
                queries = query.shape[2]
                if queries != 1 and keys > queries:
                    key, value = key[:, :, :queries], value[:, :, :queries]
                    position_bias = None if position_bias is None else position_bias[..., :queries]
                if sliding_window is not None and 0 < sliding_window < keys:
                    left = sliding_window - 1
        elif mask.dtype == requests.DTYPE:
            batch, length = query.shape[0], query.shape[2]
            found, mask, causal = requests.read(mask, batch, length, keys), None, True
            left, count = found.window_left, found.starts.shape[0] - 1
            # No kernel of packed requests serves these.
            pairs = drops or weights_too or position_bias is not None or kernel != kernels[3]
            if beside and not (pairs or found.padded):
                packed, beside = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k), False
            elif statically_known_true(count == batch):
                pass  # each row is one request
            elif pairs or beside or statically_known_true(count == batch * length):
                mask, causal, left = requests.written_out(found, batch, length), False, -1
            else:
                packed = found.starts, found.starts, found.longest, found.longest
        elif mask.dtype == descriptor.DTYPE:
            causal, left, start, end = descriptor.read_once(mask, query.shape[0])
            mask = None
        else:
            causal = False
        if position_bias is not None:
            mask = join(position_bias, mask)
        if beside and cu_seq_lens_q is not None:
            mask = apart(query, key, mask, cu_seq_lens_q, cu_seq_lens_k)
        if mask is not None and mask.dim() < 4:
            mask = mask[(None,) * (4 - mask.dim())]
        device = query.device.type
        if device != "meta" and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        given = query, key, value
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        call = Attention(
            query, key, value, mask, sinks, None, None, start, end, scale=scale, causal=causal, window_left=side(left), softcap=cap,
            policy=key_for("attention", kernels[0]),
        )  # fmt: skip
        if packed is None and is_recorded() and not (drops or weights_too):
            return in_torchs_ops(call), None
        if packed is None and not (drops or weights_too):
            # Only a call whose keys were not cut off above is remembered.
            run = attend.find(call) if same is not None and key.shape[1] == keys and not (overheard() or autocasting()) else None
            if run is None or same is None:
                return attend(call)[0], None
            usual = query.stride(3) == key.stride(3) == value.stride(3) == 1  # other strides may choose another kernel
            if usual and run is sdpa.attention and (straight := sdpa.heads_first(call)) is not None:
                if len(known) >= KINDS:
                    known.clear()
                grown = growth(given, (-1, 2, 2), (sliding_window or 0,))  # a window that begins to bind is another call
                known[same] = (range(keys, keys + 1) if grown is None else grown[0]), straight
                return straight(*given), None
            return run(call)[0], None
        if packed is None:
            output, weights = in_torch(call, dropout if drops else 0.0, keys)
            if not weights_too:
                return output, None
            if not compiling:
                warnings.warn(_WEIGHTS, stacklevel=2)
            return output, weights
        if drops or weights_too:
            field, got, want = ("dropout", dropout, "0") if drops else ("output_attentions", True, "False")
            fail(InvalidInput, field, got, f"{want} for packed requests without a mask: no kernel does that")
        starts_q, starts_k, longest_q, longest_k = packed
        ours = starts_q is not cu_seq_lens_q
        one_row = query.shape[0] == 1 and mask is None
        if starts_q is None or starts_k is None or longest_q is None or longest_k is None or not (ours or one_row):
            beside_it = {"cu_seq_lens_k": starts_k, "max_length_q": longest_q, "max_length_k": longest_k}
            missing = ", ".join(name for name, given_too in beside_it.items() if given_too is None)
            fault = f"no {missing}" if missing else f"a batch of {query.shape[0]}" + " with position_bias" * (mask is not None)
            want = "one row, with cu_seq_lens_k, max_length_q and max_length_k, and no position_bias"
            fail(InvalidInput, "cu_seq_lens_q", fault, want)
        output = varlen_attention(
            query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), starts_q, starts_k, max_seqlen_q=_int(longest_q),
            max_seqlen_k=_int(longest_k), scale=scale, causal=causal, window=(left, -1 if causal else left), softcap=cap, sinks=sinks,
            padded=not ours, kernel=kernel,
        )  # fmt: skip
        return output.unflatten(0, query.shape[:2]), None

    return attention


def _int(longest: Any) -> Any:
    """A length as `varlen_attention` takes it. A symbol stays one: `int()` of it would make it a constant in torch.export."""
    return longest if isinstance(longest, torch.SymInt) else int(longest)


def _recorded(module: Any, compiling: bool) -> bool:
    """Does transformers record attention weights now? Not every layer receives the argument that asks for them."""
    config = getattr(module, "config", None)
    # A config's own way to look an attribute up makes three calls.
    if config is not None and (config.__dict__ if compiling else _own(config, "__dict__")).get("_output_attentions"):
        return True
    if _collector is None or compiling:
        return False
    found = _collector.global_var if _collector.compiling else _collector.context_var.get()
    return bool(found) and any(kind.endswith("attentions") for kind in found)


def check_others(others: dict[str, Any]) -> None:
    """Raise InvalidInput for an unknown argument that may change the result: a tensor, or a name with one of _TELLING."""
    for name, value in others.items():
        if name in HARMLESS or value is None or value is False:
            continue
        if name == "output_attentions":
            fail(InvalidInput, name, value, "False: kernels of continuous batching return no attention weights")
        if _holds_tensor(value) or any(word in name for word in _TELLING):
            want = f"one of {', '.join(sorted(HANDLED))}: dropping it would change the result"
            fail(InvalidInput, f"attention argument {name}", type(value).__name__, want)


def _holds_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value))


def join(bias: Tensor, mask: Tensor | None) -> Tensor:
    """One additive mask of a position bias and a bool or float mask that broadcast with each other."""
    if mask is None:
        return bias
    return bias.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else bias + mask


def apart(query: Tensor, key: Tensor, mask: Tensor | None, cu_seq_lens_q: Tensor, cu_seq_lens_k: Tensor | None) -> Tensor:
    """The mask (or None), restricted to pairs of tokens of one packed request.

    Raises InvalidInput: several rows, or other keys than queries, whose positions a mask does not know.
    """
    batch, _, count, _ = query.shape
    same = cu_seq_lens_k is None or cu_seq_lens_k.shape == cu_seq_lens_q.shape
    if batch != 1 or count != key.shape[2] or not same:
        got = f"a batch of {batch}, {count} queries and {key.shape[2]} keys beside a mask"
        fail(InvalidInput, "cu_seq_lens_q", got, "one row of as many keys as queries, or no mask")
    tokens = torch.arange(count, device=query.device)
    request = torch.searchsorted(cu_seq_lens_q.to(tokens), tokens, right=True)
    together = (request[:, None] == request)[None, None]
    if mask is None:
        return together
    return mask & together if mask.dtype == torch.bool else mask.masked_fill(~together, float("-inf"))


def in_torchs_ops(call: Attention) -> Tensor:
    """`[B, S, Hq, Dv]` for a tool that records the model: the attention that was replaced."""
    if by_sdpa.says(call):
        return by_sdpa.attention(call)[0]
    return in_torch(call, 0.0)[0]


def in_torch(call: Attention, p: float, keys: int | None = None) -> tuple[Tensor, Tensor]:
    """(`[B, S, Hq, Dv]`, weights `[B, Hq, S, T]`) in plain torch: the formula of the reference, with dropout on the probabilities,
    not rescaled after it. The output is made of these weights, so that they have gradients.

    keys: T, where zeros shall follow the weights of the call's keys; None: as many as the call has.

    The random numbers are drawn for `[B, Hq, S, T]` in the query's dtype, as transformers' eager attention draws them, so the
    same seed drops the same weights.
    """
    query, key, value, sinks = call.query, call.key, call.value, call.sinks
    rules = Rules(call.scale, call.causal, call.window_left, -1, call.softcap)
    see = dense_visible(query, key, call.kv_start, call.kv_end, rules)
    logits = scores(wide(query), dequantise(key, None, query.dtype), see, call.mask, rules)
    # Not exp(logits - lse): every weight would have the rounding of a large lse.
    sink = None if sinks is None else sinks.to(logits.dtype)[None, :, None, None]
    top = logits.amax(-1, keepdim=True)
    top = (top if sink is None else torch.maximum(top, sink)).clamp(min=torch.finfo(logits.dtype).min)
    weights = torch.exp(logits - top)
    total = weights.sum(-1, keepdim=True) + (0.0 if sink is None else torch.exp(sink - top))
    weights = weights / torch.where(total == 0.0, 1.0, total)
    weights = drop(weights.to(query.dtype), p, training=p > 0.0)
    b, h, s, t = weights.shape
    groups = value.shape[2]
    used = weights
    if keys is not None and keys > t:
        weights = pad(weights, (0, keys - t))
        used = weights[..., :t]
    output = torch.einsum("bhgst,bthd->bshgd", used.reshape(b, groups, h // groups, s, t), value)
    return output.reshape(b, s, h, value.shape[3]).contiguous(), weights
