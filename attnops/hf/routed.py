"""Which classes may be given masks that are left out, on transformers' own word."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import torch
from transformers import PreTrainedModel


@functools.cache
def _routed(cls: Any) -> bool:
    defined = vars(sys.modules[cls.__module__]).values()
    models = [m for m in defined if inspect.isclass(m) and issubclass(m, PreTrainedModel) and m.__module__ == cls.__module__]
    if not models or any(m._supports_sdpa for m in models):
        return True
    # Sinks alone keep such a model from torch's sdpa.
    return any(m._supports_flash_attn for m in models) and "s_aux" in inspect.getsource(cls)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def routed(cls: Any) -> bool:
    """Does transformers itself route modules of this class through an attention that is not given additive masks?

    It is asked of the models in the file that defines the class.
    """
    return _routed(cls)
