"""Tries a model before it is patched, where transformers does not route it through sdpa.

A class with `_supports_sdpa = False` may rely on the arguments of eager attention: additive masks in every call, and an `is_causal`
that is never read. Such a model is served with ordinary masks only if its class supports flash or flex attention, and a
small twin gives eager's numbers with them. Else it is given additive masks, once that was tried, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from attnops.hf import twin
from attnops.hf.interface import Options, implementation
from attnops.hf.mask import Mode
from attnops.hf.match import Match, match
from attnops.hf.report import TOLERANCES, compare, evaluating, outputs_of
from attnops.problem import pretend

_TOLERANCE = {**TOLERANCES, torch.float32: 1e-4}


class Subject(NamedTuple):
    """A model to try on. configs: those to switch, with the implementation they name. feed: inputs it takes."""

    model: Any
    configs: tuple[tuple[Any, Any], ...]
    feed: dict[str, Tensor]


class Proof(NamedTuple):
    """mode: the masks that gave eager's numbers; None: no masks did. text: how it was tried, or why it failed."""

    mode: Mode | None
    text: str


def prove(model: Any, found: Match, asked: Options) -> Proof:
    """Try masks on a twin of `model`, or on itself where no twin can be built."""
    flexible = all(getattr(cls, "_supports_flash_attn", False) or getattr(cls, "_supports_flex_attn", False) for cls in found.unrouted)
    modes: list[Mode] = ["additive"]
    # A class that computes with masks knows eager's.
    if flexible and asked.mask != "additive" and not found.explicit:
        modes.insert(0, asked.mask)
    why: list[str] = []
    with unset_fake_temporarily(), pretend(None), torch.no_grad():
        subject, name = next(_subjects(model), (None, ""))
        if subject is None:
            return Proof(None, f"no small twin of {type(model).__name__} runs, nor does it with the inputs known here: it was not tried")
        for mode in modes:
            failed = _fails(subject, mode)
            if failed is None:
                return Proof(mode, f"{', '.join(cls.__name__ for cls in found.unrouted)}: tried on {name}, with and without padding")
            why.append(f"with {mode} masks it {failed}")
    return Proof(None, f"{name} of {type(model).__name__} was tried: " + "; ".join(why))


def _subjects(model: Any) -> Iterator[tuple[Subject, str]]:
    """The models that run, a twin or the model itself, with inputs that they take."""
    for one, name in ((one, name) for ones, name in ((twin.twins(model), "a small twin"), ([model], "a short run")) for one in ones):
        if any(p.is_meta or isinstance(p, FakeTensor) for p in one.parameters()):
            continue
        configs = tuple((config, config._attn_implementation_internal) for config in match(one).configs)
        for feed in twin.feeds(one):
            with _as_it_was(one, configs), suppress(Exception):  # a class may raise anything at inputs that it does not like
                if _outputs(one, configs, "eager", feed, False):
                    yield Subject(one, configs, feed), name


@contextmanager
def _as_it_was(model: nn.Module, configs: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """In eval mode within the block; modes and attention implementations are put back."""
    with evaluating(model):
        try:
            yield
        finally:
            for config, before in configs:
                config._attn_implementation_internal = before


def _fails(subject: Subject, mode: Mode) -> str | None:
    model, configs, feed = subject
    tried: tuple[Mode, ...] = ("dense", "compact") if mode == "auto" else (mode,)
    with _as_it_was(model, configs):
        for one in tried:
            name = implementation(Options(mask=one, proven=True))
            for name_of_run, inputs, visible in _runs(model, feed):
                steps = name_of_run == "steps"
                try:
                    eager = _outputs(model, configs, "eager", inputs, steps)
                except Exception:  # nor does it run without attnops
                    continue
                try:
                    ours = _outputs(model, configs, name, inputs, steps)
                except Exception as error:
                    return f"raised {type(error).__name__} ({one}, {name_of_run}): {' '.join(str(error).split())[:160]}"
                for key, want in eager.items():
                    limit = _TOLERANCE.get(want.dtype, 1e-4)
                    counts = next((m for m in visible if m.shape == want.shape[:2]), None)
                    figures = compare(ours[key], want, counts, key, limit)
                    if not figures.max_rel <= limit:
                        return f"differs from eager ({one}, {name_of_run}): {key} is off by {figures.max_rel:.1e}"
    return None


def _runs(model: nn.Module, feed: dict[str, Tensor]) -> Iterator[tuple[str, dict[str, Tensor], tuple[Tensor, ...]]]:
    """(name, inputs, masks of positions that count): without padding, with padding on both sides, and in two steps over a cache."""
    parameters = inspect.signature(type(model).forward).parameters
    yield "no padding", feed, ()
    masks = {}
    for name in ("input_ids", "input_features", "decoder_input_ids"):
        mask = "decoder_attention_mask" if name.startswith("decoder") else "attention_mask"
        if mask in parameters and name in feed and mask not in masks:
            masks[mask] = _padding(feed[name])
    if masks:
        yield "padding", {**feed, **masks}, tuple(masks.values())
    if "past_key_values" in parameters and "use_cache" in parameters and set(feed) == {"input_ids"} and masks:
        left = masks["attention_mask"].clone()
        left[1] = 1
        yield "steps", {**feed, "attention_mask": left}, ()


def _padding(tokens: Tensor) -> Tensor:
    mask = torch.ones(tokens.shape[:2], dtype=torch.int64, device=tokens.device)
    mask[0, :3] = 0
    mask[1, -2:] = 0
    return mask


def _outputs(model: Any, configs: Sequence[tuple[Any, Any]], name: str, inputs: dict[str, Tensor], steps: bool) -> dict[str, Tensor]:
    for config, _ in configs:
        config._attn_implementation_internal = name
    first = next(model.parameters())
    given = {key: x.to(first.device, first.dtype if x.is_floating_point() else x.dtype) for key, x in inputs.items()}
    # Some models draw at random, in eval mode, too.
    with torch.random.fork_rng(devices=[first.device] if first.is_cuda else []):
        torch.manual_seed(0)
        if not steps:
            return outputs_of(model(**given))
        ids, mask = given["input_ids"], given["attention_mask"]
        begun = model(input_ids=ids[:, :-1], attention_mask=mask[:, :-1], use_cache=True)
        if getattr(begun, "past_key_values", None) is None:
            return {}
        return outputs_of(model(input_ids=ids[:, -1:], attention_mask=mask, past_key_values=begun.past_key_values, use_cache=True))
