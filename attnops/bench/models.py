"""Hugging Face models with random weights, their exact logits, and the caches they are measured
over."""

from __future__ import annotations

import copy
import gc
import inspect
import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import attnops.hf
from attnops.bench import Point, Setup, random_caches
from attnops.bench.chunks import InChunks
from attnops.bench.cold import in_turn
from attnops.bench.rows import (
    Case,
    Make,
    More,
    Row,
    Rows,
    Way,
    Ways,
    relative_error,
    time_if_right,
    with_ratios,
)
from attnops.bench.ways import PLACES, How
from attnops.bench.work import experts, kv_width, states_in
from attnops.configs import SHAPES, config_of
from attnops.core.errors import InvalidInput
from attnops.hf.cache.names import argument
from attnops.hf.models.recurrent import of_package, rebound
from attnops.ops.experts import mxfp4_reference
from attnops.tune.clock import Run, steps_us

ALIASES = {"llama-8b-shape": "llama-3-8b-shape"}
# The model of suites that measure one, by size of the run.
ONE = {
    "toy": "llama",
    "small": "llama-small",
    "quick": "llama-3-8b-shape",
    "full": "llama-3-8b-shape",
}

# rows that are compared with exact logits, which are slow; the other rows are compared with
# transformers' eager model
EXACT = 2

# By size of the run: the layers of models that are not built whole. A laptop's memory holds one
# layer of a published shape.
LAYERS = {
    "toy": {"llama": 1, **dict.fromkeys(SHAPES, 1)},
    "small": dict.fromkeys(SHAPES, 1),
    "quick": dict.fromkeys(SHAPES, 4),
    "full": {"gpt-oss-20b-shape": 4, "deepseek-v3-shape": 4},
}

# Factor for workspaces, the compiler's buffers and fragmentation; bytes of libraries that load
# later and of the compiler's processes.
SPARE, OVERHEAD = 1.15, 1 << 30
CACHES = 5  # of one point, held at a time
ALONE = 2  # of a long one: before a step and after it, or in float32

Kept = Callable[[str], Any]  # gives the model of a name


def asked(setup: Setup) -> str:
    """The model of a suite that measures one, under the name that results files share. Raises
    InvalidInput unless it is a decoder."""
    name = ALIASES.get(setup.model, setup.model)
    if name and type(found := config_of(name)) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InvalidInput("model", f"{name!r}, a {type(found).__name__}", "a decoder")
    return name or ONE[setup.size]


def config(setup: Setup, name: str, layers: int = 0) -> Any:
    """The config of a bundled name with these layers, or those of the setup. Raises InvalidInput
    for an unknown name."""
    made = config_of(name)
    if layers := layers or setup.layers or LAYERS[setup.size].get(name, 0):
        made.num_hidden_layers = layers
        kinds = getattr(made, "layer_types", None)  # those of a Falcon-H1 follow the number
        if kinds is not None and len(kinds) != layers:
            made.layer_types = (kinds * layers)[:layers]
    return made


# Of a container, in cgroups of version 2 and 1
LIMITS = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")


def free(device: torch.device, root: Path = Path("/")) -> int:
    """Free bytes of a GPU. On a CPU those that Linux calls available, else all of the machine, and
    at most the container's limit.

    Out of memory, Linux kills a process without a message. root: of the files that say so.
    """
    if device.type == "cuda":
        return (
            torch.cuda.mem_get_info(device)[0]
            + torch.cuda.memory_reserved(device)
            - torch.cuda.memory_allocated(device)
        )
    text = {
        name: path.read_text()
        for name in ("proc/meminfo", *LIMITS)
        if (path := root / name).is_file()
    }
    found = re.search(r"^MemAvailable: +(\d+) kB$", text.pop("proc/meminfo", ""), re.M)
    there = (
        1024 * int(found[1]) if found else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )
    return min(
        [there, *(int(limit) for limit in map(str.strip, text.values()) if limit.isdecimal())]
    )


def needed(setup: Setup, made: Any, point: Point | None) -> int:
    """Bytes of the model of a config, its caches at `point` and its largest module in a wider dtype
    (`widened`)."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made, dtype=setup.dtype)
    weights, cached = sum({id(p): p.nbytes for p in model.parameters()}.values()), 0
    largest = max(
        sum(p.nbytes for p in m.parameters(recurse=False))
        for m in model.modules()
        if not isinstance(m, nn.Embedding)
    )
    # A config whose layers differ has no single head dim, and raises; its caches are small beside
    # its weights.
    with suppress(Exception):
        row = kv_width(made) * made.num_hidden_layers * setup.dtype.itemsize
        cached = 0 if point is None else held(point) * (1 + 32 / point.context) * row
    return int(SPARE * (weights + 2 * largest + cached)) + OVERHEAD


def fitted(setup: Setup, name: str, point: Point | None = None) -> Any:
    """As `config`, with layers halved until free memory holds what is `needed`. Raises InvalidInput
    if one layer or --layers do not fit."""
    made, there = config(setup, name), free(setup.device)
    while (need := needed(setup, made, point)) > there:
        if setup.layers or made.num_hidden_layers == 1:
            got, want = (f"{n / 2**30:.1f} GiB free" for n in (there, need))
            less = "ask for fewer --layers, a smaller --model or smaller --points"
            raise InvalidInput(
                "memory", got, f"{want}, for {made.num_hidden_layers} layers of {name}; {less}"
            )
        made = config(setup, name, made.num_hidden_layers // 2)
    return made


def build(setup: Setup, name: str, point: Point | None = None) -> Any:
    """The model in evaluation mode and the setup's dtype, with random weights and sinks, alike in
    every run, as large as `fitted` says.

    The experts of a gpt-oss are numbers of MXFP4, as its checkpoints have them.
    """
    made = fitted(setup, name, point)
    with (
        torch.random.fork_rng(devices=[setup.device] if setup.on_gpu else []),
        torch.device(setup.device),
    ):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(made, dtype=setup.dtype)
        for path, parameter in model.named_parameters():
            if path.endswith("sinks"):  # initialised to zero, alike for all heads
                nn.init.normal_(parameter)
            elif made.model_type == "gpt_oss" and parameter.dim() == 3:
                for one in parameter.data:
                    one.copy_(mxfp4_reference.rounded(one.mT).mT)
    return model.eval().requires_grad_(False)


def keeper(setup: Setup, point: Point | None = None) -> Kept:
    """Builds models, and keeps the last one: the cases of a suite share it, and only one is in
    memory."""
    held: dict[str, Any] = {}

    def kept(name: str) -> Any:
        if name not in held:
            held.clear()
            held[name] = build(setup, name, point)
        return held[name]

    return kept


def points_of(setup: Setup, suite: str) -> dict[str, tuple[Point, ...]]:
    """A suite's points by model. A model named by the setup takes the first model's points if it
    has no points of its own."""
    here = PLACES[suite][setup.size]
    names = [asked(setup)] if setup.model else list(here)
    return {name: setup.points or here.get(name, next(iter(here.values()))) for name in names}


def over(
    setup: Setup, suite: str, measure: Callable[[Setup, Kept, str, Point], Iterable[Row]]
) -> dict[str, Case]:
    """Every model of a suite at its points."""
    points = points_of(setup, suite)
    kept = keeper(setup, largest(p for some in points.values() for p in some))
    return {
        f"{name} {point}": partial(measure, setup, kept, name, point)
        for name, some in points.items()
        for point in some
    }


def held(point: Point) -> int:
    """The tokens of all caches in memory."""
    return (ALONE if point.long else CACHES) * point.batch * point.context


def largest(points: Iterable[Point]) -> Point | None:
    """The point with the most tokens in memory."""
    return max(points, key=held, default=None)


def twin(model: Any) -> Any:
    """A copy of the model with the same weights, to patch one of the two."""
    return copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})


def patched(model: Any, how: How) -> tuple[Any, Any]:
    """(a twin, its patch; None for one that is not patched)."""
    one = twin(model)
    if how.torch:
        call_torch(one)
    if how.packed:
        attnops.hf.pack_experts(one)
    return one, None if how.patch is None else attnops.hf.patch(one, **how.patch)


def call_torch(model: Any) -> None:
    """Let the model's modules call transformers' own functions where a package is installed that
    transformers would call instead, such as flash-linear-attention."""
    for module in model.modules():
        forward: Any = type(module).forward
        code: Any = inspect.unwrap(forward)
        names = getattr(getattr(code, "__code__", None), "co_names", ())
        called = {n: code.__globals__.get(n) for n in names}
        own = {n: inspect.unwrap(f) for n, f in called.items() if of_package(f)}
        if own:
            module.forward = MethodType(rebound(forward, own), module)


def tokens(setup: Setup, model: Any, batch: int, length: int, seed: int = 0) -> Tensor:
    """Random tokens, int64 `[batch, length]`."""
    some = torch.Generator().manual_seed(seed)
    return torch.randint(3, model.config.vocab_size, (batch, length), generator=some).to(
        setup.device
    )


def first_of(ways: Ways) -> Way:
    """`hf_eager`, made now and kept."""
    way = made(ways["hf_eager"])
    ways["hf_eager"] = way
    return way


@torch.no_grad()
def compared(
    case: str,
    model: Any,
    ways: Ways,
    exact: Callable[[], Tensor],
    more: More,
    alone: bool = False,
) -> Rows:
    """The rows of ways to compute a model's logits, `hf_eager` among them, which gives the budget.

    exact: computes the logits of the first rows. more: as in `time_if_right`. alone: one way is in
    memory at a time, and they are timed one after the other.
    """
    eager = made(ways["hf_eager"]).computed()
    off = distance(model, eager)
    if alone:
        release()
    want = exact()
    allowed = budget(model, off(eager, want))
    turns = [{name: way} for name, way in ways.items()] if alone else [ways]
    rows: Rows = []
    for some in turns:
        rows += time_if_right(case, some, want, allowed, steps_us, off, more)
        if alone:
            release()
    return with_ratios(rows, "hf_eager", "hf_compiled")


def made(way: Way | Make) -> Way:
    """Raises InvalidInput: the way does not answer the call."""
    found = way if isinstance(way, Way) else way()
    if found is None:
        raise InvalidInput("way", "hf_eager", "one that answers the call")
    return found


def release() -> None:
    """Free what ways have left: caches in cycles of objects, graphs, compiled code."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def distance(model: Any, eager: Tensor) -> Callable[[Tensor, Tensor], float]:
    """The error of logits `[B, N, V]`: relative to exact ones in the first rows; in others half of
    that to `eager`, which is off, too. Of several such `[K, B, N, V]`: the largest."""
    # Of a model with experts the median row counts: where two experts tie, rounding chooses between
    # them.
    off = partial(relative_error, quantile=0.5 if experts(model.config) else 1.0)

    def larger(got: Tensor, want: Tensor) -> float:
        if got.shape != eager.shape:
            return inf
        rows = want.shape[-3]
        each = (t.reshape(-1, *t.shape[-3:]) for t in (got, want, eager))
        return max(
            max(off(one[:rows], exact), off(one[rows:], other[rows:]) / 2)
            for one, exact, other in zip(*each, strict=True)
        )

    return larger


# Budget over the error of transformers' eager model, since another order of sums may be that much
# worse by chance; and the upper bound of that error, so that zeros, whose error is 1, exceed the
# budget.
MORE, MOST = 1.5, 1 / 1.5


def budget(model: Any, base: float) -> float:
    """The largest allowed `distance` of logits. base: that of transformers' eager model.

    MORE * base + gain² u (sqrt(E) + 5) (4 + sqrt(L)), for L layers of width E. u: unit roundoff of
    float32, in which products are summed. 4 + sqrt(L): the roundings of a layer, and one of the
    residual stream a layer, which add up as random ones do. gain: the weights' standard deviation
    times sqrt(E); queries and keys each grow by it, and so do their errors. Raises RuntimeError:
    the base is NaN or more than MOST.
    """
    if not base <= MOST:
        raise RuntimeError(
            f"transformers' own eager logits are off by {base:.3g}, want at most {MOST:.3g}: "
            "nothing can be compared"
        )
    width, layers = model.config.hidden_size, model.config.num_hidden_layers
    gain = max(1.0, getattr(model.config, "initializer_range", 0.02) * width**0.5)
    return float(
        MORE * base
        + gain**2 * torch.finfo(torch.float32).eps / 2 * (width**0.5 + 5) * (4 + layers**0.5)
    )


MOST_EXACT = 1 << 15
"""Tokens of a prompt whose exact logits take about half a minute on an H200, at 32 layers of an 8B
model: of four times as many they take over four minutes."""

LAST = 64
"""Tokens of a longer text whose numbers are exact."""


@torch.no_grad()
def exact_of(model: Any, text: Tensor, new: int) -> Tensor:
    """Exact logits `[B, new, V]` of the last tokens of a text `[B, S]`.

    After a prompt of more than `MOST_EXACT` tokens the last ones alone are exact, after the keys
    and values that transformers computes of those before, which are in the model's dtype in every
    way. Of layers with other states all are exact.
    """
    wide = widened(model)
    prompt = text.shape[1] - new
    before = prompt - LAST if prompt > MOST_EXACT and _keep_keys(model.config) else 0
    given: dict[str, Any] = {}
    if before:
        cache = transformers.DynamicCache(config=model.config)
        given = {**argument(wide, cache), "use_cache": True}
        model(text[:, :before], **given, logits_to_keep=1)
        layers: list[Any] = cache.layers
        for layer in layers:
            layer.keys = layer.keys.to(wide_dtype(model))
            layer.values = layer.values.to(wide_dtype(model))
    with InChunks():
        logits: Tensor = wide(text[:, before:-1], logits_to_keep=new, **given).logits
    return logits


def _keep_keys(config: Any) -> bool:
    """Do all layers keep keys and values, and nothing else?"""
    kinds = {*(getattr(config, "layer_types", None) or ())}
    return kinds <= {"full_attention", "sliding_attention"}


def below_the_best(exact: Tensor, text: Tensor) -> float:
    """How far the last tokens of a text are below the best ones, relative to these. exact: their
    logits, of `exact_of`."""
    best = exact.amax(-1)
    chosen = exact.gather(-1, text[:, -exact.shape[1] :, None])[..., 0]
    return float(((best - chosen) / best.abs()).max())


def wide_dtype(model: Any) -> torch.dtype:
    """That of exact numbers."""
    return torch.float64 if model.dtype == torch.float32 else torch.float32


def widened(model: Any) -> Any:
    """The model in float64 if it is float32, else in float32. To save memory, weights are wide only
    while their module runs."""
    wide, one = wide_dtype(model), twin(model)
    call_torch(one)  # kernels of packages have no float64
    if callable(choose := getattr(one, "set_experts_implementation", None)):
        choose("eager")  # grouped products have no float64

    def wider(module: nn.Module, given: Any, narrow: dict[str, nn.Parameter]) -> None:
        module._parameters.update(
            {n: nn.Parameter(p.to(wide), requires_grad=False) for n, p in narrow.items()}
        )

    for module in list(one.modules()):
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False  # an adapter would make its input narrow again
        module._buffers.update(
            {
                n: b.to(wide)
                for n, b in module._buffers.items()
                if b is not None and b.dtype.is_floating_point
            }
        )
        narrow = {name: p for name, p in module._parameters.items() if p is not None}
        if isinstance(module, nn.Embedding):
            module.register_forward_hook(lambda module, given, returned: returned.to(wide))
        elif narrow:
            module.register_forward_pre_hook(partial(wider, narrow=narrow))
            module.register_forward_hook(
                lambda module, given, returned, narrow=narrow: module._parameters.update(narrow)
            )
    return one


@torch.no_grad()
def exactly(
    model: Any, prompt: Tensor, new: Tensor | None = None, random: bool = False, **given: Tensor
) -> Tensor:
    """Logits `[B, N, V]` of a step for every token of `new` `[B, N]` after `prompt`; None:
    `[B, 1, V]`, of the prompt's last token. The prompt's attention goes in chunks of queries where
    the model asks torch for it. random: after a random cache of the prompt's size."""
    wide = widened(model)
    cache = transformers.DynamicCache(config=wide.config)
    if random:
        rows, length = prompt.shape
        random_caches.fill(cache, model, rows, length, wide_dtype(model))
    else:
        with InChunks():
            last: Tensor = wide(
                prompt, **argument(wide, cache), use_cache=True, logits_to_keep=1, **given
            ).logits
    if new is None:
        return last
    return torch.cat(
        [
            wide(new[:, at : at + 1], **argument(wide, cache), use_cache=True).logits
            for at in range(new.shape[1])
        ],
        1,
    )


def exact_steps(model: Any, prompt: Tensor, new: Tensor) -> Tensor:
    """Logits `[2, B, N, V]` of steps, as of `exactly`, after a random cache of the prompt's size,
    and after a short one."""
    length = prompt.shape[1]
    sizes = length, random_caches.short_of(length)
    return torch.stack([exactly(model, prompt[:, :n], new, random=True) for n in sizes])


@torch.no_grad()
def exact_tail(model: Any, prompt: Tensor) -> Tensor:
    """Logits `[2, B, 1, V]` of a prompt whose last tokens run after a random cache, and after a
    short one."""
    wide = widened(model)
    empty = partial(transformers.DynamicCache, config=wide.config)
    with InChunks():
        return random_caches.logits_after(wide, wide, empty, prompt, wide_dtype(model))


def rewinder(cache: Any, fill: Run) -> Run:
    """A function that restores a cache to its present state. Static layers write past it; ring
    buffers of windows are copied, and states.

    fill: fills the empty cache again: states beside pages cannot go back.
    """
    if isinstance(cache, attnops.hf.PagedModelCache):
        if cache.states:
            return partial(in_turn, (cache.reset, fill))
        return partial(cache.crop, int(cache.get_seq_length()))
    kept: list[tuple[Any, str, Any, Tensor | None]] = []
    states: list[tuple[Tensor, Tensor]] = []
    for layer in cache.layers:
        states += [(x, x.clone()) for x in states_in(layer)]
        for name, value in vars(layer).items():
            in_place = isinstance(value, Tensor) and getattr(layer, "is_compileable", False)
            written = in_place and (getattr(layer, "is_sliding", False) or value.dim() == 0)
            kept.append((layer, name, value, value.clone() if written else None))

    def rewind() -> None:
        for layer, name, value, copied in kept:
            setattr(layer, name, value if copied is None else value.copy_(copied))
        for state, before in states:
            state.copy_(before)

    return rewind
