"""Suite `cliffs`: streams of calls in which one thing changes again and again.

A case is a stream of one way (`changes.KINDS`). Every call of it is also one of the unpatched
model, `hf`, in the same turn, whichever is first in turn: transformers itself pays where cuBLAS
plans a size that it has not met. Apart from the first call of a model, which is not timed, nothing
is warm: each stream has a process of its own, with empty caches of Inductor and Triton.

`p99_us`: the 99th percentile by nearest rank, which is the call that 99% of the calls do not
exceed. `worst_us`: the longest call. `over_s`: the largest difference of a call to that of `hf` in
the same turn, in seconds; `over_at`: the number of that turn, from 0. `stalls`: the turns in which
the difference is more than 0.3 s. `calls`: fewer than the stream has if the time was spent.

The first and the last call are judged: their logits and tokens by exact logits.

`attnops`: `attnops.patch(model)`, no more. `attnops_piecewise`, `attnops_breakable`: with
`decode=`, if `--ways` names them. `attnops_paged`, on a CPU: over pages without graphs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from math import inf
from random import Random
from statistics import median
from typing import Any

import torch
from torch import Tensor

from attnops.bench import Point, Setup, models, ways
from attnops.bench.changes import KINDS, NEW, SIZES, Side, Turn, largest
from attnops.bench.overhead import in_a_process
from attnops.bench.rows import WRONG, Case, Row, Rows, digits, with_ratios
from attnops.tune.clock import seconds

SUITE, HF = "cliffs", "hf"
STALL_S = 0.3
CAP_S = 90.0
"""No turn of a stream begins later."""


def cases(setup: Setup) -> dict[str, Case]:
    """A case of each model, change and way, at the first prompt of the model in the suite
    `generate`. Raises InvalidInput for a way that this device does not have."""
    ways.check(setup, SUITE)
    return {
        f"{name}, {kind}, {way}": partial(measure, setup, name, points[0], kind, way)
        for name, points in models.points_of(setup, SUITE).items()
        for way in ways.chosen(setup, SUITE)
        if way != HF
        for kind in KINDS
    }


def measure(setup: Setup, name: str, point: Point, kind: str, way: str) -> Rows:
    """The rows of a stream: of the way and of `hf`. At toy size in this process, because imports
    would take longer than all else.

    Raises LeftOut where the device or a package cannot do it.
    """
    from attnops.core.private_torch import fresh_cache

    given = setup, name, point, kind, way
    with fresh_cache():
        return stream(*given) if setup.size == "toy" else in_a_process(stream, *given)


@torch.no_grad()
def stream(setup: Setup, name: str, point: Point, kind: str, way: str) -> Rows:
    """As `measure`, in this process."""
    if setup.on_gpu:
        torch.cuda.set_device(setup.device)
    sizes, some = SIZES[setup.size], Random(0)
    model = models.build(setup, name, largest(sizes, point))
    bases = KINDS[kind].models(setup, model)
    known = ways.here(setup, SUITE)
    sides = {
        each: Side(setup, point, [models.patched(base, known[each]) for base in bases])
        for each in (way, HF)
    }
    for side in sides.values():
        for which in range(len(bases)):
            side.call(which=which)
    turns = [KINDS[kind].turn(sizes, at, some) for at in range(sizes.calls)]
    taken, made = timed(sides, turns)
    case = f"{name}, {kind}, {way}"
    layers = model.config.num_hidden_layers
    rows = {each: {"case": case, "way": each, "layers": layers} for each in sides}
    verdict = judged(sides, way, {at: turns[at] for at in (0, len(taken[HF]) - 1)}, made[way])
    rows[HF] |= figures(taken[HF])
    rows[way] |= verdict
    if "wrong" not in verdict:
        rows[way] |= figures(taken[way]) | differences(taken[way], taken[HF])
    return with_ratios(list(rows.values()), HF)


Taken = dict[str, list[float]]
"""By way the seconds of its calls."""


def timed(sides: dict[str, Side], turns: Sequence[Turn]) -> tuple[Taken, dict[str, list[Tensor]]]:
    """(the seconds of the calls, their texts)."""
    taken: Taken = {way: [] for way in sides}
    texts: dict[str, list[Tensor]] = {way: [] for way in sides}
    end = time.perf_counter() + CAP_S
    order = list(sides)
    for turn in turns:
        for way in order:

            def call(way: str = way, turn: Turn = turn) -> None:
                text, _ = turn(sides[way], False)
                texts[way].append(text)

            taken[way].append(seconds(call))
        order.reverse()
        if time.perf_counter() > end:
            break
    return taken, texts


def figures(taken: Sequence[float]) -> Row:
    """Those of the calls of a stream. taken: their seconds."""
    us = sorted(1e6 * s for s in taken)
    rank = (99 * len(us) + 99) // 100  # the nearest one
    found = {"median_us": median(us), "p99_us": us[rank - 1], "worst_us": us[-1]}
    return {"calls": len(us), **{name: round(each, 2) for name, each in found.items()}}


def differences(taken: Sequence[float], hf: Sequence[float]) -> Row:
    """How much longer the calls of a way take than those of `hf`, turn by turn."""
    over = [mine - its for mine, its in zip(taken, hf, strict=True)]
    worst = max(over)
    stalls = sum(each > STALL_S for each in over)
    return {"over_s": round(worst, 4), "over_at": over.index(worst), "stalls": stalls}


def judged(sides: dict[str, Side], way: str, turns: dict[int, Turn], texts: list[Tensor]) -> Row:
    """The error and the budget of these turns, up to the first one that is beyond its budget, and
    then in `wrong` by how much.

    Each is made again, with its logits. They are compared with exact ones of their text, and the
    tokens of the timed call with the best ones of its text. turns: by their number in `texts`.
    """
    found: Row = {}
    for at, turn in turns.items():
        text, logits = turn(sides[HF], True)
        model = sides[HF].used
        exact = partial(models.exact_of, model, new=NEW)
        allowed = models.budget(model, distance(model, logits, exact(text)))
        text, logits = turn(sides[way], True)
        error = distance(model, logits, exact(text))
        error = max(error, models.below_the_best(exact(texts[at]), texts[at]))
        found |= {"budget": digits(allowed)} | ({"error": digits(error)} if error < inf else {})
        if not error <= allowed:
            found["wrong"] = f"{WRONG}call {at} is off by {error:.3g}, allowed {allowed:.3g}"
            break
    return found


def distance(model: Any, logits: Tensor | None, exact: Tensor) -> float:
    """Of the logits of a call from exact ones."""
    assert logits is not None, "they are asked for"
    return models.distance(model, logits)(logits, exact)
