"""Hugging Face models with random weights, built on the device, and the caches they are measured over."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnops.bench import memory
from attnops.bench.report import Case
from attnops.bench.setup import Point, Setup
from attnops.bench.verdict import Row, relative_error
from attnops.cli.models import config_of
from attnops.cli.shapes import SHAPES
from attnops.errors import InvalidInput

ALIASES = {"llama-8b-shape": "llama-3-8b-shape"}

EXACT = 2
"""Rows that are compared with what is exact, which takes its time; the others are compared with transformers' eager model."""

LAYERS = {
    "toy": {"llama": 1, **dict.fromkeys(SHAPES, 1)},
    "small": dict.fromkeys(SHAPES, 1),
    "quick": dict.fromkeys(SHAPES, 4),
    "full": {"gpt-oss-20b-shape": 4, "deepseek-v3-shape": 4},
}
"""By size of the run: how many layers are built, where not all are. One of a published shape is what a laptop's memory holds."""


def asked(setup: Setup, default: str) -> str:
    """The model that the setup asks for by its own name, so that results of it are found beside others'; else `default`."""
    return ALIASES.get(setup.model, setup.model) or default


def config(setup: Setup, name: str) -> Any:
    """The config of a bundled name, with as many layers as the setup has. Raises InvalidInput for an unknown name."""
    name = ALIASES.get(name, name)
    found = config_of(name)
    layers = setup.layers or LAYERS.get(setup.size, {}).get(name, 0)
    if layers:
        _set_layers(found, layers)
    return found


def _set_layers(config: Any, layers: int) -> None:
    kinds = getattr(config, "layer_types", None)
    config.num_hidden_layers = layers
    if kinds is not None:
        config.layer_types = (kinds * layers)[:layers]


def checked(name: str) -> None:
    """Raises InvalidInput: no such model, or none that gives a next token."""
    import transformers

    if type(found := config_of(ALIASES.get(name, name))) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InvalidInput("model", f"{name!r}, a {type(found).__name__}", "a decoder")


def fitted(setup: Setup, name: str, point: Point | None = None) -> Any:
    """As `config`, with fewer layers where the memory that is free does not hold them, its caches at `point`, and what it is compared with.

    The rows say how many. Raises InvalidInput: one layer is too many, or the setup asks for more than fit.
    """
    made, there = config(setup, name), memory.free(setup.device)
    if there is None:
        return made
    need = _needed(setup, made, point)
    while need > there and not setup.layers and made.num_hidden_layers > 1:
        _set_layers(made, made.num_hidden_layers // 2)
        need = _needed(setup, made, point)
    memory.refuse(f"{made.num_hidden_layers} layers of {name}", need, there)
    return made


def _needed(setup: Setup, made: Any, point: Point | None) -> int:
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made, dtype=setup.dtype)
    cached = 0
    # Of a model whose layers differ transformers has no one head dim to give, and raises; its caches are small beside its weights.
    with contextlib.suppress(Exception):
        heads = getattr(made, "num_key_value_heads", None) or made.num_attention_heads
        dim = getattr(made, "head_dim", None) or made.hidden_size // made.num_attention_heads
        row = 2 * heads * dim * made.num_hidden_layers * setup.dtype.itemsize
        cached = 0 if point is None else CACHES * point.batch * (point.context + 32) * row
    return memory.needed(model, _wide(setup.dtype), cached)


CACHES = 5
"""Of one point, that ways of making a step hold at a time."""


def build(setup: Setup, name: str, seed: int = 0, point: Point | None = None) -> Any:
    """The model in evaluation mode, in the setup's dtype, with the weights of `seed`; sinks are random, too.

    It has as many layers as memory holds, see `fitted`.
    """
    import transformers

    made = fitted(setup, name, point)
    with torch.random.fork_rng(devices=[setup.device] if setup.on_gpu else []), torch.device(setup.device):
        torch.manual_seed(seed)
        attention = "sdpa" if _sdpa(made) else "eager"
        model = transformers.AutoModelForCausalLM.from_config(made, dtype=setup.dtype, attn_implementation=attention)
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("sinks"):  # at zero they are the same for every head
                torch.nn.init.normal_(parameter)
    return model.eval().requires_grad_(False)


def _sdpa(made: Any) -> bool:
    """Does transformers offer its SDPA attention for this model? It has no sinks."""
    import transformers

    cls = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(made)]
    return bool(getattr(cls, "_supports_sdpa", False))


class Kept:
    """The model last asked for, so that the cases of a suite share it and no two lie in memory."""

    def __init__(self, setup: Setup, point: Point | None = None) -> None:
        self._setup, self._point, self._name, self._model = setup, point, "", None

    def __call__(self, name: str) -> Any:
        """The model of this name."""
        if name != self._name:
            self._model = None
            self._model, self._name = build(self._setup, name, point=self._point), name
        return self._model


Places = Mapping[str, Mapping[str, tuple[Point, ...]]]
"""By size of the run: the models of a suite, and at which points each is measured."""


def over(setup: Setup, places: Places, measure: Callable[[Setup, Kept, str, Point], Iterable[Row]]) -> dict[str, Case]:
    """Cases of a suite: every model at its points. A model that the setup asks for has those of the first, if none of its own."""
    here = places[setup.size]
    names = [asked(setup, "")] if setup.model else list(here)
    points = {name: setup.points or here.get(name, next(iter(here.values()))) for name in names}
    most = max((p for some in points.values() for p in some), key=lambda p: p.batch * p.context, default=None)
    kept = Kept(setup, most)
    return {f"{name} {point}": partial(measure, setup, kept, name, point) for name in names for point in points[name]}


def twin(model: Any) -> Any:
    """The model once more over the same weights, so that one can be patched and the other not."""
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def tokens(setup: Setup, model: Any, batch: int, length: int, seed: int = 0) -> Tensor:
    """Random tokens, int64 `[batch, length]`."""
    some = torch.Generator().manual_seed(seed)
    return torch.randint(3, model.config.vocab_size, (batch, length), generator=some).to(setup.device)


def distance(model: Any, eager: Tensor) -> Callable[[Tensor, Tensor], float]:
    """Of logits from exact ones of the first rows, and half that of the other rows from `eager`, which are off as far themselves.

    Of a model with experts that of the median row: where two experts are all but equal, rounding chooses.
    """
    experts = any(getattr(model.config, n, 0) for n in ("num_local_experts", "n_routed_experts", "num_experts"))
    quantile = 0.5 if experts else 1.0

    def off(got: Tensor, want: Tensor) -> float:
        rows = want.shape[0]
        if got.shape != eager.shape:
            return float("inf")
        return max(relative_error(got[:rows], want, quantile), relative_error(got[rows:], eager[rows:], quantile) / 2)

    return off


MORE = 1.5
"""Times the error of the base: another order of sums, or fewer roundings where kernels are fused, may be so much further off by chance."""

MOST = 1 / MORE
"""Of the base's error, so that zeros, which are off by 1, are wrong."""


def budget(model: Any, base: float) -> float:
    """How far logits may lie from those of `exactly`, as `distance` has it. base: how far those of transformers' eager model do.

    MORE * base + gain² (u + a (sqrt(E) + 4)) (4 + sqrt(L)), for L layers of width E. u, a: unit roundoff of float32, and of the float32 in
    which products are added up. 4 + sqrt(L): the roundings of a layer, and one more of the residual stream a layer, which add up as
    random ones do. gain: the weights' standard deviation times sqrt(E); queries and keys each grow by it, and so does what they are off by.
    Raises RuntimeError: the base is no number, or more than MOST, and nothing can be compared with it.
    """
    if not base <= MOST:
        raise RuntimeError(f"transformers' own eager logits are off by {base:.3g}, want at most {MOST:.3g}: nothing can be compared")
    width, layers = model.config.hidden_size, model.config.num_hidden_layers
    u = torch.finfo(torch.float32).eps / 2
    gain = max(1.0, getattr(model.config, "initializer_range", 0.02) * width**0.5)
    return float(MORE * base + gain**2 * (u + u * (width**0.5 + 4)) * (4 + layers**0.5))


LARGE = 1 << 20
"""Numbers of a weight that is not copied."""


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float32 else torch.float32


def widened(model: Any, large: int = LARGE) -> Any:
    """The model in a wider dtype. Small weights are copies; a module's large ones are widened when it is called, dropped when it returns.

    Of a large embedding the rows that it picks are widened.
    """
    wide, one = _wide(model.dtype), twin(model)

    def widen(x: Tensor | None) -> Tensor | None:
        return x.to(wide) if x is not None and x.dtype.is_floating_point else x

    def wider(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        return torch.nn.Parameter(parameter.to(wide), requires_grad=False)

    def around(module: torch.nn.Module, narrow: dict[str, torch.nn.Parameter]) -> None:
        def before(module: torch.nn.Module, given: Any) -> None:
            module._parameters.update({name: wider(value) for name, value in narrow.items()})

        def after(module: torch.nn.Module, given: Any, returned: Any) -> None:
            module._parameters.update(narrow)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    for module in list(one.modules()):
        for name, buffer in module._buffers.items():
            module._buffers[name] = widen(buffer)
        here = {name: p for name, p in module._parameters.items() if p is not None}
        module._parameters.update({name: wider(p) for name, p in here.items() if p.numel() <= large})
        if not (narrow := {name: p for name, p in here.items() if p.numel() > large}):
            continue
        if isinstance(module, torch.nn.Embedding):
            module.register_forward_hook(lambda module, given, returned: returned.to(wide))
        else:
            around(module, narrow)
    return one


@torch.no_grad()
def exactly(model: Any, prompt: Tensor, new: Tensor | None = None) -> Tensor:
    """Logits of a step for every token of `new` `[B, N]` behind `prompt`; None: of the prompt's last token. `[B, N or 1, V]`.

    By transformers' own model in float64, where this one is of float32, else in float32, each module widened while it runs: a whole copy
    of a large model is more than a machine may have.
    """
    from transformers import DynamicCache

    wide = widened(model)
    if callable(choose := getattr(wide, "set_experts_implementation", None)):  # grouped products have no float64
        choose("eager")
    cache = DynamicCache(config=wide.config)
    found = [wide(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1).logits]
    if new is None:
        only: Tensor = found[0]
        return only
    return torch.cat([wide(new[:, at : at + 1], past_key_values=cache, use_cache=True).logits for at in range(new.shape[1])], 1)


class Rewound:
    """A transformers cache that is put back to where it stood when this was made, without being copied.

    Dynamic layers make new tensors, so that the old are kept. Static ones are written in place behind the position that is put back;
    those of a window are a ring, and are copied.
    """

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.kept = [{n: self._saved(layer, n, v) for n, v in vars(layer).items()} for layer in cache.layers]

    @staticmethod
    def _saved(layer: Any, name: str, value: Any) -> Any:
        fixed = bool(getattr(layer, "is_compileable", False))
        ring = fixed and bool(getattr(layer, "is_sliding", False))
        if isinstance(value, Tensor) and (ring or (fixed and value.dim() == 0)):
            return value.clone()
        return value

    def __call__(self) -> None:
        for layer, kept in zip(self.cache.layers, self.kept, strict=True):
            for name, value in kept.items():
                now = getattr(layer, name)
                if isinstance(now, Tensor) and isinstance(value, Tensor) and getattr(layer, "is_compileable", False):
                    if now is not value:  # its address is known to graphs
                        now.copy_(value)
                else:
                    setattr(layer, name, value)
