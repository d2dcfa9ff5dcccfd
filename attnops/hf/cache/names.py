"""The names under which transformers hands a cache around. No other module of attnops knows them.

transformers has one name for the argument of models and of their layers, for the entry among the
arguments that `generate()` keeps for its model, and for the field of results: `past_key_values`,
and from 5.24 on `cache`. 5.24 takes the old name from callers, too, and warns of it. Layers of
GPT-NeoX and of its kin have a name of their own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from transformers.modeling_outputs import CausalLMOutputWithPast

from attnops.core.errors import InvalidInput, fail

_OLD, _NEW = "past_key_values", "cache"

NAME = _NEW if any(field.name == _NEW for field in fields(CausalLMOutputWithPast)) else _OLD
"""The name that this transformers uses."""

_BY_ITS_NAME = tuple(dict.fromkeys((NAME, _OLD)))
_OF_LAYERS = frozenset((*_BY_ITS_NAME, "past_key_value", "layer_past"))


@functools.cache
def _parameters(forward: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


def layer_takes_cache(cls: type) -> bool:
    """Is a cache among the arguments of an attention module of this class?"""
    return not _OF_LAYERS.isdisjoint(_parameters(cls.forward))  # type: ignore[attr-defined]


def model_takes_cache(cls: type) -> bool:
    """Is a cache among the arguments of a model of this class?"""
    return not _parameters(cls.forward).isdisjoint(_BY_ITS_NAME)  # type: ignore[attr-defined]


def argument_of(model: Any) -> str:
    """The name of a model's argument for its cache. A class of the user's own may keep the old
    one."""
    own = _parameters(type(model).forward)
    return _OLD if _OLD in own and NAME not in own else NAME


def argument(model: Any, cache: Any) -> dict[str, Any]:
    """The cache as an argument of this model, by its name."""
    return {argument_of(model): cache}


def renamed(arguments: dict[str, Any], name: str = NAME) -> dict[str, Any]:
    """Arguments with the cache under this name. Where a caller gives two caches, transformers says
    which one counts."""
    given = [other for other in _BY_ITS_NAME if other in arguments]
    if not given or name in given:
        return arguments
    return {name if key in given else key: value for key, value in arguments.items()}


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """The cache among the arguments of a model or of `generate()`; None without one."""
    return next((arguments[name] for name in _BY_ITS_NAME if arguments.get(name) is not None), None)


def named(cache: Any) -> dict[str, Any]:
    """The cache as a field of a result, or as an argument of `generate()`, by its name."""
    return {NAME: cache}


def cache_of(result: Any) -> Any:
    """The cache in the result of a model or of `generate()`; None without one."""
    # The attributes themselves: 5.24 logs a warning where a result is asked for the old name.
    return cache_in(getattr(result, "__dict__", {}))


class Returned:
    """In place of pages that were taken back: any use raises InvalidInput.

    got, want: of the error.
    """

    def __init__(self, got: str, want: str) -> None:
        self._got, self._want = got, want

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        fail(InvalidInput, NAME, self._got, self._want)
