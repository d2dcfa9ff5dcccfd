"""Kernels of the first steps over new pages begin to be compiled before the model runs, while its
first layers are on their way.

A call waits `captures.WAIT_S` at most for those of its graphs: the model's own layers run its steps
and prompts meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from attnops.core.kernel import deterministic, own_kernel
from attnops.core.precompile import ahead
from attnops.core.problem import Problem
from attnops.core.select import active_policy
from attnops.graphs.buckets import decode_sizes
from attnops.graphs.per_layer import twin
from attnops.hf.attention.descriptor import Range
from attnops.hf.attention.over_pages import Asked, attend_keys
from attnops.hf.attention.request import Request
from attnops.hf.cache.model_pages import ModelPages
from attnops.hf.cache.paged_cache import PagedModelCache
from attnops.hf.generation import running_generation
from attnops.hf.models.rows import sites
from attnops.hf.steps.captures import Over
from attnops.kernels.shared.launch.beside import BESIDE
from attnops.nn.steady import is_steady
from attnops.ops.pages.plan import over_latents

COMPILING = "its kernels are still being compiled"


class _Layer(NamedTuple):
    layer_idx: int


def begin(
    model: nn.Module,
    pages: ModelPages,
    make: Callable[..., PagedModelCache],
    rows: int,
    prompt: int,
    record: Callable[[], None] | None = None,
) -> None:
    """Have kernels begin to build what a prompt of `prompt` tokens a row, and the decode steps
    after it, will wait for (`Kernel.ahead`), in the order of their launches.

    Once for the pages, a bucket of rows, and a policy, with steps and without. make: returns a
    cache over given pages, with `filled=True` without a change to them. record: records the layers
    of the steps, by which their kernels begin. A deterministic policy records none, and begins
    those of linears and norms, too.
    """
    sizes = pages.sizes
    many = next(n for n in sorted(decode_sizes(sizes.rows)) if n >= rows) if sizes.fixed else rows
    kind = many, prompt.bit_length(), active_policy(), record is not None
    if kind in pages.begun:
        return
    pages.begun.add(kind)
    fixed = deterministic(active_policy())
    if not (sizes.device.type == "cpu" or over_latents(sizes.layers[0])):
        with contextlib.suppress(Exception):  # steps themselves raise it
            step(make(pages, filled=True), rows, prompt)
            if record is None or fixed:
                step(make(pages, filled=True), many, 1)
    if fixed:
        of_rows(model)
    elif record is not None:
        with contextlib.suppress(Exception):
            record()


def awaits_kernels(over: Over, rows: int) -> bool:
    """Would the capture of a step of so many rows wait for kernels? They begin here if they have
    not begun. Not under a deterministic policy, which waits: bits may not follow from the time."""
    found = not over.has_step(rows)
    if found:
        with contextlib.suppress(Exception):  # the capture raises it
            over.begin(rows)
        found = not (deterministic(active_policy()) or over.is_step_built(rows))
    if (running := running_generation()) is not None:
        running.waits = COMPILING if found else ""
    return found


def chunks_await_kernels(chunks: Sequence[tuple[Over, int]]) -> bool:
    """As `awaits_kernels`, of graphs and numbers of tokens."""
    new = [(over, n) for over, n in chunks if not over.captured("mixed", n, 1)]
    for over, tokens in new:
        with contextlib.suppress(Exception):
            over.begin_chunk(tokens)
    waits = not deterministic(active_policy())
    return waits and not all(over.is_chunk_built(tokens) for over, tokens in new)


def under_way() -> bool:
    """Are kernels being compiled, so that others may serve meanwhile? Not under a deterministic
    policy."""
    return BESIDE.looks and not deterministic(active_policy())


def of_rows(model: nn.Module) -> None:
    """As `begin`, of the linears and norms whose rows are kept apart under the policy in force. One
    kernel serves any number of rows. Twins run, for what counts as a norm may keep what it is
    given."""
    begun = set[Any]()
    with torch.no_grad(), ahead():
        for site in sites(model):
            module, weight = site.module, getattr(site.module, "weight", None)
            if site.kind not in ("linears", "norms") or not is_steady(module) or weight is None:
                continue
            kind = type(module), weight.shape, weight.dtype, module._parameters.get("bias") is None
            if kind in begun:
                continue
            begun.add(kind)
            width = weight.shape[0 if isinstance(module, Conv1D) else -1]
            with contextlib.suppress(Exception):  # the module's own call raises it
                own = twin(module)[0]
                own._buffers = dict(own._buffers)
                type(own).forward(own, weight.new_empty(1, width))


def step(cache: PagedModelCache, rows: int, count: int) -> None:
    """As `begin`, of the attention of one step of `count` tokens of each row. cache: of keys and
    values, for this call alone."""
    pages, layers = cache.state.pages, dict[Problem, Any]()
    for layer, number in cache.numbers.items():
        layers.setdefault(pages.sizes.layers[number], layer)
    ops = "attention", "paged_attention", "varlen_attention"
    kernels = [own_kernel(op, pages.sizes.kernel) for op in ops]
    cache.state.filled = count == 1
    with torch.no_grad(), ahead():
        start = torch.zeros(rows, dtype=torch.int64, device=pages.sizes.device)
        for kind, layer in layers.items():
            dims = (
                (kind.q_heads, kind.head_dim),
                (kind.kv_heads, kind.head_dim),
                (kind.kv_heads, kind.v_head_dim),
            )
            rules = kind.rules
            q, k, v = (
                start.new_empty((rows, count, *dim), dtype=kind.dtype).transpose(1, 2)
                for dim in dims
            )
            sinks = start.new_empty(kind.q_heads, dtype=rules.sinks_dtype) if rules.sinks else None
            asked = Asked(
                _Layer(layer),
                Request(q, k[None], v[None], sinks=sinks, softcap=float(rules.softcap)),
                cache,
            )
            bounds = Range(True, rules.window[0], start, start + count)
            # Most prompts have no padding, and those of several rows may have some.
            if count > 1:
                attend_keys(asked, bounds._replace(whole=True), *kernels)
            if count == 1 or rows > 1:
                attend_keys(asked, bounds, *kernels)
