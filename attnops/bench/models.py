"""Hugging Face models with random weights, their exact logits, and the caches they are measured over."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import attnops.hf
from attnops.bench import Point, Setup
from attnops.bench.rows import Case, Row, Way, relative_error, time_if_right, with_ratios
from attnops.configs import SHAPES, config_of
from attnops.errors import InvalidInput
from attnops.tune.clock import Run, steps_us

ALIASES = {"llama-8b-shape": "llama-3-8b-shape"}
# The model of suites that measure one, by size of the run.
ONE = {"toy": "llama", "small": "llama-small", "quick": "llama-3-8b-shape", "full": "llama-3-8b-shape"}

EXACT = 2  # rows that are compared with exact logits, which are slow; the other rows are compared with transformers' eager model

# By size of the run: the layers of models that are not built whole. A laptop's memory holds one layer of a published shape.
LAYERS = {
    "toy": {"llama": 1, **dict.fromkeys(SHAPES, 1)},
    "small": dict.fromkeys(SHAPES, 1),
    "quick": dict.fromkeys(SHAPES, 4),
    "full": {"gpt-oss-20b-shape": 4, "deepseek-v3-shape": 4},
}

# Factor for workspaces, the compiler's buffers and fragmentation; bytes of libraries that load later and of the compiler's processes.
SPARE, OVERHEAD = 1.15, 1 << 30

# Path prefix, limit and usage of a control group, version 2 and version 1.
GROUPS = (("/sys/fs/cgroup/memory.", "max", "current"), ("/sys/fs/cgroup/memory/memory.", "limit_in_bytes", "usage_in_bytes"))

CACHES = 5  # of one point, held at a time

Kept = Callable[[str], Any]  # gives the model of a name


def asked(setup: Setup) -> str:
    """The model of a suite that measures one, under the name that results files share. Raises InvalidInput unless it is a decoder."""
    import transformers

    name = ALIASES.get(setup.model, setup.model)
    if name and type(found := config_of(name)) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InvalidInput("model", f"{name!r}, a {type(found).__name__}", "a decoder")
    return name or ONE[setup.size]


def config(setup: Setup, name: str) -> Any:
    """The config of a bundled name, with the layers of the setup. Raises InvalidInput for an unknown name."""
    name = ALIASES.get(name, name)
    return _with_layers(config_of(name), setup.layers or LAYERS[setup.size].get(name, 0))


def _with_layers(config: Any, layers: int) -> Any:
    if layers:
        config.num_hidden_layers = layers
        if (kinds := getattr(config, "layer_types", None)) is not None:
            config.layer_types = (kinds * layers)[:layers]
    return config


def kv_width(config: Any) -> int:
    """Numbers of the keys and values of a token in one layer. Raises AttributeError or TypeError if layers differ."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return int(2 * heads * (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads))


def free(device: torch.device) -> int | None:
    """Free bytes on `device`; None if the system does not say. Out of memory, Linux kills a process without a message."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    kib = _number("/proc/meminfo", "MemAvailable:")
    return min((n for n in (kib and kib * 1024, *(_left(*group) for group in GROUPS)) if n is not None), default=None)


def _number(path: str, name: str = "") -> int | None:
    """The number after `name` at the start of a line of a file; None if there is no file or number."""
    with suppress(OSError):
        found = re.search(rf"^{name}\s*(\d+)", Path(path).read_text(), re.MULTILINE)
        return int(found[1]) if found else None
    return None


def _left(prefix: str, limit: str, used: str) -> int | None:
    most, now = (_number(prefix + name) for name in (limit, used))
    return None if most is None or now is None else max(most - now + (_number(f"{prefix}stat", "inactive_file") or 0), 0)


def needed(model: nn.Module, wide: torch.dtype | None = None, cached: int = 0) -> int:
    """Bytes of a model, possibly on meta, and `cached` more. wide: counts its largest module in this dtype, too (`models.widened`)."""
    weights = sum({id(p): p.nbytes for p in model.parameters()}.values())
    own = (m.parameters(recurse=False) for m in model.modules() if not isinstance(m, nn.Embedding))
    widened = 0 if wide is None else max(sum(p.numel() for p in params) for params in own) * wide.itemsize
    return int(SPARE * (weights + widened + cached)) + OVERHEAD


def fitted(setup: Setup, name: str, point: Point | None = None) -> Any:
    """As `config`, with layers halved until free memory holds the model, its caches at `point` and its widened modules.

    Raises InvalidInput: one layer is too many, or the setup names more layers than fit.
    """
    made, there = config(setup, name), free(setup.device)
    while there is not None and (need := _needed(setup, made, point)) > there:
        layers = made.num_hidden_layers
        if setup.layers or layers == 1:
            got, want = (f"{n / 2**30:.1f} GiB free" for n in (there, need))
            less = "ask for fewer --layers, a smaller --model or smaller --points"
            raise InvalidInput("memory", got, f"{want}, for {layers} layers of {name}; {less}")
        _with_layers(made, layers // 2)
    return made


def _needed(setup: Setup, made: Any, point: Point | None) -> int:
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made, dtype=setup.dtype)
    cached = 0
    # A config whose layers differ has no single head dim, and raises; its caches are small beside its weights.
    with suppress(Exception):
        row = kv_width(made) * made.num_hidden_layers * setup.dtype.itemsize
        cached = 0 if point is None else CACHES * point.batch * (point.context + 32) * row
    return needed(model, _wide(setup.dtype), cached)


def build(setup: Setup, name: str, point: Point | None = None) -> Any:
    """The model in evaluation mode and the setup's dtype, with random weights and sinks, alike in every run, as large as `fitted` says."""
    import transformers

    made = fitted(setup, name, point)
    with torch.random.fork_rng(devices=[setup.device] if setup.on_gpu else []), torch.device(setup.device):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(made, dtype=setup.dtype)
        for path, parameter in model.named_parameters():
            if path.endswith("sinks"):  # initialised to zero, alike for all heads
                nn.init.normal_(parameter)
    return model.eval().requires_grad_(False)


def keeper(setup: Setup, point: Point | None = None) -> Kept:
    """Builds models, and keeps the last one: the cases of a suite share it, and only one is in memory."""
    held: dict[str, Any] = {}

    def kept(name: str) -> Any:
        if name not in held:
            held.clear()
            held[name] = build(setup, name, point)
        return held[name]

    return kept


Places = Mapping[str, Mapping[str, tuple[Point, ...]]]  # by size of the run: the models of a suite, and the points of each


def over(setup: Setup, places: Places, measure: Callable[[Setup, Kept, str, Point], Iterable[Row]]) -> dict[str, Case]:
    """Every model at its points. A model named by the setup takes the first model's points if it has no points of its own."""
    here = places[setup.size]
    names = [asked(setup)] if setup.model else list(here)
    points = {name: setup.points or here.get(name, next(iter(here.values()))) for name in names}
    most = max((p for some in points.values() for p in some), key=lambda p: p.batch * p.context, default=None)
    kept = keeper(setup, most)
    return {f"{name} {point}": partial(measure, setup, kept, name, point) for name in names for point in points[name]}


def twin(model: Any) -> Any:
    """A copy of the model with the same weights, to patch one of the two."""
    return copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})


def patched(model: Any, how: Any, **options: Any) -> tuple[Any, Any]:
    """(a twin, its patch). how: "" for none, "hf" over transformers' caches, "paged" over pages, with options of `patch`."""
    one = twin(model)
    return one, attnops.hf.patch(one, cache=how, **options) if how else None


def tokens(setup: Setup, model: Any, batch: int, length: int, seed: int = 0) -> Tensor:
    """Random tokens, int64 `[batch, length]`."""
    some = torch.Generator().manual_seed(seed)
    return torch.randint(3, model.config.vocab_size, (batch, length), generator=some).to(setup.device)


@torch.no_grad()
def compared(
    case: str, model: Any, ways: Mapping[str, Any], prompt: Tensor, new: Tensor | None, more: Callable[[float, Way], Row]
) -> list[Row]:
    """The rows of ways to compute a model's logits, `hf_eager` among them, which gives the budget. more: as in `time_if_right`."""
    off = distance(model, eager := ways["hf_eager"].computed())
    want = exactly(model, prompt[:EXACT], None if new is None else new[:EXACT])
    rows = time_if_right(case, ways, want, budget(model, off(eager, want)), steps_us, off, more)
    return with_ratios(rows, "hf_eager", "hf_compiled")


def experts(config: Any) -> bool:
    """Is it the config of a mixture of experts?"""
    return any(getattr(config, n, None) for n in ("num_local_experts", "n_routed_experts", "num_experts"))


def distance(model: Any, eager: Tensor) -> Callable[[Tensor, Tensor], float]:
    """The error of logits: relative to exact ones in the first rows, and half the error relative to `eager` in the other rows.

    `eager` has an error of its own, as large as the one allowed. Of a model with experts the median row counts: where two experts tie,
    rounding chooses between them.
    """
    quantile = 0.5 if experts(model.config) else 1.0

    def off(got: Tensor, want: Tensor) -> float:
        rows = want.shape[0]
        if got.shape != eager.shape:
            return float("inf")
        return max(relative_error(got[:rows], want, quantile), relative_error(got[rows:], eager[rows:], quantile) / 2)

    return off


# Budget over the error of transformers' eager model, since another order of sums may be that much worse by chance; and the upper bound of
# that error, so that zeros, whose error is 1, exceed the budget.
MORE, MOST = 1.5, 1 / 1.5


def budget(model: Any, base: float) -> float:
    """The largest allowed `distance` of logits. base: that of transformers' eager model.

    MORE * base + gain² u (sqrt(E) + 5) (4 + sqrt(L)), for L layers of width E. u: unit roundoff of float32, in which products are summed.
    4 + sqrt(L): the roundings of a layer, and one of the residual stream a layer, which add up as random ones do. gain: the weights'
    standard deviation times sqrt(E); queries and keys each grow by it, and so do their errors.
    Raises RuntimeError: the base is NaN or more than MOST.
    """
    if not base <= MOST:
        raise RuntimeError(f"transformers' own eager logits are off by {base:.3g}, want at most {MOST:.3g}: nothing can be compared")
    width, layers = model.config.hidden_size, model.config.num_hidden_layers
    gain = max(1.0, getattr(model.config, "initializer_range", 0.02) * width**0.5)
    return float(MORE * base + gain**2 * torch.finfo(torch.float32).eps / 2 * (width**0.5 + 5) * (4 + layers**0.5))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float32 else torch.float32


def widened(model: Any) -> Any:
    """The model in a wider dtype. Weights are widened while their module runs; an embedding stays narrow, its rows are widened."""
    wide, one = _wide(model.dtype), twin(model)

    def wider(module: nn.Module, narrow: dict[str, nn.Parameter]) -> None:
        module._parameters.update({n: nn.Parameter(p.to(wide), requires_grad=False) for n, p in narrow.items()})

    for module in list(one.modules()):
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer.to(wide) if buffer is not None and buffer.dtype.is_floating_point else buffer
        narrow = {name: p for name, p in module._parameters.items() if p is not None}
        if isinstance(module, nn.Embedding):
            module.register_forward_hook(lambda module, given, returned: returned.to(wide))
        elif narrow:
            module.register_forward_pre_hook(lambda module, given, narrow=narrow: wider(module, narrow))
            module.register_forward_hook(lambda module, given, returned, narrow=narrow: module._parameters.update(narrow))
    return one


@torch.no_grad()
def exactly(model: Any, prompt: Tensor, new: Tensor | None = None) -> Tensor:
    """Logits `[B, N, V]` of a step for every token of `new` `[B, N]` after `prompt`; None: `[B, 1, V]`, of the prompt's last token.

    Computed by transformers in float64 for a float32 model, else in float32, one widened module at a time: a machine may not have the
    memory for a wide copy of a large model.
    """
    from transformers import DynamicCache

    wide = widened(model)
    if callable(choose := getattr(wide, "set_experts_implementation", None)):  # grouped products have no float64
        choose("eager")
    cache = DynamicCache(config=wide.config)
    last: Tensor = wide(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    if new is None:
        return last
    return torch.cat([wide(new[:, at : at + 1], past_key_values=cache, use_cache=True).logits for at in range(new.shape[1])], 1)


def rewinder(cache: Any) -> Run:
    """A function that restores a cache to its present state, mostly without copies.

    Pages are cropped. Dynamic layers of transformers replace their tensors, so the old ones are kept. Static layers write in place past
    the restored position; ring buffers of windows are copied.
    """
    if isinstance(cache, attnops.hf.PagedModelCache):
        start = int(cache.get_seq_length())

        def back() -> None:
            if (more := int(cache.get_seq_length()) - start) > 0:
                cache.crop(-more)

        return back

    def in_place(layer: Any, value: Any) -> bool:
        return isinstance(value, Tensor) and bool(getattr(layer, "is_compileable", False))

    def saved(layer: Any, value: Any) -> Any:
        return value.clone() if in_place(layer, value) and (getattr(layer, "is_sliding", False) or value.dim() == 0) else value

    kept = [(layer, name, saved(layer, value)) for layer in cache.layers for name, value in vars(layer).items()]

    def rewind() -> None:
        for layer, name, value in kept:
            now = getattr(layer, name)
            if not (in_place(layer, now) and in_place(layer, value)):
                setattr(layer, name, value)
            elif now is not value:  # graphs hold its address
                now.copy_(value)

    return rewind
