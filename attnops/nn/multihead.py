"""`MultiheadAttention`: torch.nn.MultiheadAttention with the attention between its projections done
by attnops."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnops.core.errors import InvalidInput, fail
from attnops.core.record import need
from attnops.nn import arguments as check
from attnops.nn.dropout import dropped
from attnops.nn.jagged import padded, rows_of, unpadded
from attnops.ops import attention, varlen_attention

MASKS = "bool (True: not to be seen) or float (added to the logits)"


class MultiheadAttention(nn.MultiheadAttention):
    """Drop-in for torch.nn.MultiheadAttention: same arguments, parameters, state_dict and results.

    With need_weights=False and no dropout the attention is `attnops.attention` (`kernel=` forces a
    kernel). With need_weights=True it is plain torch, because kernels give no weights, and with
    dropout in training it is torch's scaled_dot_product_attention. A query that may see no key
    gives 0 (and weights 0) where torch gives NaN.

    Layers of torch.nn call this module in eval mode, too, because it has a forward pre-hook, which
    does nothing. Nested tensors, jagged or of the strided layout, which torch.nn.TransformerEncoder
    makes of padded batches, go through `attnops.varlen_attention`: the host reads the longest
    length of jagged ones, which waits for a GPU, and where compiled code has a graph break.

    Constructor and calls raise InvalidInput for arguments that torch refuses. Masks follow torch: a
    bool True hides the key, while in `attnops.attention` True shows it.
    """

    __prepare_scriptable__ = check.not_scripted

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        kernel: str | None = None,
    ) -> None:
        check.size("embed_dim", embed_dim)
        need(
            embed_dim % check.size("num_heads", num_heads) == 0,
            "num_heads",
            num_heads,
            f"a divisor of embed_dim = {embed_dim}",
        )
        check.number("dropout", dropout, 0.0, 1.0 + 1e-12)
        for field, dim in (("kdim", kdim), ("vdim", vdim)):
            if dim is not None:
                check.size(field, dim)
        super().__init__(
            embed_dim,
            num_heads,
            dropout,
            bias,
            add_bias_kv,
            add_zero_attn,
            kdim,
            vdim,
            batch_first,
            device,
            dtype,
        )
        self.kernel = kernel
        self.register_forward_pre_hook(_is_called)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; L queries, S keys, N requests, E = embed_dim.

        Args:
            query: `[L, N, E]`, or `[N, L, E]` with batch_first, or `[L, E]`, or nested `[N, L, E]`
                with batch_first, as key and value then.
            key, value: likewise, `[S, N, kdim]`, `[S, N, vdim]`.
            key_padding_mask: `[N, S]` or `[S]`, bool (True: not to be seen) or float (added to the
                logits).
            need_weights: also return the weights.
            average_attn_weights: return their mean over heads.
            attn_mask: `[L, S]` or `[N * num_heads, L, S]`, bool or float likewise.
            is_causal: a hint that attn_mask is the causal mask of as many queries as keys; needs
                attn_mask.

        Returns:
            As query; and weights `[N, L, S]` (`[N, num_heads, L, S]` if not averaged, no N without
            a batch) or None. S counts the keys that add_bias_kv and add_zero_attn add.

        Raises:
            InvalidInput: a shape, dtype or combination breaks this contract. UnknownKernel,
                NoKernel: `kernel` cannot run.
        """
        if check.nested(query):
            unmasked = key_padding_mask is None and attn_mask is None and not is_causal
            out, weights = self._nested(query, key, value, unmasked, need_weights)
        else:
            out, weights = self._dense(
                query, key, value, key_padding_mask, need_weights, attn_mask, is_causal
            )
        if weights is not None and average_attn_weights:
            weights = weights.mean(-3)
        return out, weights

    def _dense(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """As `forward`, of plain tensors. Weights are those of every head."""
        batched = self._check(query, key, value, is_causal, attn_mask)
        alike = query is key and key is value
        query, key, value = map(self._with_batch_first, (query, key, value))
        if key_padding_mask is not None and not batched:
            key_padding_mask = key_padding_mask[None]
        mask = self._mask(query, key, key_padding_mask, attn_mask)
        # The hint spares the mask where both mean the same: not with keys that only the mask leaves
        # visible.
        extra = key_padding_mask is not None or self.bias_k is not None or self.add_zero_attn
        causal = is_causal and not extra and query.shape[1] == key.shape[1]
        q, k, v = self._project(query, key, value, alike)
        k, v, mask = self._more_keys(k, v, mask)
        attended, weights = self._attend(q, k, v, mask, causal, need_weights)
        out: Tensor = self.out_proj(attended.flatten(-2))
        if not batched:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights

    def _with_batch_first(self, x: Tensor) -> Tensor:
        """`[L, E]`, `[L, N, E]` or `[N, L, E]` as `[N, L, E]`."""
        if x.dim() == 2:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(`[N, L, H, D]`, weights `[N, H, L, S]` or None)."""
        if need_weights:
            return self._plain(q, k, v, mask)
        mask = None if causal else mask
        if self.dropout > 0 and self.training:
            return dropped(
                q, k, v, self.dropout, scale=self.head_dim**-0.5, causal=causal, mask=mask
            ), None
        return attention(q, k, v, mask=mask, causal=causal, kernel=self.kernel), None

    def _nested(
        self, query: Tensor, key: Tensor, value: Tensor, unmasked: bool, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """As `forward`, of requests of different lengths: a nested tensor like the query.

        Weights are `[N, num_heads, L, S]`, of the longest lengths and 0 behind a request's end.
        """
        alike = query is key and key is value
        drops = self.dropout > 0 and self.training
        more_keys = self.bias_k is not None or self.add_zero_attn
        if not unmasked or drops or more_keys or not self.batch_first:
            want = "batch_first, and no mask, dropout in training, add_bias_kv or add_zero_attn"
            fail(InvalidInput, "query", "a nested tensor with more than it can have", want)
        rows = rows_of(query, key, value, strided=True)
        widths = (self.embed_dim, self.kdim, self.vdim)
        for field, x, width in zip(("query", "key", "value"), rows, widths, strict=True):
            token = tuple(x.values.shape[1:])
            need(
                token == (width,),
                field,
                f"tokens of shape {token}",
                f"({width},), as the module was built",
            )
        # The lengths first: where compiled code breaks its graph there, it may not hand on views of
        # one product.
        (cu_q, most_q), (cu_k, most_k) = ((x.cu(), x.longest(None)) for x in rows[:2])
        q, k, v = self._project(rows[0].values, rows[1].values, rows[2].values, alike)
        weights = None
        if need_weights:
            q, seen_q = padded(q, cu_q, most_q)
            k, seen_k = padded(k, cu_k, most_k)
            v, _ = padded(v, cu_k, most_k)
            seen = seen_q[:, None, :, None] & seen_k[:, None, None]
            attended, weights = self._plain(q, k, v, seen)
            attended = unpadded(attended, cu_q, len(rows[0].values))
        else:
            sizes: dict[str, Any] = {"max_seqlen_q": most_q, "max_seqlen_k": most_k}
            attended = varlen_attention(q, k, v, cu_q, cu_k, **sizes, kernel=self.kernel)
        return rows[0].like(self.out_proj(attended.flatten(-2))), weights

    def _check(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, attn_mask: Tensor | None
    ) -> bool:
        """Is the call batched?"""
        seq, item = ("N, L", "N, S") if self.batch_first else ("L, N", "S, N")
        check.tensor("query", query, f"[L, {self.embed_dim}] or [{seq}, {self.embed_dim}]", 2, 3)
        need(
            not check.nested(key, value),
            "key, value",
            "nested tensors",
            "plain tensors, as the query",
        )
        dims = query.dim()
        for field, x, width in (
            ("query", query, self.embed_dim),
            ("key", key, self.kdim),
            ("value", value, self.vdim),
        ):
            check.tensor(
                field,
                x,
                f"[S, {width}]" if dims == 2 else f"[{item}, {width}], batched as the query",
                dims,
            )
            need(
                x.shape[-1] == width,
                f"{field}.shape[-1]",
                x.shape[-1],
                f"{width}, as the module was built",
            )
        if key.shape[:-1] != value.shape[:-1]:
            fail(
                InvalidInput,
                "value",
                f"shape {tuple(value.shape)}",
                f"as many values as keys {tuple(key.shape)}",
            )
        batch = 0 if self.batch_first else 1
        if dims == 3 and query.shape[batch] != key.shape[batch]:
            fail(
                InvalidInput,
                f"key.shape[{batch}]",
                key.shape[batch],
                f"{query.shape[batch]}, the query's batch",
            )
        need(
            not is_causal or attn_mask is not None,
            "attn_mask",
            None,
            "the causal mask, because is_causal=True is a hint about it",
        )
        return dims == 3

    def _mask(
        self, query: Tensor, key: Tensor, padding: Tensor | None, attn: Tensor | None
    ) -> Tensor | None:
        """Both masks as one, `[N or 1, H or 1, L or 1, S]`, as `attnops.attention` takes it. query
        `[N, L, E]`, key `[N, S, E]`."""
        batch, queries, keys = query.shape[0], query.shape[1], key.shape[1]
        masks = []
        if padding is not None:
            masks.append(_mask_like("key_padding_mask", padding, (batch, keys))[:, None, None])
        if attn is not None:
            by_head = isinstance(attn, Tensor) and attn.dim() == 3
            heads = (batch * self.num_heads,) if by_head else ()
            attn = _mask_like("attn_mask", attn, (*heads, queries, keys))
            every = attn.unflatten(0, (batch, self.num_heads)) if by_head else attn[None, None]
            masks.append(every)
        if not masks:
            return None
        if all(mask.dtype == torch.bool for mask in masks):
            return ~reduce(torch.logical_or, masks)
        return reduce(torch.add, [_additive(mask, query.dtype) for mask in masks])

    def _project(
        self, query: Tensor, key: Tensor, value: Tensor, alike: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Heads `[..., H, D]`."""
        one = self.in_proj_weight
        if one is not None and alike:
            projected = F.linear(query, one, self.in_proj_bias).chunk(3, -1)
        else:
            weights = (
                (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
                if one is None
                else one.chunk(3)
            )
            biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
            projected = tuple(map(F.linear, (query, key, value), weights, biases))
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)) for x in projected)
        return q, k, v

    def _more_keys(
        self, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The keys that add_bias_kv and add_zero_attn put behind the others, visible to all."""
        ends = (
            [(self.bias_k, self.bias_v)]
            if self.bias_k is not None and self.bias_v is not None
            else []
        )
        ends += [(k.new_zeros(self.embed_dim),) * 2] if self.add_zero_attn else []
        for end in ends:
            shape = (k.shape[0], 1, self.num_heads, self.head_dim)
            k, v = (
                torch.cat((x, e.to(x.dtype).view(1, 1, *shape[2:]).expand(shape)), 1)
                for x, e in zip((k, v), end, strict=True)
            )
            if mask is not None:
                mask = F.pad(mask, (0, 1), value=True if mask.dtype == torch.bool else 0.0)
        return k, v, mask

    def _plain(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """(`[N, L, H, D]`, weights `[N, H, L, S]`) in torch operators."""
        logits = q.transpose(1, 2) * self.head_dim**-0.5 @ k.permute(0, 2, 3, 1)
        if mask is None:
            weights = logits.softmax(-1)
        else:
            added = _additive(~mask, logits.dtype) if mask.dtype == torch.bool else mask
            blind = (added == float("-inf")).all(-1, keepdim=True)
            weights = (logits + added).masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
        weights = F.dropout(weights, self.dropout, self.training)
        return (weights @ v.transpose(1, 2)).transpose(1, 2), weights


def _is_called(module: nn.Module, given: tuple[Any, ...]) -> None:
    """Nothing: a module with a hook is called by torch.nn.TransformerEncoderLayer in eval mode,
    too.

    Of one without hooks the layer reads the weights, for a kernel of torch's own.
    """


def _mask_like(field: str, mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    check.tensor(field, mask, f"{list(shape)}, {MASKS}", len(shape))
    need(mask.dtype == torch.bool or mask.is_floating_point(), f"{field}.dtype", mask.dtype, MASKS)
    if mask.shape != torch.Size(shape):
        fail(InvalidInput, field, f"shape {tuple(mask.shape)}", f"{list(shape)}")
    return mask


def _additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """A torch mask as a tensor to add to the logits."""
    if hidden.dtype != torch.bool:
        return hidden
    return torch.zeros_like(hidden, dtype=dtype).masked_fill(hidden, float("-inf"))
