"""How each type is built: as the census makes it, as transformers' own tests do, and as a part of a
whole model.

Some types are parts of others. Only a whole model knows what their inputs are, and some are no
model of transformers by themselves.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from benchmarks.census import inputs, models, testers
from benchmarks.census.inputs import Inputs
from benchmarks.census.models import Kind, Recipe

MOST_CLASSES = 3
"""Classes of models to try with one config."""


class Whole(Protocol):
    """A model that may have the part. config: its config. classes: of models that take it."""

    @property
    def config(self) -> Any: ...

    @property
    def classes(self) -> tuple[Any, ...]: ...

    def tries(self, model: Any) -> Iterable[Inputs]:
        """Inputs of the model; it may refuse some."""


@dataclass(frozen=True)
class Own:
    """A whole model of the census's own."""

    config: Any
    classes: tuple[Any, ...]
    source: str = ""

    def tries(self, model: Any) -> Iterable[Inputs]:
        """The census's own inputs."""
        return inputs.candidates(model)


def recipes(kind: Kind, tests: bool = False) -> Iterator[Callable[[], Recipe]]:
    """What makes the recipes of a type, those of the census first.

    tests: take those of transformers' tests, too, of a folder that is open.
    """
    yield lambda: models.own(kind)
    config = models.config_class(kind)
    family = testers.family_of(config)
    wholes = []
    for made in testers.made(family) if tests else ():
        if type(made.config) is config:
            for cls in _classes(kind, made):
                spread = partial(testers.spread, made.config)
                yield partial(Recipe, cls, spread, made.inputs_for(cls), testers.SOURCE)
        wholes.append(made)
    for whole in wholes:
        yield from _parts(kind, config, whole, testers.SOURCE)
    for own in _own_wholes(kind, family):
        yield from _parts(kind, config, own, "")


def _classes(kind: Kind, made: testers.Made) -> list[Any]:
    """The classes to try with what tests have made, the type's own first."""
    try:
        first = [models.class_of(kind)]
    except ValueError:
        first = []
    tested = [cls for cls in made.classes if cls not in first]
    return [*(cls for cls in first if cls in made.classes), *tested, *first][:MOST_CLASSES]


def _own_wholes(kind: Kind, family: str) -> Iterator[Own]:
    """The other types of a family, as the census builds them."""
    for other in models.kinds().values():
        if other.name != kind.name and testers.family_of(models.config_class(other)) == family:
            with contextlib.suppress(Exception):
                yield Own(models.config_of(other), (models.class_of(other),))


# Parts --------------------------------------------------------------------------------------------


def _parts(kind: Kind, config: type, whole: Whole, source: str) -> Iterator[Callable[[], Recipe]]:
    """Recipes of a type that is a part of this model."""
    found = [part for part in inputs.parts(whole.config) if type(part) is config]
    if not found or type(whole.config) is config:
        return
    for cls in whole.classes[:MOST_CLASSES]:
        yield partial(_part, kind, found[0], whole, cls, source)


def _part(kind: Kind, config: Any, whole: Whole, cls: Any, source: str) -> Recipe:
    """A part with what a whole model of this class hands to it. Raises ValueError: it has no such
    part."""
    try:
        part = models.class_of(kind)
    except (ValueError, ImportError):
        part = None
    stem = type(config).__name__.removesuffix("Config")

    def is_it(module: Any) -> bool:
        if part is not None:
            return type(module) is part
        return (
            type(getattr(module, "config", None)) is type(config) or type(module).__name__ == stem
        )

    recipe = Recipe(cls, partial(testers.spread, whole.config), source=source)
    path, given = _handed(models.build(recipe), whole, is_it)
    if part is None:
        return Recipe(cls, recipe.config, given, source, path)
    return Recipe(part, partial(testers.spread, config), given, source)


def _handed(model: Any, whole: Whole, wanted: Callable[[Any], bool]) -> tuple[str, Inputs | None]:
    """The path of the first module of this kind in the model, and its inputs, where any reach
    it."""
    paths = [path for path, module in model.named_modules() if path and wanted(module)]
    if not paths:
        raise ValueError(f"no module of {type(model).__name__} has its config")
    seen: list[Inputs] = []

    def keep(module: Any, args: Any, kwargs: Any) -> None:
        signature = inspect.signature(type(module).forward)
        bound = signature.bind(module, *args, **kwargs).arguments
        named = {n: x for n, x in bound.items() if n not in ("self", "kwargs")} | bound.get(
            "kwargs", {}
        )
        asked = {
            n
            for n, parameter in signature.parameters.items()
            if parameter.default is parameter.empty
        }
        kept = {n: x for n, x in named.items() if _is_input(n, x) or (x is None and n in asked)}
        seen.append({n: _seeing(copy.deepcopy(x)) for n, x in kept.items()})

    model.get_submodule(paths[0]).register_forward_pre_hook(keep, with_kwargs=True)
    for given in whole.tries(model):
        with contextlib.suppress(Exception), torch.no_grad():
            model(**given)
        if seen:
            break
    return paths[0], seen[0] if seen else None


def _is_input(name: str, value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(_is_input(name, x) for x in value)
    return name not in testers.NO_INPUTS and isinstance(value, (torch.Tensor, bool, int, float))


def _seeing(value: Any) -> Any:
    """A float mask whose rows that see no key see all: what such a row gives is not specified, see
    `attnops.attention`."""
    if not (isinstance(value, torch.Tensor) and value.dim() == 4 and value.is_floating_point()):
        return value
    hidden = (value <= torch.finfo(value.dtype).min).all(-1, keepdim=True)
    return value.masked_fill(hidden, 0.0)
