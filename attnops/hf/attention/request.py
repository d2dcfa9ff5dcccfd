"""The call of a transformers layer, read once: one name for each thing, and errors for what is not
known."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from attnops.core.errors import InvalidInput, fail
from attnops.hf.models.attention_modules import HANDLED, HARMLESS, cached_routed, routed

# An argument with one of these words in its name changes the result, even if it is no tensor.
_TELLING = (
    "window",
    "softcap",
    "chunk",
    "mask",
    "bias",
    "sink",
    "alibi",
    "indices",
    "block",
    "scale",
    "causal",
    "page",
    "cache",
)


class Lengths(NamedTuple):
    """Packed requests, one after the other: int32 cumulative lengths of queries and keys, and upper
    bounds of the longest in tokens.

    padded: may tokens follow the last request? Not where a mask of ours tells the requests.
    """

    starts_q: Tensor
    starts_k: Tensor | None
    longest_q: int | None
    longest_k: int | None
    padded: bool = True


class Request(NamedTuple):
    """A layer's call.

    query, key, value: `[B, Hq, S, D]`, `[B, Hkv, T, D]`, `[B, Hkv, T, Dv]`.
    mask: None; bool or float `[B or 1, Hq or 1, S, T]`; or a descriptor of ranges or of packed
    requests.
    bias: float `[B or 1, Hq, S, T]`, added to the logits. lengths: of packed requests in one row.
    dropout: on the probabilities; 0 where the module does not train. window: tokens visible, the
    own included; None or 0: all.
    weights: are the attention weights asked for?
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    bias: Tensor | None = None
    lengths: Lengths | None = None
    sinks: Tensor | None = None
    scale: float | None = None
    softcap: float = 0.0
    window: int | None = None
    dropout: float = 0.0
    weights: bool = False


def scaled(query: Tensor, scale: float | Tensor | None) -> tuple[Tensor, float | None]:
    """(the query, the factor on its logits). A factor that is a tensor is multiplied into the
    query."""
    if isinstance(scale, Tensor):
        return query * scale, 1.0
    return query, scale


def is_causal_call(module: Any, is_causal: bool | None) -> bool:
    """Does a query see no key after its own in a call without a mask? `is_causal` says so, or else
    the module's own flag."""
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def flat_sinks(s_aux: Tensor | None, sinks: Tensor | None) -> Tensor | None:
    """The sinks under either name, `[Hq]`."""
    found = s_aux if sinks is None else sinks
    return found if found is None or found.dim() == 1 else found.reshape(-1)


def check_layer(cls: Any, others: dict[str, Any], compiling: bool, trusted: bool) -> None:
    """Raise InvalidInput for an argument that is not known, see `check_others`, or for a class that
    is not served, see `routed`.

    trusted: every class is served.
    """
    if others and (compiling or not others.keys() <= HARMLESS):
        check_others(others)
    if not (trusted or (routed(cls) if compiling else cached_routed(cls))):
        want = (
            "attnops.patch(model), which tries masks with this model: transformers does not "
            "route it through sdpa"
        )
        fail(InvalidInput, "attn_implementation", f"attnops for {cls.__name__}", want)


def check_others(others: dict[str, Any]) -> None:
    """Raise InvalidInput for an unknown argument that may change the result: a tensor, or a name
    with one of _TELLING."""
    for name, value in others.items():
        if name in HARMLESS or value is None or value is False:
            continue
        if name == "output_attentions":
            fail(
                InvalidInput,
                name,
                value,
                "False: kernels of continuous batching return no attention weights",
            )
        if _holds_tensor(value) or any(word in name for word in _TELLING):
            want = f"one of {', '.join(sorted(HANDLED))}: dropping it would change the result"
            fail(InvalidInput, f"attention argument {name}", type(value).__name__, want)


def _holds_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or (
        isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value)
    )
