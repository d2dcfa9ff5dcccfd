"""`Mtp`: what MTP layers read of a model, how one of their steps is called, and how they are loaded
from the checkpoint of their target."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from torch import Tensor, nn

from attnops.adapters.replicas import place, take_back as take_out
from attnops.cache.batch import PagedBatch
from attnops.core.errors import InvalidInput, PatchError, fail, one_line
from attnops.core.problem import Problem
from attnops.hf.attention.descriptor import FIELDS
from attnops.hf.cache.names import argument
from attnops.hf.cache.paged_cache import View
from attnops.hf.cache.support import is_latent, let_through
from attnops.hf.models.latents import dims_of
from attnops.hf.steps.chain import ChainDrafts
from attnops.hf.steps.graphed_steps import Passes
from attnops.hf.steps.head_calls import Call
from attnops.hf.steps.heads import Around, Drafts, Steps, weights_of, why_not
from attnops.hf.steps.waiting import Room
from attnops.nn import MTPLayer
from attnops.ops.pages.plan import latent_layers, paged_layers

OPTION = "mtp"
"""Of `patch`, for the layer in the checkpoint of the model."""

_LENT = "shared_head.head.", "embed_tokens."
"""How the names of tensors begin that are the target's own."""


@dataclass(frozen=True)
class Mtp:
    """See `heads.Head`. One layer drafts all tokens of a chain, so later ones are right less
    often."""

    module: MTPLayer
    levels: int = 0

    @property
    def num_drafts(self) -> int:
        return self.module.num_drafts

    @property
    def _attention(self) -> Any:
        return getattr(self.module.layer, "self_attn", None)

    @property
    def width(self) -> int:
        return self.module.hidden_size

    @property
    def layers(self) -> tuple[Problem, ...]:
        attention, dtype = self._attention, self.module.eh_proj.weight.dtype
        heads = attention.config.num_attention_heads
        if is_latent(attention):
            dims = dims_of(attention)
            return (latent_layers(heads, 0, dtype, dims.latent + dims.rope, dims.latent),)
        width = attention.head_dim
        kv_heads = attention.k_proj.out_features // width
        value = attention.v_proj.out_features // kv_heads
        return (paged_layers(heads, kv_heads, width, 0, dtype, value),)

    def sources(self, owner: Any) -> tuple[nn.Module, ...]:
        return (owner.get_decoder().norm,)

    def against(self, owner: Any) -> str:
        module, model = self.module, type(owner).__name__
        sizes = module.vocab_size, module.hidden_size
        if why := why_not(module.eh_proj.weight, owner, *sizes) or _why_none(owner):
            return why
        if type(module.layer) is not type(_like(owner)):
            name = type(module.layer).__name__
            return f"its layer is a {name}; want one of {model}'s own, with attention over keys"
        return ""

    def arguments(
        self, tokens: Tensor, states: Tensor, batch: PagedBatch, rows: Tensor | None, around: Around
    ) -> Call:
        pages, requests = around.pages, batch.cu_seqlens_q.shape[0] - 1
        # Else they are a prompt's, one request after the other in one row.
        alike = requests * batch.max_seqlen_q == tokens.shape[0]
        shape = requests if alike else 1, -1
        one_launch = alike and batch.max_seqlen_q == 1 and any(pages.one_launch())
        view = View(pages.layers[0], 0, batch, one_launch=one_launch, packed=not alike)
        assert batch.positions is not None
        where = {
            "rows": rows,
            "position_ids": batch.positions.view(shape),
            # A descriptor. Its numbers are not read, as the batch has them.
            "attention_mask": pages.most.expand(shape[0], 1, 1, FIELDS),
            "attnops_cache": view,
            **argument(self.module.layer, view),
        }
        return (around.embed(tokens.view(shape)), states.unflatten(0, shape)), where

    def to_target(self, words: Tensor) -> Tensor:
        return words

    def weights(self, owner: Any) -> float:
        return self.num_drafts * weights_of(self.module)

    def drafts(self, owner: Any, passes: Passes, room: Room) -> Drafts:
        return ChainDrafts(Steps(self, owner.get_input_embeddings(), passes, room))


def lend(module: MTPLayer, owner: Any) -> None:
    """Give a layer what it shares with its target: the rotation, and the config by which `patch`
    switches attention and experts."""
    theirs: Any = _like(owner)
    module.rotary_emb = owner.get_decoder().rotary_emb
    for part in module.layer.modules():
        if "config" in vars(part):
            part.config = theirs.self_attn.config
    attention: Any = module.layer.self_attn
    if is_latent(attention) and "expand_kv" not in vars(attention):
        place(attention, "expand_kv", partial(let_through, attention))


def take_back(module: MTPLayer) -> None:
    """Take the rotation back, and the method that keeps the layer alive until a collection."""
    attention: Any = module.layer.self_attn
    module.rotary_emb = None
    take_out(attention, "expand_kv", vars(attention).get("expand_kv"))


def loaded(owner: Any, held: Any) -> MTPLayer:
    """The layer of the checkpoint that a model came from. held: what drafts for it already.

    Raises PatchError: there is no such checkpoint on this machine, or no layer in it, or one that
    does not fit.
    """
    like = _like(owner)
    try:
        folder = _folder_of(owner)
        if isinstance(held, MTPLayer) and held.folder == folder:
            return held
        if why := _why_none(owner):
            fail(PatchError, why)
        with torch.device("meta"):
            layer = type(like)(like.self_attn.config, like.self_attn.layer_idx)
        embed, head = owner.get_input_embeddings(), owner.get_output_embeddings()
        norm = type(owner.get_decoder().norm)
        made = MTPLayer.from_folder(folder, layer, embed, head, norm=norm)
    except (InvalidInput, PatchError) as error:
        why = one_line(error).removeprefix("PatchError: ")
        raise PatchError(f"patch: got speculate={OPTION!r}; {why}") from None
    theirs, weight = like.state_dict(), embed.weight
    for name, tensor in made.state_dict(keep_vars=True).items():
        if not name.startswith(_LENT):
            dtype = theirs.get(name.removeprefix("layer."), weight).dtype
            tensor.data = tensor.data.to(weight.device, dtype)
    for part in (made.enorm, made.hnorm, made.eh_proj, made.layer, made.shared_head["norm"]):
        part.requires_grad_(False).eval()
    return made


def _like(owner: Any) -> Any:
    """The last decoder layer of a model with attention over keys or latents; None without one."""
    layers = getattr(owner.get_decoder(), "layers", ())
    attends = (x for x in reversed(layers) if hasattr(getattr(x, "self_attn", None), "layer_idx"))
    return next(attends, None)


def _why_none(owner: Any) -> str:
    """Why a model can have no such layer; "" where it can."""
    model, decoder = type(owner).__name__, owner.get_decoder()
    if _like(owner) is None:
        return f"{model} has no layers with attention like that of its MTP layer"
    lacking = [name for name in ("norm", "rotary_emb") if not hasattr(decoder, name)]
    return f"{model} has no {lacking[0]} behind or beside its layers" if lacking else ""


def _folder_of(owner: Any) -> str:
    """The folder of the checkpoint that a model came from, which may be in the cache of the hub.
    Raises PatchError."""
    config = owner.config
    name, revision = config.name_or_path, getattr(config, "_commit_hash", None)
    if name and Path(name).is_dir():
        return str(name)
    with suppress(HFValidationError):
        found = try_to_load_from_cache(name, "config.json", revision=revision)
        if isinstance(found, str):
            return str(Path(found).parent)
    want = "want a model loaded by from_pretrained, whose checkpoint is on this machine"
    fail(PatchError, f"config.name_or_path is {name!r}, and no such checkpoint is here; {want}")
