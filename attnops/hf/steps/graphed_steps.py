"""The graphs of decode steps over one set of pages, before any is captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from attnops.core.errors import SideEffect, fail
from attnops.core.op import is_lowered
from attnops.graphs import Buckets, Graphed, breakable
from attnops.graphs.buckets import decode_sizes
from attnops.graphs.kinds import Kinds, PerKind
from attnops.graphs.per_layer import PerLayer, Regions
from attnops.graphs.traced import Traced
from attnops.hf import not_fast
from attnops.hf.cache.names import argument_of
from attnops.hf.cache.paged_cache import PagedModelCache
from attnops.hf.models.methods import modules_in, walked
from attnops.hf.steps.around import function_modes
from attnops.hf.steps.calls import Nodes, step_of
from attnops.hf.steps.collectives import without_collectives
from attnops.hf.steps.compiled_layers import layered, verifying
from attnops.hf.steps.model_state import Glance
from attnops.hf.steps.options import Decode
from attnops.hf.steps.reasons import HOOKED, callers_hooks, drawing, hooks_of_the_caller
from attnops.lowering import (
    Product,
    fuse_norm_linear_pass,
    fuse_norm_pass,
    fuse_rotated_write_pass,
    fuse_rotation_pass,
    merge_linears_pass,
)

Passes = tuple[Callable[[Any], Any], ...]


def passes_of(how: Decode, products: dict[Product, None]) -> Passes:
    """The passes over the graph of a compiled or recorded step.

    products: takes the linears that they find, and the norms but for those that torch's own
    operations compute, or that are left to a compiler.
    """
    if not how.pack:
        return fuse_rotation_pass, fuse_rotated_write_pass

    def fuse(gm: Any) -> None:
        products.update(dict.fromkeys(fuse_norm_linear_pass(gm)))
        for norm in fuse_norm_pass(gm):
            left = not norm.kernel and is_lowered()
            if norm.kernel != "aten" and not left:
                products[norm] = None

    return merge_linears_pass, fuse_rotation_pass, fuse_rotated_write_pass, fuse


def graphed_steps(
    model: Any,
    forward: Callable[..., Any],
    cache: PagedModelCache,
    how: Decode,
    passes: Passes,
    regions: Regions | None,
    queries: int = 0,
) -> Graphed:
    """The graphs of steps over a cache.

    Args:
        forward: the model's own.
        passes: of compiled steps.
        regions: the layers that are compiled or recorded; None: steps are captured from eager
            code.
        queries: tokens of each row of steps that verify drafts, which have no plans and no compiled
            layers, `Nodes` of trees; 0: steps of one token.
    """
    capture: Callable[..., Graphed] = breakable
    step = step_of(forward, argument_of(model))
    if queries:
        step = verifying(step)
    # Compiled steps follow those without a compiler, or are asked for by capture().
    if how.mode == "auto" and (regions is None or isinstance(regions, Kinds)):
        step = without_collectives(step)
    if isinstance(regions, Kinds):
        recorded = layered(forward, model, regions)
        recorded = verifying(recorded) if queries else recorded
        capture = partial(breakable, runner=PerKind(regions, recorded))
    elif regions is not None:
        in_layers = layered(forward, model, regions)
        # Positions of one row are broadcast over, those of several are not.
        whole = Traced(how.inner, one_differs=True, passes=passes)
        capture = partial(Graphed, runner=PerLayer(regions, in_layers, whole))
    tokens = ("tokens", "positions") if queries else ()
    if isinstance(queries, Nodes):
        tokens = (*tokens, "parents")
    sizes = decode_sizes(cache.max_batch)
    return capture(
        step,
        Buckets(decode=sizes, verify=(int(queries),) if queries > 1 else ()),
        tokens=tokens,
        requests=("lengths", "live") if queries else ("input_ids", "position_ids", "live"),
        state=(*cache.state.pages.counters, *cache.state.pages.states.written),
        ahead=None if queries else cache.state.pages.held_plans(),
        over_budget=how.over_budget,
        check_every=how.check_every,
        **options_of(model, how),
    )


def options_of(model: Any, how: Decode) -> dict[str, Any]:
    """The arguments of `Graphed` that graphs of steps and of prompts share."""
    watch, draws = partial(watched, model), bool(drawing(walked(model, modules_in(model)).training))
    return {
        "batch": None,
        "returns": "requests",
        "graphs": how.graphs,
        "budget_bytes": how.budget_bytes,
        "watch": watch,
        "draws": draws,
    }


@contextmanager
def watched(model: Any) -> Iterator[None]:
    """Raises SideEffect where the run in the block has changed the model."""
    before = Glance(model)
    yield
    if before.same():
        return
    after = Glance(model, before)
    if before.state != after.state:
        fail(SideEffect, before.changed(after), "the model's own forward writes it")


def against_graphs(model: Any, unknown: str) -> str:
    """Why the model's steps and prompts may not be captured now; "" where they may be. unknown: see
    `Glance`."""
    if modes := function_modes():
        return f"the function mode {modes[0]} sees each operation of a step"
    if hooked := hooks_of_the_caller(callers_hooks(walked(model, modules_in(model)).hooked)):
        return HOOKED.format(hooked)
    if unknown:
        not_fast.warn(model, not_fast.GRAPHS, f"{unknown}, which cannot be compared")
        return f"{unknown}, which cannot be compared"
    return ""
