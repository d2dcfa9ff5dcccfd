"""A call of any op, from a row of its family's table and what the record says of its arguments. Every length may be 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from attnops.core.arguments import REQUIRED, Arg
from attnops.core.kernel import kernels_of
from attnops.core.record import changed
from attnops.ops import OPS
from attnops.ops.case_data import Features, Grid, Pages, Scene, Source
from attnops.testing.calls import Call, filled, plan_call

SPREAD = {torch.int8: 3.0, torch.float8_e4m3fn: 60.0, torch.float8_e5m2: 9000.0}
"""Of the rows of a write into quantised pages: some exceed the range of the dtype by far."""

FREE = {"queries": "tokens", "new_keys": "tokens", "factors": "tokens", "keys": "keys", "pages": "pages"}
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
        raise TypeError(f"{op}: got {', '.join(rest)}, want the names of its grid, arguments and sizes")
    return _call(scene)


def gradient_call(source: Source, forward: Call, mask_grad: bool = False, lse_grad: bool = False) -> Call:
    """`<op>_backward` of a forward call: its results as the reference gives them, and random gradients."""
    made, free, arguments = _exact_results(forward), dict(forward.free), dict[str, Any]()
    query = next(a.name for a in forward.spec.args if a.holds == "queries")
    wanted = {n for n, on in zip(GRADIENT, (mask_grad, lse_grad), strict=True) if on}
    for a in OPS[f"{forward.op}_backward"].spec.args:
        of, dtype = a.name.removeprefix("grad_"), _dtype(a, forward.arguments[query].dtype)
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
    made = OPS[call.op].reference(changed(exact.record, **{r.when: True for r in results if r.when}))
    return dict(zip((r.name for r in results), made, strict=True))


def _by_name(names: Sequence[str], row: Sequence[Any]) -> dict[str, Any]:
    """A row's values by name."""
    plain = [part for part in row if not isinstance(part, (dict, Features))]
    if len(plain) > len(names):
        raise TypeError(f"got {len(plain)} values, want {' '.join(names)}")
    values = dict(zip(names, plain, strict=False))
    for part in row:
        values |= part if isinstance(part, dict) else {"f": part} if isinstance(part, Features) else {}
    return values


def _scene(op: str, source: Source, values: dict[str, Any]) -> tuple[Scene, dict[str, Any]]:
    """The scene of these values, and those that it has no place for."""
    spec = OPS[op].spec
    letters = {size.text for a in spec.args for size in a.layout}
    own = {n: values.pop(n) for n in OF_SCENES & values.keys()}
    scene = Scene(source, spec, **own)
    if "dtype" in values:
        scene.f = replace(scene.f, dtype=values.pop("dtype"))
    scene.sizes = scene.f.sizes() | {n: values.pop(n) for n in letters & values.keys() - set(spec.names)}
    scene.given = {n: values.pop(n) for n in spec.names if n in values}
    for a in spec.args:
        if a.tensor and isinstance(given := scene.given.get(a.name), Sequence):
            made = source.ints(given, _dtype(a, scene.index))
            scene.given[a.name] = made
            scene.sizes |= {s.text: n for s, n in zip(a.layout, made.shape, strict=True) if s.text.isidentifier()}
            if a.holds == "slots_of_tokens":
                scene.free["tokens"] = made < 0
    return scene, values


def _add_requests(scene: Scene) -> None:
    """Add the lengths of the requests and their sums, their pages, and what is free past their ends."""
    source, (tokens, keys), given = scene.source, scene.past, dict[str, Any]()
    if scene.q_lens is not None:
        end = sum(scene.q_lens)
        scene.sizes |= {"T": end + tokens, "B": len(scene.q_lens)}
        scene.free["tokens"] = source.past(end, end + tokens)
        given |= {"starts_of_queries": source.cumulative(scene.q_lens), "lengths_of_queries": source.ints(scene.q_lens)}
        given |= {"most_queries": max(scene.q_lens, default=0) + scene.slack, "tokens": end + tokens}
    if scene.k_lens is not None:
        end = sum(scene.k_lens)
        scene.sizes |= {"N": end + keys, "B": len(scene.k_lens)}
        scene.free["keys"] = source.past(end, end + keys)
        given |= {"starts_of_keys": source.cumulative(scene.k_lens), "most_keys": max(scene.k_lens, default=0) + scene.slack}
    for a in scene.spec.args:
        if a.holds in given:
            scene.given[a.name] = given[a.holds]
        elif a.holds == "lengths_of_keys" and scene.k_lens is not None:
            scene.given[a.name] = source.ints(scene.k_lens, _dtype(a, scene.index))
        elif a.holds == "page_ids" and scene.k_lens is not None and "page" in scene.sizes:
            table, used = page_table(source, scene.k_lens, scene.sizes["page"], scene.pages)
            scene.given[a.name], scene.free["pages"] = table, ~used
            scene.sizes |= {"P": used.shape[0], "max_pages": table.shape[1]}


def page_table(source: Source, lengths: Sequence[int], page_size: int, pages: Pages) -> tuple[Tensor, Tensor]:
    """(int32 page table, bool `[P, page]` of the slots that hold keys). Pages are in random order."""
    counts = [-(-n // page_size) for n in lengths]
    order = source.permutation(sum(counts) + pages.spare)
    width = max(counts, default=0) + pages.wider
    used = torch.zeros(len(order), page_size, dtype=torch.bool)
    rows: list[list[int]] = []
    for count, length in zip(counts, lengths, strict=True):
        own, order = order[:count], order[count:]
        if pages.shared and len(rows) == 1 and count and rows[0]:
            own[0] = rows[0][0]
        for at, page in enumerate(own):
            used[page, : min(page_size, length - at * page_size)] = True
        rows.append(own)
    rest = [order[-1] if order and column % 2 else -1 for column in range(width)]
    flat = [p for row in rows for p in row + rest[len(row) :]]
    return source.ints(flat).reshape(len(lengths), width), used.to(source.device)


def _call(scene: Scene) -> Call:
    """The call of a scene, with the arguments that are not yet given."""
    spec = scene.spec
    given = {n: x for n, x in scene.given.items() if not _is_asked(spec[n], x)}
    for a in spec.args:
        if not a.tensor and a.name not in given and (number := _number(scene, a)) is not None:
            given[a.name] = number
    sizes = {a.name: a.default for a in spec.args if not a.tensor} | given | scene.sizes
    arguments = filled(spec.op, sizes, given, lambda a, shape: _tensor(scene, a, shape), scene.f.narrow())
    arguments = {n: x for n, x in arguments.items() if x is not None}
    pages = [a.name for a in spec.args if a.holds == "pages" and a.name in arguments]
    if scene.pages.interleaved and len(pages) == 2:
        arguments |= _interleaved({n: arguments[n] for n in pages})
    free = {}
    for a in spec.args:
        where = scene.free.get(a.name, scene.free.get(FREE.get(a.holds, "")))
        if where is not None and a.name in arguments:
            free[a.name] = where.reshape(*where.shape, *[1] * (arguments[a.name].dim() - where.dim()))
    writes = (a.name for a in spec.args if a.written and a.holds != "pages" and not a.hint and a.name in arguments)
    return Call(spec.op, arguments, free, tuple(writes))


def _is_asked(a: Arg, value: Any) -> bool:
    """Does the value ask for a random tensor?"""
    return a.tensor and (value is True or value is False or isinstance(value, torch.dtype))


def _number(scene: Scene, a: Arg) -> Any:
    """The argument that is no tensor, None where it is left out."""
    f = scene.f
    if a.holds == "scale_of_logits":
        return f.head_dim**-0.5 if f.scale is None else f.scale
    for fact in a.facts:
        if scene.padding is None and fact.field in ("padded", "holes"):
            return False
        value = getattr(f, fact.field, None)
        value = value if fact.part is None or value is None else value[fact.part]
        if value != a.default:
            return value
    return None


def _dtype(a: Arg, dtype: torch.dtype) -> torch.dtype:
    """The only dtype of an argument, or this one."""
    return a.dtypes[0] if isinstance(a.dtypes, tuple) and len(a.dtypes) == 1 else dtype


def _tensor(scene: Scene, a: Arg, shape: Sequence[int]) -> Tensor | None:
    """The tensor of this argument as the features ask; None where they leave it out."""
    source, f, wanted = scene.source, scene.f, scene.given.get(a.name)
    dtype = wanted if isinstance(wanted, torch.dtype) else _dtype(a, f.dtype)
    kv = torch.uint8 if a.dtypes == (torch.uint8,) else f.kv_dtype or f.dtype
    facts = {fact.field for fact in a.facts}
    if a.holds in ("pages", "keys"):
        return source.stored(*shape, dtype=kv)
    if a.holds == "queries":
        return source.query(shape, f)
    if a.holds == "new_keys":
        return source.normal(*shape, dtype=f.dtype, spread=SPREAD.get(_stored_dtype(scene), 1.0))
    if a.holds in ("scale_of_query", "scale_of_keys"):
        quantised = f.q_dtype if a.holds == "scale_of_query" else f.kv_dtype
        return None if quantised is None else source.scales(shape[0], quantised)
    if a.holds == "weight_rows":
        return source.stored(*shape, dtype=dtype) if dtype == torch.uint8 else source.normal(*shape, dtype=dtype, spread=shape[-1] ** -0.5)
    if a.holds == "factors":
        return source.normal(*shape).exp() if f.temperature else None
    if a.holds == "shares":
        return source.normal(*shape, dtype=dtype).abs()
    if "mask" in facts:
        return source.mask(shape, f)
    if "sinks" in facts:
        return None if f.sinks is None else source.normal(*shape, dtype=f.sinks)
    if a.written:
        absent = a.default is not REQUIRED and not ("lse" in facts and f.lse)
        return None if absent else torch.empty(*shape, dtype=dtype, device=source.device)
    return source.normal(*shape, dtype=dtype) if a.default is REQUIRED or wanted else None


def _stored_dtype(scene: Scene) -> torch.dtype:
    """That of the pages."""
    packed = any(a.holds == "pages" and a.dtypes == (torch.uint8,) for a in scene.spec.args)
    return torch.uint8 if packed else scene.f.kv_dtype or scene.f.dtype


def _interleaved(pages: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Both kinds of pages as views of one buffer `[P, page, Hkv, D + Dv]`, the layout of several engines."""
    (first, keys), (second, values) = pages.items()
    both = torch.cat([keys.view(torch.uint8), values.view(torch.uint8)], -1).view(keys.dtype)
    return {first: both[..., : keys.shape[-1]], second: both[..., keys.shape[-1] :]}
