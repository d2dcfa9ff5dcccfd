"""Sites of attention in a module that is no transformers model, and the handle that switches them
and switches them back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from attnops.adapters.handle import MARK, PATCHING, Handle
from attnops.adapters.replicas import place, take_back
from attnops.adapters.report import PATCHED, Report, Row, Verification
from attnops.adapters.served import put_in_place, served
from attnops.core import builds
from attnops.core.errors import PatchError, fail, one_line
from attnops.nn.class_swap import Swap


@dataclass(frozen=True)
class Change:
    """A change of one object.

    target: a module, or the object to which it leaves its attention. into: a subclass of the
    target's class that takes its place, the name of the method in which torch's
    scaled_dot_product_attention is to be ours, or None. attributes: to set on the target; one at
    least, because Dynamo of torch 2.11 looks again at the class of a module only once the module's
    dict has changed. note: for the report.
    """

    target: Any
    into: type | str | None = None
    attributes: Mapping[str, Any] = field(default_factory=lambda: {"_attnops_switched": True})
    note: str = ""

    def swap(self, kernel: str | None) -> Swap:
        """Put it in force, until the result is undone."""
        if isinstance(self.into, str):
            return Swap(self.target, served, self.into, kernel, attributes=self.attributes)
        made = (_as_it_is,) if self.into is None else (put_in_place, self.into)
        return Swap(self.target, *made, attributes=self.attributes)


def _as_it_is(own: Any) -> Any:
    return own


@dataclass(frozen=True)
class Site:
    """An attention module by its name, with the change that switches it, or the reason why it keeps
    its own attention."""

    path: str
    module: nn.Module
    change: Change | str


class Swapped(Handle):
    """A module whose attention modules call attnops. Made by `attnops.patch`; also a context
    manager that unpatches at its end.

    Parameters, buffers, hooks and the state_dict stay as they are: attention modules become objects
    of a subclass of their class.
    """

    def __init__(self, model: nn.Module, options: Mapping[str, Any], sites: list[Site]) -> None:
        self._held = model
        self.options = options
        self.kernel = options["kernel"]
        self.sites = sites
        self.active = False
        self._rows = tuple(
            Row(
                site.path,
                type(site.module).__name__,
                f"skipped: {site.change}" if isinstance(site.change, str) else PATCHED,
            )
            for site in sites
        )
        self.inner: list[Handle] = []  # of parts
        self._last: Report | None = None
        self.changes = [site.change for site in sites if isinstance(site.change, Change)]
        self._switch()

    def _switch(self) -> None:
        self._swaps: list[Swap] = []
        place(self.model, MARK, self)
        self.active = True
        for change in self.changes:
            try:
                self._swaps.append(change.swap(self.kernel))
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
        for swap in self._swaps:
            swap.undo()
        for handle in self.inner:
            handle.unpatch()
        take_back(self.model, MARK, self)
        self.active = False

    def _let_go(self) -> None:
        super()._let_go()
        for held in (self.sites, self.inner, self.changes, self._swaps):
            held.clear()

    def report(self) -> Report:
        """Every attention module with its status. `print` it, give it to rich, or take
        `Report.to_dict()`.

        After `unpatch()` it is that of the moment of `unpatch()`.
        """
        return self._last or self._report()

    def _report(self) -> Report:
        notes = [
            "in training mode, layers with attention dropout above 0 are computed by torch",
            *(c.note for c in self.changes if c.note),
            *builds.notes(),
        ]
        return Report(
            type(self.model).__name__, self.kernel, self._rows, tuple(dict.fromkeys(notes))
        )

    def verify(
        self, *inputs: Any, tolerance: float | None = None, strict: bool = True, **named: Any
    ) -> Verification:
        """Run the model on these inputs as patched and as it was, in eval mode, and compare.

        Args:
            inputs, named: the model's own arguments.
            tolerance: on the largest difference over the largest value of its own attention;
                default by dtype (float32: 2e-5).
            strict: raise when the figures are worse than that.

        Raises PatchError when the model is not patched, when a module has another class, forward or
        attribute than `patch` left, when the output is missing, or (strict) when the comparison
        fails.
        """
        for swap in self._swaps:
            if not swap.is_whole() or "forward" in vars(swap.target):
                name = type(swap.target).__name__
                fail(PatchError, f"verify: {name} has changed since patch, call verify before that")
        return self._verified((inputs, named), tolerance, strict, "its own attention")

    @contextmanager
    def _stock(self) -> Iterator[None]:
        self._switch_back()
        try:
            yield
        finally:
            self._switch()
