"""Hugging Face models with random weights, built on the device, and the caches they are measured over."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnops.bench.setup import Setup
from attnops.bench.verdict import relative_error
from attnops.cli.models import config_of
from attnops.cli.shapes import SHAPES

ALIASES = {"llama-8b-shape": "llama-3-8b-shape"}

LAYERS = {
    "toy": {"llama": 1, **dict.fromkeys(SHAPES, 1)},
    "small": dict.fromkeys(SHAPES, 1),
    "quick": dict.fromkeys(SHAPES, 4),
    "full": {"gpt-oss-20b-shape": 8, "deepseek-v3-shape": 4},
}
"""By size of the run: how many layers are built, where not all are. One of a published shape is what a laptop's memory holds."""

def config(setup: Setup, name: str) -> Any:
    """The config of a bundled name, with as many layers as the setup has. Raises InvalidInput for an unknown name."""
    name = ALIASES.get(name, name)
    found = config_of(name)
    layers = setup.layers or LAYERS.get(setup.size, {}).get(name, 0)
    if layers:
        kinds = getattr(found, "layer_types", None)
        found.num_hidden_layers = layers
        if kinds is not None:
            found.layer_types = (kinds * layers)[:layers]
    return found


def checked(name: str) -> None:
    """Raises InvalidInput: no such model."""
    config_of(ALIASES.get(name, name))


def build(setup: Setup, name: str, seed: int = 0) -> Any:
    """The model in evaluation mode, in the setup's dtype, with the weights of `seed`; sinks are random, too."""
    import transformers

    made = config(setup, name)
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

    def __init__(self, setup: Setup) -> None:
        self._setup, self._name, self._model = setup, "", None

    def __call__(self, name: str) -> Any:
        """The model of this name."""
        if name != self._name:
            self._model = None
            self._model, self._name = build(self._setup, name), name
        return self._model


def twin(model: Any) -> Any:
    """The model once more over the same weights, so that one can be patched and the other not."""
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def tokens(setup: Setup, model: Any, batch: int, length: int, seed: int = 0) -> Tensor:
    """Random tokens, int64 `[batch, length]`."""
    some = torch.Generator().manual_seed(seed)
    return torch.randint(3, model.config.vocab_size, (batch, length), generator=some).to(setup.device)


def distance(model: Any) -> Callable[[Tensor, Tensor], float]:
    """Of two logits. Of a model with experts that of the median row: where two experts are all but equal, rounding chooses."""
    experts = any(getattr(model.config, n, 0) for n in ("num_local_experts", "n_routed_experts", "num_experts"))
    return lambda got, want: relative_error(got, want, 0.5 if experts else 1.0)


def budget(model: Any) -> float:
    """How far logits may lie apart, as `distance` has it.

    gain² (u + a (sqrt(E) + 4)) (4 + sqrt(L)), for L layers of width E. u, a: unit roundoff of the dtype, and of the float32 in which
    products are added up. 4 + sqrt(L): the roundings of a layer, and one more of the residual stream a layer, which add up as random
    ones do. gain: the weights' standard deviation times sqrt(E); queries and keys each grow by it, and so does what they are off by.
    Bfloat16 models of 4 to 16 layers were seen at half of it, and at twice where attention was 5% off.
    """
    width, layers = model.config.hidden_size, model.config.num_hidden_layers
    u, a = (torch.finfo(dtype).eps / 2 for dtype in (model.dtype, torch.float32))
    gain = max(1.0, getattr(model.config, "initializer_range", 0.02) * width**0.5)
    return float(gain**2 * (u + a * (width**0.5 + 4)) * (4 + layers**0.5))


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
