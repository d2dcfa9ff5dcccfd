"""sentence-transformers: its transformers models on attnops, and texts without padding, which it
has for FlashAttention alone."""

from __future__ import annotations

from contextlib import ExitStack
from contextvars import ContextVar
from functools import partial
from inspect import signature
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules.transformer import Transformer
from transformers import DataCollatorWithFlattening

from attnops.adapters.replicas import place, take_back
from attnops.adapters.report import PATCHED, Report
from attnops.adapters.swap import Change, Site, Swapped
from attnops.core.errors import PatchError, fail, one_line
from attnops.hf import patch as patch_hf

_padded = ContextVar("_padded", default=False)
# The loop over batches, which worker processes call too. sentence-transformers before 6.2 has it in
# `encode`.
_METHOD = "_inference" if hasattr(SentenceTransformer, "_inference") else "encode"


class Packing(Transformer):  # type: ignore[misc]
    """sentence-transformers' Transformer with packed texts, but for training with attention
    dropout, which no kernel has for them."""

    @property
    def can_flatten_inputs(self) -> bool:
        """Whether texts are packed now."""
        dropouts = [
            getattr(self.model.config, name, None)
            for name in ("attention_dropout", "attention_probs_dropout_prob")
        ]
        return (
            vars(self)["can_flatten_inputs"]
            and not _padded.get()
            and not (self.training and any(dropouts))
        )

    @can_flatten_inputs.setter
    def can_flatten_inputs(self, value: bool) -> None:
        own: Any = vars(self)
        own["can_flatten_inputs"] = value

    def forward(self, features: dict[str, Any], **kwargs: Any) -> Any:
        """As Transformer.forward. Packed texts need no masks; models whose layers are of several
        types take them by type."""
        if "cu_seq_lens_q" in features and (
            kinds := getattr(self.model.config, "layer_types", None)
        ):
            kwargs["attention_mask"] = dict.fromkeys(kinds)
        return super().forward(features, **kwargs)


def _encode(model: Any, *args: Any, **named: Any) -> Any:
    """The model's own loop over batches. It cuts the outputs of a text, such as token embeddings,
    from padded rows."""
    encode = getattr(type(model), _METHOD)
    wanted = (
        signature(encode)
        .bind(model, *args, **named)
        .arguments.get("output_value", "sentence_embedding")
    )
    before = _padded.set(wanted != "sentence_embedding")
    try:
        return encode(model, *args, **named)
    finally:
        _padded.reset(before)


class Embedder(Swapped):
    """A patched model of sentence-transformers, and the way back. Made by `attnops.patch`.

    `verify` takes the arguments of `encode`, or of a CrossEncoder's `predict`.
    """

    def _switch(self) -> None:
        with ExitStack() as undo:
            self.inner = [
                undo.enter_context(patch_hf(site.module.model, **self.options))
                for site in self.sites
            ]
            super()._switch()
            undo.pop_all()
        if self.changes and isinstance(self.model, SentenceTransformer):
            place(self.model, _METHOD, partial(_encode, self.model))

    def _switch_back(self) -> None:
        take_back(self.model, _METHOD, vars(self.model).get(_METHOD))
        super()._switch_back()

    def _report(self) -> Report:
        """With whether texts are packed."""
        reports, packing = [handle.report() for handle in self.inner], super()._report()
        packed = (
            f"{row.path or row.cls}: {'texts are packed' if row.status == PATCHED else row.status}"
            for row in packing.rows
        )
        notes = dict.fromkeys((*packed, *(note for each in reports for note in each.notes)))
        return Report(
            packing.model,
            self.kernel,
            tuple(row for each in reports for row in each.rows),
            tuple(notes),
        )

    def _run(self, inputs: Any, named: Any) -> Any:
        call = getattr(self.model, "encode", None) or getattr(self.model, "predict", None)
        if call is None:
            fail(
                PatchError,
                "verify: got a model without encode or predict, want the SentenceTransformer or "
                "CrossEncoder around it",
            )
        got = call(*inputs, **{"convert_to_tensor": True, "show_progress_bar": False, **named})
        return torch.atleast_2d(got.to_dense()) if isinstance(got, torch.Tensor) else got


def patch(model: Any, options: dict[str, Any]) -> Embedder:
    """Patch the models within, and pack texts where a trial gives the embeddings that padded ones
    have with the model's own attention."""
    modules = {
        path: module
        for path, module in model.named_modules()
        if "can_flatten_inputs" in vars(module)
    }
    handle = Embedder(
        model, options, [Site(path, module, _change(module)) for path, module in modules.items()]
    )
    try:
        if handle.changes:
            texts = ["one", "two words", "some more words " * 256]  # longer than most windows
            handle.verify(texts if hasattr(model, "encode") else [(text, text) for text in texts])
        return handle
    except Exception as error:  # of any model that takes no packed texts
        handle.unpatch()
        return Embedder(
            model,
            options,
            [Site(*each, f"texts stay padded, {one_line(error)}") for each in modules.items()],
        )


def _change(module: Any) -> Change | str:
    task, model, named = module.transformer_task, module.model, module.model_forward_params
    keys = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
    causal = any(getattr(part, "is_causal", False) for part in model.modules())
    reasons = {
        "it is a subclass of Transformer": type(module) is not Transformer,
        "sentence-transformers is older than 6.0": not hasattr(module, "_should_flatten_inputs"),
        f"it is for {task}": task not in ("feature-extraction", "fill-mask")
        or "text" not in module.modality_config,
        "unpad_inputs is False": module.unpad_inputs is False,
        "its masks for causal layers are of one type": causal
        and not getattr(model.config, "layer_types", None),
    }
    why = next((f"texts stay padded, {reason}" for reason, holds in reasons.items() if holds), None)
    return why or Change(
        module,
        Packing,
        {
            "can_flatten_inputs": True,
            "model_forward_params": None if named is None else named | keys,
            "data_collator": DataCollatorWithFlattening(
                return_seq_idx=True, return_flash_attn_kwargs=True, return_position_ids=True
            ),
            "_flatten_position_offset": module._infer_flatten_position_offset(),
        },
    )
