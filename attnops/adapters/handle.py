"""The handle that `attnops.patch` returns for every kind of model."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from attnops.adapters.report import Report, Verification, compare, evaluating, output_of
from attnops.core.errors import PatchError, fail

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Self

    from attnops.graphs import Graphed, Report as GraphReport
    from attnops.graphs.graphed import Progress
    from attnops.hf.cache.paged_cache import PagedModelCache
    from attnops.hf.report import Took

MARK = "_attnops"
"""The attribute by which a patched model holds its handle."""

PATCHING = threading.RLock()
"""Held while a model is patched or unpatched: what both write lies in the model's modules, its
configs and its class."""


def refuse_other_options(asked: Mapping[str, Any], held: Mapping[str, Any]) -> None:
    """Raise PatchError, with the options that differ, unless a patched model is asked for the
    options that it has, `held`."""
    others = [field for field, value in asked.items() if value != held[field]]
    if others:
        got, has = (
            ", ".join(f"{field}={_shown(options[field])}" for field in others)
            for options in (asked, held)
        )
        want = "call unpatch() on its handle first, or patch() with the options that it has"
        fail(PatchError, f"patch: got {got} for a model that is patched with {has}; {want}")


def refuse_nothing(name: str, reasons: Iterable[tuple[Any, object]]) -> NoReturn:
    """Raise PatchError for a model of this class name without a module to patch. reasons: each
    attention module, and why not."""
    lines = dict.fromkeys(f"{type(module).__name__}: {why}" for module, why in reasons)
    head = f"patch: nothing to patch in {name}"
    fail(
        PatchError, "\n  ".join([head, *lines]) if lines else f"{head}: it has no attention module"
    )


def _shown(value: Any) -> str:
    if value is None or isinstance(value, (str, int, float)):
        return repr(value)
    named: str = getattr(value, "__name__", f"{type(value).__name__} at {id(value):#x}")
    return named


class Handle(ABC):
    """A patched model, and the way back; also a context manager that unpatches at its end.

    active: is the model patched? False after `unpatch()`, when the handle holds the model no
    longer.
    """

    active: bool
    _held: Any

    @property
    def model(self) -> Any:
        """As it was given to `patch`. None where `unpatch()` left no other reference to it."""
        return self._held() if isinstance(self._held, weakref.ref) else self._held

    def _let_go(self) -> None:
        """Keep only a weak reference to the model."""
        self._held = weakref.ref(self._held)

    @abstractmethod
    def unpatch(self) -> None:
        """Give the model back as it was. Idempotent."""

    @abstractmethod
    def report(self) -> Report:
        """Every attention module with its status. `print` it, give it to rich, or take
        `Report.to_dict()`."""

    @abstractmethod
    def verify(self, *inputs: Any, **named: Any) -> Verification:
        """Run the model on these inputs as patched and with its own attention, and compare.

        Args:
            inputs, named: the model's own arguments; also `tolerance`, on the relative difference,
                and `strict`, False to raise no error where the figures are worse than that.

        Raises PatchError when the comparison cannot be made or fails.
        """

    def _verified(
        self,
        given: tuple[Any, Any],
        tolerance: float | None,
        strict: bool,
        against: str,
        visible: Tensor | None = None,
    ) -> Verification:
        """`verify` on these inputs, by position and by name. against: what `_stock` gives back.
        visible: positions that count."""
        if not self.active:
            fail(PatchError, "verify: the model is not patched any more")
        with evaluating(self.model), torch.no_grad():
            name, ours = output_of(self._run(*given))
            ours = ours.clone()  # the other run may write into the same memory
            with self._stock():
                _, own = output_of(self._run(*given))
        figures = compare(ours, own, visible, name, tolerance, against)
        if strict and not figures.passed:
            fail(PatchError, f"verify {figures}")
        return figures

    @abstractmethod
    def _stock(self) -> AbstractContextManager[None]:
        """Within the block the model attends as without attnops."""

    def _run(self, inputs: Any, named: Any) -> Any:
        return self.model(*inputs, **named)

    @property
    def took(self) -> Took | None:
        """How the last `generate()` ran, see `attnops.hf.Patched`. None without one."""
        return None

    @property
    def graphs(self) -> Graphed | None:
        """The graphs of decode steps, see `attnops.hf.Patched`. None without any."""
        return None

    @property
    def plain_steps(self) -> int:
        """Steps of `generate()` that ran without graphs, see `attnops.hf.Patched`."""
        return 0

    def release(self) -> None:  # noqa: B027 - other models keep nothing
        """Free the memory that is kept for later calls, see `attnops.hf.Patched`."""

    def new_cache(
        self, max_batch: int, max_length: int, *, page_size: int | None = None
    ) -> PagedModelCache:
        """A cache of pages, see `attnops.hf.Patched`. Raises PatchError for other models."""
        self._has_no_cache("new_cache")

    def step(
        self, input_ids: Tensor, cache: PagedModelCache, position_ids: Tensor | None = None
    ) -> Tensor:
        """A decode step, see `attnops.hf.Patched`. Raises PatchError for other models."""
        self._has_no_cache("step")

    def capture(self, cache: PagedModelCache, progress: Progress | None = None) -> GraphReport:
        """Capture decode steps, see `attnops.hf.Patched`. Raises PatchError for other models."""
        self._has_no_cache("capture")

    def _has_no_cache(self, method: str) -> NoReturn:
        fail(PatchError, f"{method}: got {type(self.model).__name__}, want a transformers model")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.unpatch()

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} "
            f"{self.report()._title()}{'' if self.active else '; unpatched'}>"
        )
