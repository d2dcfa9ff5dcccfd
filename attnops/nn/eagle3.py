"""`Eagle3Head`: the draft head of EAGLE-3, https://arxiv.org/abs/2503.01840."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnops.core.errors import InvalidInput, fail
from attnops.core.record import need
from attnops.nn import arguments as check
from attnops.nn.heads import (
    MLP,
    assign,
    config_of,
    embedded,
    fits,
    only,
    rope_of_config,
    tensors_of,
)
from attnops.nn.self_attention import SelfAttention


class _Layer(nn.Module):
    """A decoder layer of Llama whose attention reads embedding and hidden state beside each
    other."""

    def __init__(self, config: Mapping[str, Any], hidden_size: int, made: dict[str, Any]) -> None:
        super().__init__()
        heads = check.size("config.num_attention_heads", config.get("num_attention_heads"))
        head_dim = config.get("head_dim") or hidden_size // heads
        bias = bool(config.get("attention_bias"))
        self.norm_before_residual = bool(config.get("norm_before_residual"))
        self.self_attn = SelfAttention(
            2 * hidden_size,
            heads,
            config.get("num_key_value_heads"),
            head_dim,
            rope=rope_of_config(config, head_dim),
            bias=bias,
            **made,
        )
        self.self_attn.o_proj = nn.Linear(heads * head_dim, hidden_size, bias=bias, **made)
        inner_size = check.size("config.intermediate_size", config.get("intermediate_size"))
        self.mlp = MLP(hidden_size, inner_size, made)
        eps = check.number("config.rms_norm_eps", config.get("rms_norm_eps", 1e-6), 0.0)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            nn.RMSNorm(hidden_size, eps=eps, **made) for _ in range(3)
        )

    def forward(self, embeddings: Tensor, hidden: Tensor, **where: Any) -> Tensor:
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        both = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        hidden = residual + self.self_attn(both, **where)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Eagle3Head(nn.Module):
    """The draft head of EAGLE-3: one decoder layer that predicts the target's next token.

    It reads the embedding of a token and, of the token before it, three hidden states of the
    target, or in later draft steps its own. E is its hidden size, Et the target's.

    Args:
        config: the words of the checkpoint's config.json; those of its `transformer_layer_config`,
            if it has one, count as its own.
        device, dtype: of the parameters, which start as torch's do.

    Attributes:
        states: the numbers of the three states in `hidden_states` of transformers, where 0 is the
            embeddings, by `eagle_aux_hidden_state_layer_ids` of the config as vLLM reads them.
            None: 2, n // 2 and n - 3 of n layers.
        embed_tokens: the embeddings of the target, or None: then forward takes embeddings.
        d2t: int64 `[draft_vocab_size]`; draft word i is the target's word `i + d2t[i]`.
        folder: of its checkpoint; "" without one.

    Raises:
        InvalidInput: the config lacks a word, or asks for what this layer has not.
    """

    __prepare_scriptable__ = check.not_scripted
    embed_tokens: nn.Embedding | None
    d2t: Tensor
    folder: str = ""

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        config = {**config, **(config.get("transformer_layer_config") or {})}
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        for field, given, want in (
            ("num_hidden_layers", config.get("num_hidden_layers", 1), 1),
            ("hidden_act", config.get("hidden_act", "silu"), "silu"),
        ):
            need(given == want, f"config.{field}", repr(given), repr(want))
        self.hidden_size = check.size("config.hidden_size", config.get("hidden_size"))
        self.target_hidden_size = check.size(
            "config.target_hidden_size", config.get("target_hidden_size") or self.hidden_size
        )
        # Else nothing would tell states of the target from those of the head.
        need(
            self.hidden_size != 3 * self.target_hidden_size,
            "config.hidden_size",
            self.hidden_size,
            "another number than 3 * target_hidden_size",
        )
        self.vocab_size = check.size("config.vocab_size", config.get("vocab_size"))
        words = config.get("draft_vocab_size") or self.vocab_size
        self.draft_vocab_size = check.size("config.draft_vocab_size", words)
        ids = config.get("eagle_aux_hidden_state_layer_ids")
        ids = ids or (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        self.states = None if ids is None else tuple(ids)
        self.embed_tokens = None
        self.fc = nn.Linear(3 * self.target_hidden_size, self.hidden_size, bias=False, **made)
        self.midlayer = _Layer(config, self.hidden_size, made)
        eps = self.midlayer.input_layernorm.eps
        self.norm = nn.RMSNorm(self.hidden_size, eps=eps, **made)
        self.lm_head = nn.Linear(self.hidden_size, self.draft_vocab_size, bias=False, **made)
        zeros = torch.zeros(self.draft_vocab_size, dtype=torch.int64, device=device)
        self.register_buffer("d2t", zeros)

    @classmethod
    def from_folder(cls, folder: str | Path, target: nn.Embedding | None = None) -> Eagle3Head:
        """The head of a checkpoint: config.json, and *.safetensors or pytorch_model*.bin. See
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
    ) -> Eagle3Head:
        """The head of a public checkpoint.

        Args:
            config: as for the class.
            tensors: by name, as EAGLE, SpecForge and speculators write them: the layer is
                `midlayer` or `layers.0`; `embed_tokens`, `t2d` and, where the vocabularies are the
                same, `d2t` may be absent.
            target: the target's embeddings, `model.get_input_embeddings()`. They serve a checkpoint
                without its own, and the head gets their device and dtype.

        Raises:
            InvalidInput: a tensor is missing, has no place here or another shape, or the target has
                another vocabulary or hidden size.
        """
        head = cls(config, device="meta")
        fits(target, head.vocab_size, head.target_hidden_size)
        given = {re.sub(r"^layers\.0\.", "midlayer.", name): t for name, t in tensors.items()}
        t2d = given.pop("t2d", None)
        if head.draft_vocab_size == head.vocab_size:
            given.setdefault("d2t", torch.zeros(head.draft_vocab_size, dtype=torch.int64))
        if "d2t" in given:
            given["d2t"] = given["d2t"].long()
        if "embed_tokens.weight" in given:
            head.embed_tokens = nn.Embedding(head.vocab_size, head.hidden_size, device="meta")
        assign(head, given, "an EAGLE-3 head")
        head._check_words(t2d)
        if target is not None:
            if head.embed_tokens is None and head.hidden_size == target.embedding_dim:
                head.embed_tokens = target
            head.to(target.weight.device, target.weight.dtype)
        return head

    def _check_words(self, t2d: Tensor | None) -> None:
        """t2d: the checkpoint's, bool `[vocab_size]`: which of the target's words the head has."""
        ids = self._ids()
        inside = bool((ids >= 0).all()) and bool((ids < self.vocab_size).all())
        limit = f"i + d2t[i] between 0 and {self.vocab_size - 1}"
        need(inside, "d2t", f"ids from {int(ids.min())} to {int(ids.max())}", limit)
        if t2d is not None:
            alike = torch.equal(t2d.bool().nonzero()[:, 0], ids.sort().values)
            need(alike, "t2d", "other words", "True at i + d2t[i], and nowhere else")

    def forward(
        self, tokens: Tensor, hidden: Tensor, *, rows: Tensor | None = None, **where: Any
    ) -> tuple[Tensor, Tensor]:
        """One draft step.

        Args:
            tokens: ids `[T]` or `[B, S]`, or their embeddings `[T, E]` or `[B, S, E]`.
            hidden: `[..., 3 Et]`, for each token the target's states of the token before it, low,
                middle and high beside each other; or `[..., E]`, what an earlier step returned.
            rows: int64 `[R]`, the tokens whose logits are wanted, counted over all of them. None:
                all, in the shape of tokens.
            where: positions, mask, batch, k_pages and the other arguments of
                `SelfAttention.forward`. The head's pages are those of a cache with one layer, of
                the same head dim and number of key heads.

        Returns:
            Logits `[R, draft_vocab_size]` or `[..., draft_vocab_size]` and hidden states `[R, E]`
            or `[..., E]`, for the next step's `hidden`.

        Raises:
            InvalidInput, NoGradient, NoKernel: as `SelfAttention.forward`.
        """
        embeddings = embedded(self.embed_tokens, tokens, self.hidden_size)
        if hidden.shape[-1] == 3 * self.target_hidden_size:
            hidden = self.fc(hidden)
        if hidden.shape != embeddings.shape:
            fail(
                InvalidInput,
                "hidden.shape",
                tuple(hidden.shape),
                f"{tuple(embeddings.shape)}, or {3 * self.target_hidden_size} numbers a token",
            )
        hidden = only(rows, self.midlayer(embeddings, hidden, **where))
        return self.lm_head(self.norm(hidden)), hidden

    def _ids(self) -> Tensor:
        return torch.arange(self.draft_vocab_size, device=self.d2t.device) + self.d2t

    def to_target(self, words: Tensor) -> Tensor:
        """The target's ids of draft words, int64 `[...]`."""
        return words + self.d2t[words]

    def over_target(self, probabilities: Tensor) -> Tensor:
        """`[..., vocab_size]`: probabilities `[..., draft_vocab_size]` of draft words as those of
        the target's ids, 0 for ids without a draft word."""
        whole = probabilities.new_zeros(*probabilities.shape[:-1], self.vocab_size)
        return whole.index_copy(-1, self._ids(), probabilities)
