"""sentence-transformers: its transformers models on attnops, and texts without padding, which it has for FlashAttention alone."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from sentence_transformers.base.modules.transformer import Transformer
from transformers import DataCollatorWithFlattening

from attnops.adapters.report import PATCHED, Report
from attnops.adapters.swap import Change, Site, Swapped
from attnops.errors import one_line
from attnops.hf import patch as patch_hf


class Packing(Transformer):  # type: ignore[misc]
    """sentence-transformers' Transformer with packed texts, but for training with attention dropout, which no kernel has for them."""

    def _should_flatten_inputs(self, *args: Any, **kwargs: Any) -> bool:
        dropouts = [getattr(self.model.config, name, None) for name in ("attention_dropout", "attention_probs_dropout_prob")]
        return not (self.training and any(dropouts)) and super()._should_flatten_inputs(*args, **kwargs)

    def forward(self, features: dict[str, Any], **kwargs: Any) -> Any:
        """As Transformer.forward. Packed texts need no masks; models whose layers are of several types take them by type."""
        if "cu_seq_lens_q" in features and (kinds := getattr(self.model.config, "layer_types", None)):
            kwargs["attention_mask"] = dict.fromkeys(kinds)
        return super().forward(features, **kwargs)


class Embedder(Swapped):
    """A patched model of sentence-transformers, and the way back. Made by `attnops.patch`. `verify` takes the arguments of `encode`."""

    def _switch(self) -> None:
        with ExitStack() as undo:
            self.inner = [undo.enter_context(patch_hf(site.module.model, **self.options)) for site in self.sites]
            super()._switch()
            undo.pop_all()

    def report(self) -> Report:
        """Every attention module with its status, and whether texts are packed."""
        reports, packing = [handle.report() for handle in self.inner], super().report()
        packed = (f"{row.path}: {'texts are packed' if row.status == PATCHED else row.status}" for row in packing.rows)
        notes = dict.fromkeys((*packed, *(note for each in reports for note in each.notes)))
        return Report(packing.model, self.kernel, tuple(row for each in reports for row in each.rows), tuple(notes))

    def _run(self, inputs: Any, named: Any) -> Any:
        return self.model.encode(*inputs, **named, convert_to_tensor=True, show_progress_bar=False)


def patch(model: Any, options: dict[str, Any]) -> Embedder:
    """Patch the models within, and pack texts where a trial gives the embeddings that padded ones have with the model's own attention."""
    modules = {path: module for path, module in model.named_modules() if "can_flatten_inputs" in vars(module)}
    handle = Embedder(model, options, [Site(path, module, _change(module)) for path, module in modules.items()])
    try:
        if handle.changes:
            handle.verify(["one", "two words", "some more words " * 256])  # longer than most windows
        return handle
    except Exception as error:  # of any model that takes no packed texts
        handle.unpatch()
        return Embedder(model, options, [Site(*each, f"texts stay padded, {one_line(error)}") for each in modules.items()])


def _change(module: Any) -> Change | str:
    task, model, named = module.transformer_task, module.model, module.model_forward_params
    keys = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
    causal = any(getattr(part, "is_causal", False) for part in model.modules())
    reasons = {
        "it is a subclass of Transformer": type(module) is not Transformer,
        "sentence-transformers is older than 6.0": not hasattr(module, "_should_flatten_inputs"),
        f"it is for {task}": task not in ("feature-extraction", "fill-mask") or "text" not in module.modality_config,
        "unpad_inputs is False": module.unpad_inputs is False,
        "its masks for causal layers are of one type": causal and not getattr(model.config, "layer_types", None),
    }
    why = next((f"texts stay padded, {reason}" for reason, holds in reasons.items() if holds), None)
    return why or Change(module, Packing, {
        "can_flatten_inputs": True, "model_forward_params": None if named is None else named | keys,
        "data_collator": DataCollatorWithFlattening(return_seq_idx=True, return_flash_attn_kwargs=True, return_position_ids=True),
        "_flatten_position_offset": module._infer_flatten_position_offset(),
    })  # fmt: skip
