"""`attnops explain`: which kernel every call of a Hugging Face model would get on a machine, and
why no other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch

from attnops import configs
from attnops.core.errors import AttnopsError, InvalidInput, one_line
from attnops.core.private_torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from attnops.core.problem import Target, altered, pretend
from attnops.core.select import Decision, select
from attnops.lowering.explain import Explanation, Site, explain, packages_of_kernels
from attnops.measured import Sizes
from attnops.ops import OPS
from attnops.ops.linear.timed import PARTS, products
from attnops.testing.timed_calls import problem_at

TOKENS = 512
PHASES, CACHES = ("prefill", "decode"), ("hf", "paged")


class CannotExplain(AttnopsError, RuntimeError):
    """The model's code reads values of tensors, so it cannot run on fake tensors. `model` names its
    config."""

    def __init__(self, model: str, cause: Exception) -> None:
        super().__init__(
            f"model: got {model}, whose code needs the values of tensors, want one that runs on "
            f"shapes alone\n{cause}"
        )
        self.model = model


def explain_model(
    model: str,
    *,
    target: str = "",
    assume: tuple[str, ...] | None = None,
    batch: int = 1,
    tokens: int | None = None,
    phase: str = "both",
    dtype: str = "bfloat16",
    cache: str = "hf",
    op: str = "",
) -> dict[str, Explanation]:
    """Explain a patched model per phase, on fake tensors: a prompt of `tokens` tokens (prefill),
    then one more token (decode).

    model: as `configs.config_of` takes it. target: as `attnops.explain` takes it; "" is this
    machine. assume: packages taken to be installed, None for all. batch: sequences. tokens: None
    takes those of `tokens_of`.
    phase: "prefill", "decode" or "both". dtype: of the weights, hence of the Problems.
    cache: "hf", a static cache of transformers, or "paged", the pages of `patch(cache="paged")`.
    op: calls of this op alone; "" is all.

    Raises InvalidInput: an unknown model, target, phase, dtype, cache or op, or a number below 1.
    PatchError: attnops cannot serve the model, or not over pages. CannotExplain: see there.
    """
    if phase not in (*PHASES, "both"):
        raise InvalidInput("phase", repr(phase), " | ".join((*PHASES, "both")))
    if cache not in CACHES:
        raise InvalidInput("cache", repr(cache), " | ".join(CACHES))
    if op and op not in OPS:
        raise InvalidInput("op", repr(op), " | ".join(sorted(OPS)))
    _check_counts(batch=batch, tokens=tokens)
    if target:
        Target.parse(target)
    elif assume is not None:
        raise InvalidInput(
            "assume", ",".join(assume), "a --target with it: this machine's packages are looked up"
        )
    with configs.quiet_transformers():
        config = configs.config_of(model)
        found = explain_config(
            config,
            dtype=configs.dtype_of(dtype),
            target=target,
            assume=assume,
            batch=batch,
            tokens=tokens,
            cache=cache,
        )
    shown = {p: e for p, e in found.items() if phase in (p, "both")}
    if not op:
        return shown
    return {
        p: replace(e, sites=tuple(s for s in e.sites if s.decision.problem.op == op))
        for p, e in shown.items()
    }


def _check_counts(**given: int | None) -> None:
    for field, value in given.items():
        if value is not None and value < 1:
            raise InvalidInput(field, value, ">= 1")


def explain_config(
    config: Any,
    *,
    dtype: torch.dtype,
    target: str = "",
    assume: tuple[str, ...] | None = None,
    batch: int = 1,
    tokens: int | None = None,
    cache: str = "hf",
) -> dict[str, Explanation]:
    """As `explain_model`, of a transformers config: both phases, with a cache of `tokens + 1`."""
    here = torch.device("cuda" if not target and torch.cuda.is_available() else "cpu")
    named = (
        Target.parse(target, packages_of_kernels() if assume is None else assume)
        if target
        else None
    )
    tokens = tokens_of(config) if tokens is None else tokens
    paged = cache == "paged"
    # Before the model: an old transformers has an error of its own.
    import_module("attnops.hf")
    try:
        found = _by_phase(config, dtype, here, named, batch, tokens, paged)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise CannotExplain(type(config).__name__, error) from error
    except AttnopsError:
        raise
    except Exception as error:  # a model raises any error for the sizes of an unknown config
        raise _unfit(config, tokens, error) from error
    if paged:
        linears = linear_sites(
            config.get_text_config(decoder=True), dtype, batch, named or Target.of(here)
        )
        found["decode"] = replace(found["decode"], sites=(*found["decode"].sites, *linears))
    return found


def _by_phase(
    config: Any,
    dtype: torch.dtype,
    here: torch.device,
    target: Target | None,
    batch: int,
    tokens: int,
    paged: bool,
) -> dict[str, Explanation]:
    from transformers import StaticCache

    from attnops.hf import patch
    from attnops.hf.cache.names import argument

    # On a GPU, patch passes lengths to kernels, on a CPU a mask. A torch built without CUDA has no
    # fake CUDA tensors, so the fake weights of a named GPU are CPU tensors and patch needs the
    # option.
    mask: Any = "compact" if target is not None and target.on_gpu else "auto"
    found = {}
    with FakeTensorMode(), here, torch.no_grad():
        model = configs.build_fake(config, dtype)
        handle = patch(model, mask=mask, cache="paged" if paged else "hf")
        kept: Any
        if paged:
            # The page size and the workspace are those of the target's kernels.
            with pretend(target):
                kept = handle.new_cache(batch, tokens + 1)
        else:
            kept = StaticCache(config=model.config, max_cache_len=tokens + 1)
        for phase, length in zip(PHASES, (tokens, 1), strict=True):
            given: dict[str, Any] = {
                "input_ids": torch.zeros((batch, length), dtype=torch.int64),
                **argument(model, kept),
            }
            found[phase] = explain(model, **given, use_cache=True, target=target, quiet=True)
    return found


def _unfit(config: Any, tokens: int, error: Exception) -> InvalidInput:
    """The error of a config that cannot run, or not with so many tokens."""
    positions = _positions(config)
    if positions is None or tokens < positions:
        got = f"{type(config).__name__} ({one_line(error)})"
        return InvalidInput("model", got, "a config that transformers can build and run")
    want = (
        f"at most {positions - 1}: the model has {positions} positions, and decode takes one more"
    )
    return InvalidInput("tokens", f"{tokens} ({one_line(error)})", want)


def tokens_of(config: Any) -> int:
    """Tokens of a prompt that fits the model: a power of two, of at most half its positions, which
    some models count from 2 on."""
    half = (_positions(config) or 2 * TOKENS) // 2
    return min(TOKENS, 1 << max(0, half.bit_length() - 1))


def _positions(config: Any) -> int | None:
    """The positions that the decoder of a config has a table for, or was trained on. None: it does
    not say."""
    found = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def linear_sites(
    config: Any, dtype: torch.dtype, rows: int, target: Target
) -> Iterator[Site[Decision]]:
    """The linears of a decode step that `fuse_norm_linear_pass` would find in the compiled layers.

    Their sizes are those in the config of the decoder.
    Without those of experts, and without any of a model that caches latents.
    """
    from attnops.bench.work import experts, heads

    if getattr(config, "kv_lora_rank", None):
        return
    q_heads, kv_heads, head_dim = heads(config)
    inner, layers = 0 if experts(config) else config.intermediate_size, config.num_hidden_layers
    for name, kind in products(
        config.hidden_size, q_heads, kv_heads, inner, config.vocab_size, head_dim
    ).items():
        problem = problem_at(
            altered(kind, dtype=dtype, kv_dtype=dtype), Sizes(float(rows), 1.0, 1.0), target
        )
        compiled = altered(problem, compiled=True)
        yield Site(PARTS[name], 1 if name == "head" else layers, select(compiled))
