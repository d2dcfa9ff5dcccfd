"""Sites of attention in a module that is no transformers model, and the handle that switches them and switches them back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from attnops.adapters.handle import MARK, PATCHING, Handle
from attnops.adapters.replicas import place, take_back
from attnops.adapters.report import PATCHED, Report, Row, Verification, compare, output_of
from attnops.adapters.served import put_in_place, served, taken_out
from attnops.core.errors import PatchError, fail, one_line


@dataclass(frozen=True)
class Change:
    """A change of one object.

    target: a module, or the object to which it leaves its attention. into: a subclass of the target's class that takes its place, the
    name of the method in which torch's scaled_dot_product_attention is to be ours, or None. attributes: to set on the target; one at
    least, because Dynamo of torch 2.11 looks again at the class of a module only once the module's dict has changed. note: for the report.
    """

    target: Any
    into: type | str | None = None
    attributes: Mapping[str, Any] = field(default_factory=lambda: {"_attnops_switched": True})
    note: str = ""

    def cls(self, own: type, kernel: str | None) -> type:
        """The class of the target in place of `own`."""
        if self.into is None:
            return own
        if isinstance(self.into, str):
            return served(own, self.into, kernel)
        return put_in_place(self.into, own)


@dataclass(frozen=True)
class Site:
    """An attention module by its name, with the change that switches it, or the reason why it keeps its own attention."""

    path: str
    module: nn.Module
    change: Change | str


@dataclass(frozen=True)
class _Before:
    cls: type
    attributes: Mapping[str, Any]


class Swapped(Handle):
    """A module whose attention modules call attnops. Made by `attnops.patch`; also a context manager that unpatches at its end.

    Parameters, buffers, hooks and the state_dict stay as they are: attention modules become objects of a subclass of their class.
    """

    def __init__(self, model: nn.Module, options: Mapping[str, Any], sites: list[Site]) -> None:
        self._held, self.options, self.kernel, self.sites, self.active = model, options, options["kernel"], sites, False
        self._rows = tuple(
            Row(site.path, type(site.module).__name__, f"skipped: {site.change}" if isinstance(site.change, str) else PATCHED)
            for site in sites
        )
        self.inner: list[Handle] = []  # of parts
        self._last: Report | None = None
        self.changes = [site.change for site in sites if isinstance(site.change, Change)]
        self._switch()

    def _switch(self) -> None:
        self._done: list[tuple[Change, _Before]] = []
        place(self.model, MARK, self)
        self.active = True
        try:
            for change in self.changes:
                own = vars(change.target)
                attributes = {name: own[name] for name in change.attributes if name in own}
                before = _Before(type(change.target), attributes)
                ours = change.cls(before.cls, self.kernel)
                self._done.append((change, before))
                change.target.__class__ = ours
                own.update(change.attributes)
        except Exception as error:  # of a class that has no subclasses
            self.unpatch()
            cls = type(change.target).__name__
            raise PatchError(f"patch: {cls} takes no other class: {one_line(error)}") from error

    def unpatch(self) -> None:
        """Give the model back as it was. Idempotent.

        An attribute that has changed since then stays. So does a class; one that was made over
        attnops' class, as fully_shard and parametrisations do it, is made anew over the module's
        own. An object of a class that cannot be made anew stays patched.
        """
        with PATCHING:
            if self.active:
                self._switch_back()
                self._last = self._report()
                self._let_go()

    def _switch_back(self) -> None:
        for change, before in self._done:
            self._give_back(change, before)
        for handle in self.inner:
            handle.unpatch()
        take_back(self.model, MARK, self)
        self.active = False

    def _let_go(self) -> None:
        super()._let_go()
        for held in (self.sites, self.inner, self.changes, self._done):
            held.clear()

    def _give_back(self, change: Change, before: _Before) -> None:
        target, own = change.target, vars(change.target)
        now: Any = type(target)
        cls = taken_out(now, change.cls(before.cls, self.kernel), before.cls)
        if cls is None:
            return
        if cls is not now:
            target.__class__ = cls
        for name, value in change.attributes.items():
            if name in own and own[name] is value:
                del own[name]
                if name in before.attributes:
                    own[name] = before.attributes[name]

    def report(self) -> Report:
        """Every attention module with its status. `print` it, give it to rich, or take `Report.to_dict()`.

        After `unpatch()` it is that of the moment of `unpatch()`.
        """
        return self._last or self._report()

    def _report(self) -> Report:
        notes = ["in training mode, layers with attention dropout above 0 are computed by torch", *(c.note for c in self.changes if c.note)]
        return Report(type(self.model).__name__, self.kernel, self._rows, tuple(dict.fromkeys(notes)))

    def verify(self, *inputs: Any, tolerance: float | None = None, strict: bool = True, **named: Any) -> Verification:
        """Run the model on these inputs as patched and as it was, in eval mode, and compare.

        Args:
            inputs, named: the model's own arguments.
            tolerance: on the largest difference over the largest value of its own attention; default by dtype (float32: 2e-5).
            strict: raise when the figures are worse than that.

        Raises PatchError when the model is not patched, when a module has another class, forward or attribute than `patch` left, when the
        output is missing, or (strict) when the comparison fails.
        """
        if not self.active:
            fail(PatchError, "verify: the model is not patched any more")
        for change, before in self._done:
            target = change.target
            alike = all(vars(target).get(name) is value for name, value in change.attributes.items())
            made = type(target) is change.cls(before.cls, self.kernel)
            if not alike or not made or "forward" in vars(target):
                fail(
                    PatchError,
                    f"verify: {type(target).__name__} has changed since patch, call verify before that",
                )
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad():
                name, ours = output_of(self._run(inputs, named))
                ours = ours.clone()  # the other run may write into the same memory
                self._switch_back()
                _, own = output_of(self._run(inputs, named))
        finally:
            if not self.active:
                self._switch()
            for module, training in modes:
                module.training = training
        figures = compare(ours, own, None, name, tolerance, "its own attention")
        if strict and not figures.passed:
            fail(PatchError, f"verify {figures}")
        return figures

    def _run(self, inputs: Any, named: Any) -> Any:
        return self.model(*inputs, **named)
