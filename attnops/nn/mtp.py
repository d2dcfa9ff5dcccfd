"""`MTPLayer`: the layer of DeepSeek-V3, GLM-4-MoE, Qwen3-Next and Qwen3.5 that predicts one token
more, https://arxiv.org/abs/2412.19437, section 2.2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnops.core.record import need
from attnops.nn import arguments as check
from attnops.nn.heads import assign, config_of, embedded, fits, only, tensors_of

OWN = ("enorm.", "hnorm.", "eh_proj.", "shared_head.", "embed_tokens.")
"""How the names of a checkpoint begin that are not those of the decoder layer."""

QWEN = "mtp."
"""How Qwen's names of the whole layer begin."""

_OF_QWEN = {
    "fc.": "eh_proj.",
    "pre_fc_norm_embedding.": "enorm.",
    "pre_fc_norm_hidden.": "hnorm.",
    "norm.": "shared_head.norm.",
    "layers.0.": "layer.",
}
"""Qwen's names behind that, and ours."""


class MTPLayer(nn.Module):
    """A further layer behind the target's last one: it reads the embedding of a token and the
    hidden state of the token before it, and predicts the token that follows.

    E is the hidden size. The decoder layer is the caller's, so that it is the model's own code.

    Args:
        config: the words of the target's config.json.
        layer: a decoder layer: it takes `[..., E]` and the arguments named in `forward`, and
            returns `[..., E]`, or a tuple that begins with it.
        norm: makes a norm, of E and `eps=`, on the device and in the dtype that it likes. None:
            torch.nn.RMSNorm. Qwen's norms multiply by one more than their weights.
        device, dtype: of the other parameters, which start as torch's do.

    Attributes:
        embed_tokens: the embeddings of the target, or None: then forward takes embeddings.
        rotary_emb: the target's, which makes `position_embeddings` for the decoder layer of the
            hidden states and `position_ids`; None: forward is given what the layer takes.
        num_drafts: tokens that it drafts for a row in a round of `generate()`.
        folder: of its checkpoint; "" without one.

    Raises:
        InvalidInput: the config lacks a word.
    """

    __prepare_scriptable__ = check.not_scripted
    embed_tokens: nn.Embedding | None
    rotary_emb: nn.Module | None
    num_drafts: int = 3
    folder: str = ""

    def __init__(
        self,
        config: Mapping[str, Any],
        layer: nn.Module,
        *,
        norm: Callable[..., nn.Module] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.hidden_size = check.size("config.hidden_size", config.get("hidden_size"))
        self.vocab_size = check.size("config.vocab_size", config.get("vocab_size"))
        eps = check.number("config.rms_norm_eps", config.get("rms_norm_eps", 1e-6), 0.0)
        self.embed_tokens = self.rotary_emb = None
        norm = norm or partial(nn.RMSNorm, **made)
        self.enorm, self.hnorm, last = (norm(self.hidden_size, eps=eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * self.hidden_size, self.hidden_size, bias=False, **made)
        self.layer = layer
        head = nn.Linear(self.hidden_size, self.vocab_size, bias=False, **made)
        self.shared_head = nn.ModuleDict({"norm": last, "head": head})

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        layer: nn.Module,
        target: nn.Embedding | None = None,
        head: nn.Linear | None = None,
        index: int = 0,
        norm: Callable[..., nn.Module] | None = None,
    ) -> MTPLayer:
        """The layer of the target's own checkpoint, of whose files only these tensors are read. See
        `from_state_dict`."""
        config = config_of(folder)
        config |= config.get("text_config") or {}
        tensors = tensors_of(folder, (QWEN, _prefix(config, index)))
        made = cls.from_state_dict(config, tensors, layer, target, head, index, norm)
        made.folder = str(folder)
        return made

    @classmethod
    def from_state_dict(
        cls,
        config: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        layer: nn.Module,
        target: nn.Embedding | None = None,
        head: nn.Linear | None = None,
        index: int = 0,
        norm: Callable[..., nn.Module] | None = None,
    ) -> MTPLayer:
        """The layer of a public checkpoint.

        Args:
            config, norm: as for the class.
            tensors: by name; those named `mtp.`, or else `model.layers.N.`,
                N = `num_hidden_layers` + index, are taken and become the parameters as they are.
                Experts may be apart (`mlp.experts.0.gate_proj`) where the layer has them in one
                tensor (`mlp.experts.gate_up_proj`).
            layer: as for the class. On the meta device it takes no memory before it is loaded.
            target: the target's embeddings. None: those of the checkpoint, if it repeats them.
            head: the target's last linear, likewise.
            index: which of the further layers, from 0.

        Raises:
            InvalidInput: a tensor is missing, has no place here or another shape, or the target has
                another vocabulary or hidden size.
        """
        with torch.device("meta"):
            made = cls(config, layer, norm=norm)
        fits(target, made.vocab_size, made.hidden_size)
        given, what = _named(tensors, _prefix(config, index))
        need(bool(given), "tensors", f"none named {what}", "a checkpoint with such a layer")
        if target is not None:
            given.pop("embed_tokens.weight", None)
        elif "embed_tokens.weight" in given:
            made.embed_tokens = nn.Embedding(made.vocab_size, made.hidden_size, device="meta")
        if head is not None:
            given.pop("shared_head.head.weight", None)
            del made.shared_head["head"]
        assign(made, _joined(given, made.state_dict()), what)
        if target is not None:
            made.embed_tokens = target
        if head is not None:
            made.shared_head["head"] = head
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
        both = self.eh_proj(both)
        if self.rotary_emb is not None:
            at = where["position_ids"]
            # Of text, and of an image its time, height and width.
            at = at.expand(3, *at.shape) if hasattr(self.rotary_emb, "mrope_section") else at
            where["position_embeddings"] = self.rotary_emb(both, at)
        out = self.layer(both, **where)
        out = only(rows, out[0] if isinstance(out, tuple) else out)
        hidden = self.shared_head["norm"](out)
        return self.shared_head["head"](hidden), hidden


def _prefix(config: Mapping[str, Any], index: int) -> str:
    layers = check.size("config.num_hidden_layers", config.get("num_hidden_layers"))
    return f"model.layers.{layers + index}."


def _named(tensors: Mapping[str, Tensor], prefix: str) -> tuple[dict[str, Tensor], str]:
    """(those of the whole layer by our names, the names that they were found by)."""
    found = _behind(QWEN, tensors)
    if found:
        for theirs, ours in _OF_QWEN.items():
            found = {
                ours + name.removeprefix(theirs) if name.startswith(theirs) else name: tensor
                for name, tensor in found.items()
            }
        return found, f"{QWEN}*"
    found = {
        name if name.startswith(OWN) else f"layer.{name}": tensor
        for name, tensor in _behind(prefix, tensors).items()
    }
    return found, f"{QWEN}* or {prefix}*" if not found else f"{prefix}*"


def _behind(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


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
