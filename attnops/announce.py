"""Tells transformers the names of attnops as soon as both are imported, in either order.

`from_pretrained(..., attn_implementation="attnops")` works after `import attnops` alone, which
stays light: the functions behind the names load `attnops.hf` when a model first calls them. Where
transformers comes later, `attnops.on_import` waits for its `modeling_utils`, the module that holds
the table of names.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from types import ModuleType
from typing import Any

from torch.compiler import is_dynamo_compiling

from attnops.core.needs import parse
from attnops.on_import import once_imported
from attnops.tried import OLDEST

NAME = "attnops"
LATE = "attnops_late"
"""The attribute that marks these functions, which `attnops.hf` replaces by those that they call."""

WHERE = "transformers.modeling_utils"


def announce() -> None:
    """Register the names with transformers: now if it is loaded, else once it is. Idempotent."""
    if hasattr(sys.modules.get(WHERE), "AttentionInterface"):
        _register()
    else:
        once_imported(WHERE, _loaded_now)


# The functions behind the names ------------------------------------------------------------------


def attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any = None,
    **given: Any,
) -> Any:
    """The function of `attnops.hf.attention.function`."""
    return _loaded().attention(module, query, key, value, attention_mask, **given)


def batches(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any = None,
    **given: Any,
) -> Any:
    """The function of `attnops.hf.attention.continuous`."""
    return _loaded().batches(module, query, key, value, attention_mask, **given)


def mask(*args: Any, **given: Any) -> Any:
    """The mask function of `attnops.hf.attention.mask`."""
    return _loaded().mask(*args, **given)


def _loaded() -> Any:
    """The functions of `attnops.hf`, which take the place of these, but not while one is traced."""
    from attnops.hf import interface

    if not is_dynamo_compiling():
        interface.register()
    return interface.DEFAULT


for _function in (attention, batches, mask):
    setattr(_function, LATE, True)


def _register() -> None:
    """Register what is not registered yet. A transformers that is too old gets no names."""
    given = parse(str(getattr(sys.modules.get("transformers"), "__version__", "")))
    oldest = parse(OLDEST["transformers"])
    if given is not None and oldest is not None and given.release < oldest.release:
        return
    modeling = importlib.import_module(WHERE)
    masking = importlib.import_module("transformers.masking_utils")
    known = modeling.AttentionInterface._global_mapping
    masking.AttentionMaskInterface._global_mapping.setdefault(NAME, mask)
    known.setdefault(NAME, attention)
    if "paged|sdpa" in known:  # up to 5.18 names of continuous batching have this prefix
        known.setdefault(f"paged|{NAME}", batches)


def _loaded_now(modeling: ModuleType) -> None:
    try:
        _register()
    except Exception as error:
        # An import of transformers must not end here.
        text = f"attnops: transformers knows the name {NAME!r} from `import attnops.hf` on"
        warnings.warn(f"{text}, not from `import attnops`: {error}", stacklevel=2)
