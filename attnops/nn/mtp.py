"""`MTPLayer`: the layer of DeepSeek-V3 and GLM-4-MoE that predicts one token more,
https://arxiv.org/abs/2412.19437, section 2.2."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnops.nn import arguments as check
from attnops.nn.heads import assign, config_of, embedded, fits, only, tensors_of

OWN = ("enorm.", "hnorm.", "eh_proj.", "shared_head.", "embed_tokens.")
"""How the names of a checkpoint begin that are not those of the decoder layer."""


class MTPLayer(nn.Module):
    """A further layer behind the target's last one: it reads the embedding of a token and the
    hidden state of the token before it, and predicts the token that follows.

    E is the hidden size. The decoder layer is the caller's, so that it is the model's own code.

    Args:
        config: the words of the target's config.json.
        layer: a decoder layer: it takes `[..., E]` and the arguments named in `forward`, and
            returns `[..., E]`, or a tuple that begins with it.
        device, dtype: of the other parameters, which start as torch's do.

    Attributes:
        embed_tokens: the embeddings of the target, or None: then forward takes embeddings.

    Raises:
        InvalidInput: the config lacks a word.
    """

    __prepare_scriptable__ = check.not_scripted
    embed_tokens: nn.Embedding | None

    def __init__(
        self,
        config: Mapping[str, Any],
        layer: nn.Module,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.hidden_size = check.size("config.hidden_size", config.get("hidden_size"))
        self.vocab_size = check.size("config.vocab_size", config.get("vocab_size"))
        eps = check.number("config.rms_norm_eps", config.get("rms_norm_eps", 1e-6), 0.0)
        self.embed_tokens = None
        self.enorm, self.hnorm, norm = (
            nn.RMSNorm(self.hidden_size, eps=eps, **made) for _ in range(3)
        )
        self.eh_proj = nn.Linear(2 * self.hidden_size, self.hidden_size, bias=False, **made)
        self.layer = layer
        head = nn.Linear(self.hidden_size, self.vocab_size, bias=False, **made)
        self.shared_head = nn.ModuleDict({"norm": norm, "head": head})

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        layer: nn.Module,
        target: nn.Embedding | None = None,
        head: nn.Linear | None = None,
        index: int = 0,
    ) -> MTPLayer:
        """The layer of the target's own checkpoint, of whose files only these tensors are read. See
        `from_state_dict`."""
        config = config_of(folder)
        tensors = tensors_of(folder, _prefix(config, index))
        return cls.from_state_dict(config, tensors, layer, target, head, index)

    @classmethod
    def from_state_dict(
        cls,
        config: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        layer: nn.Module,
        target: nn.Embedding | None = None,
        head: nn.Linear | None = None,
        index: int = 0,
    ) -> MTPLayer:
        """The layer of a public checkpoint.

        Args:
            config: as for the class.
            tensors: by name; those named `model.layers.N.`, N = `num_hidden_layers` + index, are
                taken and become the parameters as they are. Experts may be apart
                (`mlp.experts.0.gate_proj`) where the layer has them in one tensor
                (`mlp.experts.gate_up_proj`).
            layer: as for the class. On the meta device it takes no memory before it is loaded.
            target: the target's embeddings, for a checkpoint that does not repeat them.
            head: the target's last linear, likewise.
            index: which of the further layers, from 0.

        Raises:
            InvalidInput: a tensor is missing, has no place here or another shape, or the target has
                another vocabulary or hidden size.
        """
        made = cls(config, layer, device="meta")
        fits(target, made.vocab_size, made.hidden_size)
        prefix = _prefix(config, index)
        given = {
            name.removeprefix(prefix): tensor
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        given = {
            name if name.startswith(OWN) else f"layer.{name}": tensor
            for name, tensor in given.items()
        }
        if "embed_tokens.weight" in given:
            made.embed_tokens = nn.Embedding(made.vocab_size, made.hidden_size, device="meta")
        if head is not None and "shared_head.head.weight" not in given:
            given["shared_head.head.weight"] = head.weight
        assign(made, _joined(given, made.state_dict()), f"{prefix}*")
        if made.embed_tokens is None:
            made.embed_tokens = target
        return made

    def forward(
        self, tokens: Tensor, hidden: Tensor, *, rows: Tensor | None = None, **where: Any
    ) -> tuple[Tensor, Tensor]:
        """One draft step.

        Args:
            tokens: ids `[T]` or `[B, S]`, in the form that the decoder layer takes, or their
                embeddings `[..., E]`.
            hidden: `[..., E]`, for each token the state of the token before it: of the target
                behind its last norm, or what an earlier step returned.
            rows: int64 `[R]`, the tokens whose logits are wanted, counted over all of them. None:
                all, in the shape of tokens.
            where: the further arguments of the decoder layer: positions, masks, caches.

        Returns:
            Logits `[R, vocab_size]` or `[..., vocab_size]` and hidden states `[R, E]` or
            `[..., E]`, behind the norm of the head, for the next step's `hidden`.

        Raises:
            InvalidInput: hidden or embeddings are not E wide, or ids have no embeddings.
        """
        embeddings = embedded(self.embed_tokens, tokens, self.hidden_size)
        hidden = check.last("hidden", hidden, self.hidden_size)
        both = torch.cat([self.enorm(embeddings), self.hnorm(hidden)], dim=-1)
        out = self.layer(self.eh_proj(both), **where)
        out = only(rows, out[0] if isinstance(out, tuple) else out)
        hidden = self.shared_head["norm"](out)
        return self.shared_head["head"](hidden), hidden


def _prefix(config: Mapping[str, Any], index: int) -> str:
    layers = check.size("config.num_hidden_layers", config.get("num_hidden_layers"))
    return f"model.layers.{layers + index}."


def _joined(given: dict[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`given`, with experts that are apart joined where one tensor for all of them is wanted:
    `[experts, 2 * inner, E]` with gate before up, and `[experts, E, inner]`."""
    for name, old in wanted.items():
        room, _, kind = name.rpartition(".")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind)
        if name in given or parts is None:
            continue
        experts = [
            [f"{room}.{expert}.{part}.weight" for part in parts] for expert in range(old.shape[0])
        ]
        if all(one in given for each in experts for one in each):
            given[name] = torch.stack(
                [torch.cat([given.pop(one) for one in each]) for each in experts]
            )
    return given
