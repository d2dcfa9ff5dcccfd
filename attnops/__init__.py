"""attnops: any attention kernel as a first-class citizen of torch.compile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnops import announce as _announce, errors as errors, kernels as _kernels
from attnops.core import flops as _flops, op as _op
from attnops.core.errors import AttnopsError as AttnopsError
from attnops.core.select import Policy as Policy, use as use
from attnops.ops import (
    attention as attention,
    merge_state as merge_state,
    paged_attention as paged_attention,
    varlen_attention as varlen_attention,
    write_kv as write_kv,
)

if TYPE_CHECKING:
    from attnops.adapters import patch as patch
    from attnops.lowering.compile_layers import compile_layers as compile_layers
    from attnops.lowering.explain import explain as explain

from attnops.version import VERSION as __version__  # noqa: F401

_kernels.load_own()
_op.bind_all()
_flops.install()


def _teach_inductor() -> None:
    from attnops.lowering.choose import install

    install()


_op.on_trace(_teach_inductor)

_LAZY = {
    "patch": "attnops.adapters",
    "explain": "attnops.lowering.explain",
    "compile_layers": "attnops.lowering.compile_layers",
}
_ROOMS = ("adapters", "cache", "graphs", "hf", "lowering", "nn", "testing")
_MODULES = ("errors", "ops")


def __getattr__(name: str) -> Any:
    # `import attnops` stays light: transformers and the compiler are imported on first use.
    import importlib

    if name in _ROOMS:
        return importlib.import_module(f"attnops.{name}")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'attnops' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, lazy ones included."""
    eager = (
        "AttnopsError",
        "Policy",
        "__version__",
        "attention",
        "merge_state",
        "paged_attention",
        "use",
        "varlen_attention",
        "write_kv",
    )
    return sorted((*eager, *_LAZY, *_ROOMS, *_MODULES))


# Last, so that modules of third parties find all of attnops.
_kernels.load_third_party()
_announce.announce()
