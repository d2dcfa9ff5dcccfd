"""What a call of `generate()` asks about its model before it gets pages."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from attnops.core.record import name, need
from attnops.hf.cache import support
from attnops.hf.generation import look_again, running_generation
from attnops.hf.models.methods import Tree
from attnops.hf.steps.model_state import Glance, holds
from attnops.hf.steps.reasons import callers_hooks


@dataclass(eq=False)
class Facts:
    """What follows from the state of a model.

    hooks: of `callers_hooks`. training: modules in training mode.
    relisted: which list of layers has others than at patch(); "" for none.
    elsewhere: an attention to which a layer was switched after the patch, and which does not know
    pages.
    place: of `ModelFacts.place`, once it was asked for.
    """

    hooks: list[tuple[Any, Any]]
    training: list[nn.Module]
    relisted: str
    elsewhere: str | None
    place: tuple[torch.device, torch.dtype] | None = None


class ModelFacts:
    """A model whose `modules` have pages. Facts are kept as long as nothing has changed since a
    glance at the model.

    lists: of `lists_of`. implementation: the attention that knows pages.
    """

    def __init__(
        self,
        owner: Any,
        modules: Collection[Any],
        lists: Mapping[str, int],
        implementation: str,
    ) -> None:
        self._owner, self._modules, self._lists = owner, modules, lists
        self._implementation = implementation
        self._tree = Tree(owner)
        self._known: tuple[weakref.ref[Glance], Facts] | None = None

    def facts(self, glance: Glance | None) -> Facts:
        """As the model is now. glance: the last one, or None.

        Where it still holds, the `generate()` that runs looks at the model no more before its
        prompt.
        """
        if glance is None or not holds(glance):
            look_again()
            return self._found()
        running = running_generation()
        if running is not None:
            running.looked = glance
        if self._known is None or self._known[0]() is not glance:
            self._known = weakref.ref(glance), self._found()
        return self._known[1]

    def _found(self) -> Facts:
        within = self._tree.walk()
        relisted = support.relisted(self._owner, self._lists)
        return Facts(callers_hooks(within.hooked), within.training, relisted, self._elsewhere())

    def _elsewhere(self) -> str | None:
        # Layers share configs, whose attributes are slow.
        configs = {id(config): config for config in (module.config for module in self._modules)}
        names = (config._attn_implementation_internal for config in configs.values())
        return next((str(name) for name in names if name != self._implementation), None)

    def place(self, facts: Facts | None = None) -> tuple[torch.device, torch.dtype]:
        """The device and the dtype of all pages. facts: of now. Raises InvalidInput where layers
        differ."""
        if facts is not None and facts.place is not None:
            return facts.place
        places = {support.where(module, self._owner) for module in self._modules}
        got = ", ".join(sorted(f"{name(dtype)} on {device}" for device, dtype in places))
        want = "one dtype and one device for all pages"
        need(len(places) == 1, "attention layers", got, want)
        [place] = places
        if facts is not None:
            facts.place = place
        return place
