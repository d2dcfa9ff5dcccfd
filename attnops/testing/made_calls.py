"""A call of any op, from a row of its family's table and what the record says of its arguments.
Every length may be 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from attnops.core.arguments import Arg
from attnops.core.kernel import kernels_of
from attnops.core.record import changed
from attnops.core.tensors import compact
from attnops.ops import OPS
from attnops.ops.case_data import Features, Grid, Pages, Scene, Source
from attnops.testing.by_role import dtype_of, number, tensor
from attnops.testing.calls import Call, filled, plan_call

FREE = {
    "queries": "tokens",
    "new_keys": "tokens",
    "factors": "tokens",
    "keys": "keys",
    "pages": "pages",
}
"""Which of a scene's masks says what is free, by what an argument holds."""

OF_SCENES = frozenset(f.name for f in fields(Scene)[2:] if f.init)
GRADIENT = ("mask_grad", "lse_grad")


def make_call(op: str, source: Source, *row: Any, **named: Any) -> Call:
    """The call of `op` that a row describes. Rows are written as the op's `Grid` says."""
    grid: Grid = OPS[op].of_family("cases", "CASES")
    values = _by_name(grid.names.split(), row) | named
    if grid.of:
        asked = {n: values.pop(n) for n in GRADIENT if n in values}
        forward = make_call(grid.of, source, **values)
        if grid.own is None:
            return gradient_call(source, forward, **asked)
        return plan_call(forward, kernels_of(op)["reference"], grid.own(source.device))
    scene, rest = _scene(op, source, values)
    _add_requests(scene)
    if grid.own is not None:
        scene.given |= grid.own(scene, **rest)
    elif rest:
        raise TypeError(
            f"{op}: got {', '.join(rest)}, want the names of its grid, arguments and sizes"
        )
    return _call(scene)


def gradient_call(
    source: Source, forward: Call, mask_grad: bool = False, lse_grad: bool = False
) -> Call:
    """`<op>_backward` of a forward call: its results as the reference gives them, and random
    gradients."""
    made, free, arguments = _exact_results(forward), dict(forward.free), dict[str, Any]()
    query = next(a.name for a in forward.spec.args if a.holds == "queries")
    wanted = {n for n, on in zip(GRADIENT, (mask_grad, lse_grad), strict=True) if on}
    for a in OPS[f"{forward.op}_backward"].spec.args:
        of, dtype = a.name.removeprefix("grad_"), dtype_of(a, forward.arguments[query].dtype)
        asked = not wanted.isdisjoint(fact.field for fact in a.facts)
        if a.name in forward.arguments:
            arguments[a.name] = forward.arguments[a.name]
        elif a.name in made:
            arguments[a.name] = made[a.name].to(dtype)
        elif of in made and (a.kind == "Tensor" or asked):
            arguments[a.name] = source.normal(*made[of].shape, dtype=dtype)
            free |= {a.name: free[query]} if a.kind == "Tensor" and query in free else {}
        elif asked:
            arguments[a.name] = True
    return Call(f"{forward.op}_backward", arguments, free)


def _exact_results(call: Call) -> dict[str, Tensor]:
    """All results by the reference in float64, of zeros where an entry is free."""
    exact = call.map(lambda _, t: t.double() if t.is_floating_point() else t)
    exact = exact.map(lambda n, t: torch.where(call.free[n], 0.0, t) if n in call.free else t)
    results = call.spec.results
    made = OPS[call.op].reference(
        changed(exact.record, **{r.when: True for r in results if r.when})
    )
    return dict(zip((r.name for r in results), made, strict=True))


def _by_name(names: Sequence[str], row: Sequence[Any]) -> dict[str, Any]:
    """A row's values by name."""
    plain = [part for part in row if not isinstance(part, (dict, Features))]
    if len(plain) > len(names):
        raise TypeError(f"got {len(plain)} values, want {' '.join(names)}")
    values = dict(zip(names, plain, strict=False))
    for part in row:
        values |= (
            part if isinstance(part, dict) else {"f": part} if isinstance(part, Features) else {}
        )
    return values


def _scene(op: str, source: Source, values: dict[str, Any]) -> tuple[Scene, dict[str, Any]]:
    """The scene of these values, and those that it has no place for."""
    spec = OPS[op].spec
    letters = {size.text for a in spec.args for size in a.layout}
    own = {n: values.pop(n) for n in OF_SCENES & values.keys()}
    scene = Scene(source, spec, **own)
    if "dtype" in values:
        scene.f = replace(scene.f, dtype=values.pop("dtype"))
    scene.sizes = scene.f.sizes() | {
        n: values.pop(n) for n in letters & values.keys() - set(spec.names)
    }
    scene.given = {n: values.pop(n) for n in spec.names if n in values}
    for a in spec.args:
        if a.tensor and isinstance(given := scene.given.get(a.name), Sequence):
            made = source.ints(given, dtype_of(a, scene.index))
            scene.given[a.name] = made
            scene.sizes |= {
                s.text: n
                for s, n in zip(a.layout, made.shape, strict=True)
                if s.text.isidentifier()
            }
            if a.holds == "slots_of_tokens":
                scene.free["tokens"] = made < 0
    return scene, values


def _add_requests(scene: Scene) -> None:
    """Add the lengths of the requests and their sums, their pages, and what is free past their
    ends."""
    source, (tokens, keys), given = scene.source, scene.past, dict[str, Any]()
    if scene.q_lens is not None:
        end = sum(scene.q_lens)
        scene.sizes |= {"T": end + tokens, "B": len(scene.q_lens)}
        scene.free["tokens"] = source.past(end, end + tokens)
        given |= {
            "starts_of_queries": source.cumulative(scene.q_lens),
            "lengths_of_queries": source.ints(scene.q_lens),
        }
        given |= {
            "most_queries": max(scene.q_lens, default=0) + scene.slack,
            "tokens": end + tokens,
        }
    if scene.k_lens is not None:
        end = sum(scene.k_lens)
        scene.sizes |= {"N": end + keys, "B": len(scene.k_lens)}
        scene.free["keys"] = source.past(end, end + keys)
        given |= {
            "starts_of_keys": source.cumulative(scene.k_lens),
            "most_keys": max(scene.k_lens, default=0) + scene.slack,
        }
    for a in scene.spec.args:
        if a.holds in given:
            scene.given[a.name] = given[a.holds]
        elif a.holds == "lengths_of_keys" and scene.k_lens is not None:
            scene.given[a.name] = source.ints(scene.k_lens, dtype_of(a, scene.index))
        elif a.holds == "page_ids" and scene.k_lens is not None and "page" in scene.sizes:
            table, used = page_table(source, scene.k_lens, scene.sizes["page"], scene.pages)
            scene.given[a.name], scene.free["pages"] = table, ~used
            scene.sizes |= {"P": used.shape[0], "max_pages": table.shape[1]}


def page_table(
    source: Source, lengths: Sequence[int], page_size: int, pages: Pages
) -> tuple[Tensor, Tensor]:
    """(int32 page table, bool `[P, page]` of the slots that hold keys). Pages are in random
    order."""
    counts = [-(-n // page_size) for n in lengths]
    order = source.permutation(sum(counts) + pages.spare)
    width = max(counts, default=0) + pages.wider
    used = torch.zeros(len(order), page_size, dtype=torch.bool)
    rows: list[list[int]] = []
    for count, length in zip(counts, lengths, strict=True):
        own, order = order[:count], order[count:]
        if pages.shared and len(rows) == 1:
            common = min(count, len(rows[0]), 1)
            own[:common] = rows[0][:common]
        for at, page in enumerate(own):
            used[page, : min(page_size, length - at * page_size)] = True
        rows.append(own)
    rest = [order[-1] if order and column % 2 else -1 for column in range(width)]
    flat = [p for row in rows for p in row + rest[len(row) :]]
    return source.ints(flat).reshape(len(lengths), width), used.to(source.device)


def _call(scene: Scene) -> Call:
    """The call of a scene, with the arguments that are not yet given."""
    spec, arguments = scene.spec, _arguments(scene)
    pages = {
        a.name: arguments[a.name] for a in spec.args if a.holds == "pages" and a.name in arguments
    }
    if scene.pages.interleaved and len(pages) == 2:
        arguments |= _interleaved(pages)
    free = {
        n: where for n, x in arguments.items() if (where := _free(scene, spec[n], x)) is not None
    }
    written = (spec[n] for n in arguments if spec[n].written)
    writes = (a.name for a in written if not (a.is_kept or a.hint))
    return Call(spec.op, arguments, free, tuple(writes))


def _arguments(scene: Scene) -> dict[str, Any]:
    spec = scene.spec
    given = {n: x for n, x in scene.given.items() if not _is_asked(spec[n], x)}
    numbers = {a.name: number(scene, a) for a in spec.args if not a.tensor and a.name not in given}
    given |= {n: x for n, x in numbers.items() if x is not None}
    sizes = {a.name: a.default for a in spec.args if not a.tensor} | given | scene.sizes
    arguments = filled(
        spec.op, sizes, given, lambda a, shape: tensor(scene, a, shape), scene.f.narrow()
    )
    return {n: x for n, x in arguments.items() if x is not None}


def _free(scene: Scene, a: Arg, x: Any) -> Tensor | None:
    """Where the argument is free, broadcastable to it."""
    where = scene.free.get(a.name, scene.free.get(FREE.get(a.holds, "")))
    return None if where is None else where.reshape(*where.shape, *[1] * (x.dim() - where.dim()))


def _is_asked(a: Arg, value: Any) -> bool:
    """Does the value ask for a random tensor?"""
    return a.tensor and (value is True or value is False or isinstance(value, torch.dtype))


def _interleaved(pages: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Both kinds of pages as views of one buffer `[P, page, Hkv, D + Dv]`, the layout of several
    engines."""
    (first, keys), (second, values) = pages.items()
    both = torch.cat([compact(x).view(torch.uint8) for x in (keys, values)], -1).view(keys.dtype)
    return {first: both[..., : keys.shape[-1]], second: both[..., keys.shape[-1] :]}
