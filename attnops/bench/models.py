"""Hugging Face models with random weights, their exact logits, and the caches they are measured over."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import attnops.hf
from attnops.bench import memory
from attnops.bench.rows import Case, Row, Way, relative_error, time_if_right, with_ratios
from attnops.bench.setup import Point, Setup
from attnops.configs import config_of
from attnops.errors import InvalidInput
from attnops.shapes import SHAPES
from attnops.tune.clock import steps_us

ALIASES = {"llama-8b-shape": "llama-3-8b-shape"}
ONE = {"toy": "llama", "small": "llama-small", "quick": "llama-3-8b-shape", "full": "llama-3-8b-shape"}
"""The model of suites that measure one, by size of the run."""

EXACT = 2
"""Rows that are compared with exact logits, which are slow; the other rows are compared with transformers' eager model."""

LAYERS = {
    "toy": {"llama": 1, **dict.fromkeys(SHAPES, 1)},
    "small": dict.fromkeys(SHAPES, 1),
    "quick": dict.fromkeys(SHAPES, 4),
    "full": {"gpt-oss-20b-shape": 4, "deepseek-v3-shape": 4},
}
"""By size of the run: the layers of models that are not built whole. A laptop's memory holds one layer of a published shape."""

CACHES = 5
"""Of one point, held at a time."""


def asked(setup: Setup, default: str = "") -> str:
    """The model of the setup under the name that results files share; else `default`."""
    return ALIASES.get(setup.model, setup.model) or default or ONE[setup.size]


def config(setup: Setup, name: str) -> Any:
    """The config of a bundled name, with the layers of the setup. Raises InvalidInput for an unknown name."""
    name = ALIASES.get(name, name)
    return _with_layers(config_of(name), setup.layers or LAYERS.get(setup.size, {}).get(name, 0))


def _with_layers(config: Any, layers: int) -> Any:
    if layers:
        config.num_hidden_layers = layers
        if (kinds := getattr(config, "layer_types", None)) is not None:
            config.layer_types = (kinds * layers)[:layers]
    return config


def checked(name: str) -> None:
    """Raise InvalidInput unless `name` is a bundled decoder."""
    import transformers

    if type(found := config_of(ALIASES.get(name, name))) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InvalidInput("model", f"{name!r}, a {type(found).__name__}", "a decoder")


def kv_width(config: Any) -> int:
    """Numbers of the keys and values of a token in one layer. Raises AttributeError or TypeError if layers differ."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return int(2 * heads * (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads))


def fitted(setup: Setup, name: str, point: Point | None = None) -> Any:
    """As `config`, with layers halved until free memory holds the model, its caches at `point` and its widened modules.

    Raises InvalidInput: one layer is too many, or the setup names more layers than fit.
    """
    made, there = config(setup, name), memory.free(setup.device)
    if there is None:
        return made
    while (need := _needed(setup, made, point)) > there and not setup.layers and made.num_hidden_layers > 1:
        _with_layers(made, made.num_hidden_layers // 2)
    memory.refuse(f"{made.num_hidden_layers} layers of {name}", need, there)
    return made


def _needed(setup: Setup, made: Any, point: Point | None) -> int:
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made, dtype=setup.dtype)
    cached = 0
    # A config whose layers differ has no single head dim, and raises; its caches are small beside its weights.
    with contextlib.suppress(Exception):
        row = kv_width(made) * made.num_hidden_layers * setup.dtype.itemsize
        cached = 0 if point is None else CACHES * point.batch * (point.context + 32) * row
    return memory.needed(model, _wide(setup.dtype), cached)


def build(setup: Setup, name: str, seed: int = 0, point: Point | None = None) -> Any:
    """The model in evaluation mode and the setup's dtype, with the random weights (and sinks) of `seed`, as large as `fitted` says."""
    import transformers

    made = fitted(setup, name, point)
    with torch.random.fork_rng(devices=[setup.device] if setup.on_gpu else []), torch.device(setup.device):
        torch.manual_seed(seed)
        # Models with sinks have no SDPA attention.
        sdpa = getattr(transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(made)], "_supports_sdpa", False)
        attention = "sdpa" if sdpa else "eager"
        model = transformers.AutoModelForCausalLM.from_config(made, dtype=setup.dtype, attn_implementation=attention)
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("sinks"):  # initialised to zero, alike for all heads
                nn.init.normal_(parameter)
    return model.eval().requires_grad_(False)


class Kept:
    """The model of the last call, so that the cases of a suite share it and only one is in memory."""

    def __init__(self, setup: Setup, point: Point | None = None) -> None:
        self._setup, self._point, self._name, self._model = setup, point, "", None

    def __call__(self, name: str) -> Any:
        """The model of this name."""
        if name != self._name:
            self._model = None
            self._model, self._name = build(self._setup, name, point=self._point), name
        return self._model


Places = Mapping[str, Mapping[str, tuple[Point, ...]]]
"""By size of the run: the models of a suite, and the points of each."""


def over(setup: Setup, places: Places, measure: Callable[[Setup, Kept, str, Point], Iterable[Row]]) -> dict[str, Case]:
    """Every model at its points. A model named by the setup takes the first model's points if it has no points of its own."""
    here = places[setup.size]
    names = [asked(setup)] if setup.model else list(here)
    points = {name: setup.points or here.get(name, next(iter(here.values()))) for name in names}
    most = max((p for some in points.values() for p in some), key=lambda p: p.batch * p.context, default=None)
    kept = Kept(setup, most)
    return {f"{name} {point}": partial(measure, setup, kept, name, point) for name in names for point in points[name]}


def twin(model: Any) -> Any:
    """A copy of the model with the same weights, to patch one of the two."""
    return copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})


def patched(model: Any, how: str, **options: Any) -> tuple[Any, Any]:
    """(a twin, its patch). how: "" for none, "hf" over transformers' caches, "paged" over pages, with options of `patch`."""
    one = twin(model)
    return one, attnops.hf.patch(one, cache="paged" if how == "paged" else "hf", **options) if how else None


def tokens(setup: Setup, model: Any, batch: int, length: int, seed: int = 0) -> Tensor:
    """Random tokens, int64 `[batch, length]`."""
    some = torch.Generator().manual_seed(seed)
    return torch.randint(3, model.config.vocab_size, (batch, length), generator=some).to(setup.device)


def compared(
    case: str, model: Any, ways: Mapping[str, Any], prompt: Tensor, new: Tensor | None, more: Callable[[float, Way], Mapping[str, Any]]
) -> list[Row]:
    """The rows of ways to compute a model's logits, `hf_eager` among them, which gives the budget. more: as in `time_if_right`."""
    with torch.no_grad():
        want, off, allowed = expected(model, ways["hf_eager"].computed(), prompt, new)
    return with_ratios(time_if_right(case, ways, want, allowed, steps_us, off, more), "hf_eager", "hf_compiled")


Distance = Callable[[Tensor, Tensor], float]


def experts(config: Any) -> bool:
    """Is it the config of a mixture of experts?"""
    return any(getattr(config, n, None) for n in ("num_local_experts", "n_routed_experts", "num_experts"))


def distance(model: Any, eager: Tensor) -> Distance:
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


MORE, MOST = 1.5, 1 / 1.5
"""Budget over the error of transformers' eager model, since another order of sums may be that much worse by chance; and the upper bound
of that error, so that zeros, whose error is 1, exceed the budget."""


def budget(model: Any, base: float) -> float:
    """The largest allowed `distance` of logits. base: that of transformers' eager model.

    MORE * base + gain² (u + a (sqrt(E) + 4)) (4 + sqrt(L)), for L layers of width E. u, a: unit roundoff of float32, and of the float32
    in which products are summed. 4 + sqrt(L): the roundings of a layer, and one of the residual stream a layer, which add up as random
    ones do. gain: the weights' standard deviation times sqrt(E); queries and keys each grow by it, and so do their errors.
    Raises RuntimeError: the base is NaN or more than MOST.
    """
    if not base <= MOST:
        raise RuntimeError(f"transformers' own eager logits are off by {base:.3g}, want at most {MOST:.3g}: nothing can be compared")
    width, layers = model.config.hidden_size, model.config.num_hidden_layers
    u = torch.finfo(torch.float32).eps / 2
    gain = max(1.0, getattr(model.config, "initializer_range", 0.02) * width**0.5)
    return float(MORE * base + gain**2 * (u + u * (width**0.5 + 4)) * (4 + layers**0.5))


@torch.no_grad()
def expected(model: Any, eager: Tensor, prompt: Tensor, new: Tensor | None = None) -> tuple[Tensor, Distance, float]:
    """(exact logits of the first EXACT rows, the distance, its budget). eager: logits of transformers' eager model, all rows."""
    want = exactly(model, prompt[:EXACT], None if new is None else new[:EXACT])
    off = distance(model, eager)
    return want, off, budget(model, off(eager, want))


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


class Rewound:
    """Restores a transformers cache to its state at construction, mostly without copies.

    Dynamic layers replace their tensors, so the old ones are kept. Static layers write in place past the restored position; ring
    buffers of windows are copied.
    """

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.kept = [{n: self._saved(layer, v) for n, v in vars(layer).items()} for layer in cache.layers]

    @staticmethod
    def _saved(layer: Any, value: Any) -> Any:
        static = bool(getattr(layer, "is_compileable", False))
        ring = static and bool(getattr(layer, "is_sliding", False))
        return value.clone() if isinstance(value, Tensor) and (ring or (static and value.dim() == 0)) else value

    def __call__(self) -> None:
        for layer, kept in zip(self.cache.layers, self.kept, strict=True):
            for name, value in kept.items():
                now = getattr(layer, name)
                if isinstance(now, Tensor) and isinstance(value, Tensor) and getattr(layer, "is_compileable", False):
                    if now is not value:  # graphs hold its address
                        now.copy_(value)
                else:
                    setattr(layer, name, value)
