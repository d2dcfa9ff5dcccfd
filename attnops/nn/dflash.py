"""`DFlashHead`: the block draft of DFlash, https://arxiv.org/abs/2602.06036."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnops.cache.batch import PagedBatch
from attnops.core.record import need
from attnops.nn import arguments as check
from attnops.nn.attention import Attention
from attnops.nn.heads import MLP, assign, config_of, fits, rope_of_config, tensors_of
from attnops.nn.self_attention import SelfAttention
from attnops.ops import rotate_and_write_kv

FULL, SLIDING = "full_attention", "sliding_attention"

_ALONE = {"hidden_act": "silu", "use_swa": False, "is_neox_style": True, "selector_rank": None}
"""Words of a config that have one value here. DFlash 2 has a selector."""


class _New(NamedTuple):
    """Tokens that a call writes: cosines and sines `[T, D / 2]` of their positions, and their slots
    int64 `[T]`."""

    cos: Tensor
    sin: Tensor
    slots: Tensor


class _Layer(nn.Module):
    """A decoder layer of Qwen 3. Its pages have keys and values of the target's states, and behind
    them those of the block."""

    def __init__(self, words: Mapping[str, Any], window: int, made: dict[str, Any]) -> None:
        """window: tokens that a query sees, its own included; 0: all."""
        super().__init__()
        hidden_size, bias = words["hidden_size"], bool(words.get("attention_bias"))
        causal = words.get("is_causal", words.get("causal"))
        causal = window > 0 if causal is None else bool(causal)
        eps = check.number("config.rms_norm_eps", words.get("rms_norm_eps", 1e-6), 0.0)
        self.self_attn = SelfAttention(
            hidden_size,
            check.size("config.num_attention_heads", words.get("num_attention_heads")),
            words.get("num_key_value_heads"),
            words.get("head_dim"),
            qk_norm=True,
            norm_eps=eps,
            bias=bias,
            out_bias=bias,
            causal=causal,
            window=(window - 1, -1 if causal else window - 1),
            **made,
        )
        inner_size = check.size("config.intermediate_size", words.get("intermediate_size"))
        self.mlp = MLP(hidden_size, inner_size, made)
        self.input_layernorm, self.post_attention_layernorm = (
            nn.RMSNorm(hidden_size, eps=eps, **made) for _ in range(2)
        )

    def read(self, states: Tensor, new: _New, k_pages: Tensor, v_pages: Tensor) -> None:
        """Write keys and values of the states `[T, E]`."""
        self._written(None, states, new, k_pages, v_pages)

    def forward(
        self,
        block: Tensor,
        states: Tensor,
        new: _New,
        batch: PagedBatch,
        k_pages: Tensor,
        v_pages: Tensor,
    ) -> Tensor:
        """block: `[T, E]`. states: `[C, E]`, which come before the block in `new`."""
        both, attn = torch.cat([states, self.input_layernorm(block)]), self.self_attn
        # The queries of the states, which nothing needs, spare a product of its own for keys and
        # values: each weight is read once.
        turned = self._written(attn.q_proj(both), both, new, k_pages, v_pages)
        seen = attn.attention.over_pages(turned[len(states) :], batch, k_pages, v_pages)
        block = block + attn.o_proj(seen.flatten(-2))
        out: Tensor = block + self.mlp(self.post_attention_layernorm(block))
        return out

    def _written(
        self, query: Tensor | None, hidden: Tensor, new: _New, k_pages: Tensor, v_pages: Tensor
    ) -> Tensor:
        """The turned queries `[T, Hq, D]`, where keys and values of hidden are in the pages."""
        attn = self.self_attn
        key, value = (
            proj(hidden).unflatten(-1, (attn.attention.num_kv_heads, -1))
            for proj in (attn.k_proj, attn.v_proj)
        )
        q_norm, k_norm = attn.q_norm, attn.k_norm
        assert q_norm is not None and k_norm is not None and q_norm.eps is not None
        # The op turns queries, too. Keys take their place where there are none.
        turned, _ = rotate_and_write_kv(
            key if query is None else query.unflatten(-1, (attn.attention.num_heads, -1)),
            key,
            value,
            k_pages,
            v_pages,
            new.slots,
            new.cos,
            new.sin,
            q_norm=q_norm.weight,
            k_norm=k_norm.weight,
            eps=q_norm.eps,
        )
        return turned


class DFlashHead(nn.Module):
    """The block draft of DFlash: a few decoder layers that predict all tokens of a block at once.

    The layers attend to keys and values of the target's hidden states, and to the block: the last
    token of the text, and tokens that are masked. Embeddings and the last linear are the target's.
    E is the hidden size, N the block size.

    Args:
        config: the words of the checkpoint's config.json; those of its `dflash_config` count as its
            own.
        device, dtype: of the parameters, which start as torch's do.

    Attributes:
        block_size: N, of which N - 1 tokens are drafts.
        states: the numbers in `hidden_states` of transformers, where 0 is the embeddings, of the
            states that it reads beside each other: one more than the `target_layer_ids`.
        mask_token_id: the target's id of a token that is masked.
        folder: of its checkpoint; "" without one.

    Raises:
        InvalidInput: the config lacks a word, or asks for what these layers have not.
    """

    __prepare_scriptable__ = check.not_scripted
    folder: str = ""

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        words = {**config, **(config.get("dflash_config") or {})}
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        for field, alone in _ALONE.items():
            given = words.get(field, alone)
            need(given == alone, f"config.{field}", repr(given), repr(alone))
        self.hidden_size = check.size("config.hidden_size", words.get("hidden_size"))
        self.vocab_size = check.size("config.vocab_size", words.get("vocab_size"))
        self.block_size = check.size("config.block_size", words.get("block_size", 16))
        need(self.block_size > 1, "config.block_size", self.block_size, "2 or more tokens")
        self.mask_token_id: Any = words.get("mask_token_id")
        inside = self.mask_token_id in range(self.vocab_size)
        want = f"0 to {self.vocab_size - 1}, the ids of the target's words"
        need(inside, "config.mask_token_id", self.mask_token_id, want)
        ids: Any = words.get("target_layer_ids")
        known = bool(ids) and all(number >= 0 for number in ids)
        need(known, "config.target_layer_ids", ids, "numbers of the target's layers, from 0")
        self.states = tuple(number + 1 for number in ids)
        self.embedding_scale = float(words.get("input_embedding_scale", 1.0))
        width = len(self.states) * self.hidden_size
        self.fc = nn.Linear(width, self.hidden_size, bias=False, **made)
        layers = [_Layer(words, window, made) for window in _windows(words)]
        self.layers = nn.ModuleList(layers)
        self.rope = rope_of_config(words, self.attention.head_dim)
        eps = layers[0].input_layernorm.eps
        self.hidden_norm, self.norm = (
            nn.RMSNorm(self.hidden_size, eps=eps, **made) for _ in range(2)
        )

    @property
    def num_drafts(self) -> int:
        """N - 1."""
        return self.block_size - 1

    @property
    def attention(self) -> Attention:
        """Of the first layer. The others differ from it in windows alone."""
        first = self.layers[0]
        assert isinstance(first, _Layer)
        return first.self_attn.attention

    @classmethod
    def from_folder(cls, folder: str | Path, target: nn.Embedding | None = None) -> DFlashHead:
        """The draft of a checkpoint: config.json, and *.safetensors or pytorch_model*.bin. See
        `from_state_dict`."""
        made = cls.from_state_dict(config_of(folder), tensors_of(folder), target)
        made.folder = str(folder)
        return made

    @classmethod
    def from_state_dict(
        cls,
        config: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        target: nn.Embedding | None = None,
    ) -> DFlashHead:
        """The draft of a public checkpoint.

        Args:
            config: as for the class.
            tensors: by name, as z-lab and SpecForge write them.
            target: the target's embeddings, `model.get_input_embeddings()`, whose device and dtype
                the draft gets.

        Raises:
            InvalidInput: a tensor is missing, has no place here or another shape, or the target has
                another vocabulary or hidden size.
        """
        head = cls(config, device="meta")
        fits(target, head.vocab_size, head.hidden_size)
        assign(head, tensors, "a DFlash draft")
        if target is not None:
            head.to(target.weight.device, target.weight.dtype)
        return head

    def read(
        self,
        states: Tensor,
        *,
        batch: PagedBatch,
        k_pages: Sequence[Tensor],
        v_pages: Sequence[Tensor],
    ) -> None:
        """Write keys and values of a context into the pages. No gradient.

        Args:
            states: `[T, len(self.states) * E]`, the target's of each token, beside each other.
            batch: of these tokens. A negative slot leaves one out.
            k_pages, v_pages: of each layer, `[P, page, Hkv, D]`.

        Raises:
            InvalidInput, NoGradient, NoKernel: as `attnops.ops.rotate_and_write_kv`.
        """
        states, new = self._context(states), self._new(states, batch)
        for layer, keys, values in zip(self.layers, k_pages, v_pages, strict=True):
            assert isinstance(layer, _Layer)
            layer.read(states, new, keys, values)

    def forward(
        self,
        last: Tensor,
        states: Tensor,
        *,
        embeddings: Tensor,
        context: PagedBatch,
        batch: PagedBatch,
        k_pages: Sequence[Tensor],
        v_pages: Sequence[Tensor],
    ) -> Tensor:
        """Read the rest of the context, and draft a block behind each of B texts. No gradient.

        Args:
            last: int64 `[B]`, the last token of each text, of which the target has no states yet.
            states: as for `read`, of tokens that were not read yet; there may be none.
            embeddings: `[vocab_size, E]`, the target's.
            context: the batch of `states`.
            batch: of the blocks: N tokens of each text, behind its context. Later tokens take the
                place of what a block writes there.
            k_pages, v_pages: as for `read`.

        Returns:
            `[B, N - 1, E]`: by the target's last linear, the logits of the tokens that follow.

        Raises:
            InvalidInput, NoGradient, NoKernel: as `read`, and as `attnops.ops.paged_attention`.
        """
        masked = last.new_full((len(last), self.num_drafts), self.mask_token_id)
        block = F.embedding(torch.cat([last[:, None], masked], 1).flatten(), embeddings)
        if self.embedding_scale != 1.0:
            block = block * self.embedding_scale
        states = self._context(states)
        new = self._new(states, context, batch)
        for layer, keys, values in zip(self.layers, k_pages, v_pages, strict=True):
            block = layer(block, states, new, batch, keys, values)
        out: Tensor = self.norm(block.unflatten(0, (len(last), -1))[:, 1:])
        return out

    def _context(self, states: Tensor) -> Tensor:
        """`[T, E]`: what all layers read of the target's states."""
        found: Tensor = self.hidden_norm(self.fc(check.last("states", states, self.fc.in_features)))
        return found

    def _new(self, like: Tensor, *batches: PagedBatch) -> _New:
        positions = torch.cat([batch.positions for batch in batches])
        slots = torch.cat([batch.slots for batch in batches])
        return _New(*self.rope.cos_sin(positions, like), slots)


def _windows(words: Mapping[str, Any]) -> list[int]:
    """Of each layer: the tokens that a query sees, its own included; 0: all."""
    count = check.size("config.num_hidden_layers", words.get("num_hidden_layers"))
    kinds = words.get("layer_types") or [FULL] * count
    known = len(kinds) == count and set(kinds) <= {FULL, SLIDING}
    need(known, "config.layer_types", kinds, f"{count} of {FULL!r} | {SLIDING!r}")
    if SLIDING not in kinds:
        return [0] * count
    window = check.size("config.sliding_window", words.get("sliding_window"), "tokens")
    return [window if kind == SLIDING else 0 for kind in kinds]
