"""The handle that `attnops.patch` returns for every kind of model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from attnops.adapters.report import Report, Verification

if TYPE_CHECKING:
    from typing_extensions import Self

MARK = "_attnops"
"""The attribute by which a patched model holds its handle."""


class Handle(ABC):
    """A patched model, and the way back; also a context manager that unpatches at its end.

    model: as it was given. active: is it patched? False after `unpatch()`.
    """

    model: Any
    active: bool

    @abstractmethod
    def unpatch(self) -> None:
        """Give the model back as it was. Idempotent."""

    @abstractmethod
    def report(self) -> Report:
        """Every attention module with its status. `print` it, give it to rich, or take `Report.to_dict()`."""

    @abstractmethod
    def verify(self, *inputs: Any, **named: Any) -> Verification:
        """Run the model on these inputs as patched and with its own attention, and compare.

        Args:
            inputs, named: the model's own arguments; also `tolerance`, on the relative difference, and `strict`, False to raise no error
                where the figures are worse than that.

        Raises PatchError when the comparison cannot be made or fails.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.unpatch()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.report()._title()}{'' if self.active else '; unpatched'}>"
