"""What passes say of linears and norms: which became one call, and what became of the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Product:
    """A linear of a graph, and what became of it.

    weight: the name of the graph input; of merged linears, the first's.
    parts: what one call computes, in order: "norm", "linear", the activation, "residual". Empty
        where the linear was not looked at.
    kernel: of the call. "aten": torch's own operations are the fastest, and the graph keeps them.
    refusal: why the linear, or a part beside it, has not changed; "" where all became one call.
    """

    weight: str
    parts: tuple[str, ...] = ()
    kernel: str = ""
    refusal: str = ""

    def __str__(self) -> str:
        done = f"{' + '.join(self.parts)} by {self.kernel}" if self.kernel else "left as it is"
        return f"{self.weight}: {done}" + (f"; {self.refusal}" if self.refusal else "")


class NormCall(Product):
    """An RMS norm of a graph that no linear takes in, and what became of it.

    The fields are those of a Product, of its gain. parts: "norm", "gate" and "residual"; empty
    where the norm was not looked at.
    """


def summary(products: Iterable[Product]) -> tuple[str, ...]:
    """Lines on the linears and norms of a model. Equal ones of all layers and traces count once."""
    found = tuple(dict.fromkeys(products))
    norms = [p for p in found if isinstance(p, NormCall)]
    linears = [p for p in found if not isinstance(p, NormCall)]
    return *_lines("linears", linears), *_lines("norms", norms)


def _lines(what: str, found: Sequence[Product]) -> Iterator[str]:
    taken = Counter(f"{' + '.join(p.parts)} by {p.kernel}" for p in found if p.kernel)
    left = Counter(p.refusal for p in found if p.refusal)
    title = f"{what} of compiled layers, {sum(taken.values())} of {len(found)} recognised"
    lines = {title: taken, f"parts or {what} left as they are": left}
    return (f"{line}: {_listed(counts)}" for line, counts in lines.items() if counts)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{n} {what}" for what, n in counts.items())
