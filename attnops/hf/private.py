"""The methods of transformers' generation that attnops replaces or calls. Most are private: another
version may have others."""

from __future__ import annotations

import functools
import inspect

import transformers
from transformers import GenerationMixin

PREPARE = "_prepare_cache_for_generation"

_ARGUMENTS = {
    PREPARE: (
        "generation_config",
        "model_kwargs",
        "generation_mode",
        "batch_size",
        "max_cache_length",
    ),
    "_sample": (
        "input_ids",
        "logits_processor",
        "stopping_criteria",
        "generation_config",
        "streamer",
    ),
    "_prefill": ("input_ids", "generation_config", "model_kwargs", "is_first_iteration"),
    "_optimize_model_for_decode": (),
    "prepare_inputs_for_generation": ("input_ids", "next_sequence_length"),
    "_update_model_kwargs_for_generation": ("outputs", "model_kwargs", "num_new_tokens"),
}
"""The arguments that attnops gives them, or is given in their place."""

_MORE = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


def changed(*names: str) -> str:
    """Why transformers' own methods of these names are not those that attnops knows; "" where they
    are."""
    found = (_changed(getattr(GenerationMixin, name, None), name) for name in names)
    return next(filter(None, found), "")


@functools.cache
def _changed(method: object, name: str) -> str:
    """As `changed`, of one method."""
    version = transformers.__version__
    if not callable(method):
        return f"transformers {version} has no {name}"
    parameters = list(inspect.signature(method).parameters.values())[1:]
    given = tuple(each.name for each in parameters if each.kind not in _MORE)
    needed = {
        each.name for each in parameters if each.kind not in _MORE and each.default is each.empty
    }
    known = _ARGUMENTS[name]
    fits = given == known if name == PREPARE else needed <= {*known} <= {*given}
    return "" if fits else f"transformers {version} has a {name} of other arguments"
