"""Steps that verify under a deterministic policy: each token has the bits of a plain step over it,
because attention takes it as a request of its own (`attnops.hf.cache.described.apart`), and all
else as a row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attnops.hf.models.recurrent import modules_with_states, ops_of
from attnops.hf.models.rows import left_out
from attnops.hf.steps.decode import Decoder


def why_not(model: Any, decoder: Decoder, cache: Any, trees: bool) -> Iterator[str]:
    """Each reason why a token of such a step may have other bits. trees: may its tokens be the
    nodes of a tree?"""
    policy, pages = "under a deterministic policy", cache.state.pages
    if decoder.at_once:
        yield f"{policy} steps that verify are not compiled, and those of handle.capture() are"
    if cache.states:
        taken = modules_with_states(model)
        ops = sorted({op for number in cache.states for op in ops_of(taken[number][0])})
        yield f"{policy} {', '.join(ops)} may give a token other bits than a step of its own"
    for why, count in left_out(model).items():
        yield f"{policy} rows may follow from each other in {count} modules: {why}"
    for layer in dict.fromkeys(pages.sizes.layers) if trees else ():
        plain, single = (pages.step_kernel(layer, size) for size in (pages.page_size, 1))
        if plain is None or plain is not single or not plain.invariant.any_page:
            kernel = layer.op if plain is None else f"{plain.name} of {plain.op}"
            yield f"a draft may be a tree, and {policy} {kernel} gives its nodes other bits"
