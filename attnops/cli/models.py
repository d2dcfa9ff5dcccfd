"""A model from a name or a config file, built without memory: every weight is a fake tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from attnops.cli import require
from attnops.cli.shapes import SHAPES
from attnops.errors import InvalidInput

LONGEST_NAME = 200
LARGEST_BYTES = 10_000_000
MOST_MODULES = 2048

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a name. Raises InvalidInput."""
    if name not in DTYPES:
        raise InvalidInput("dtype", repr(name), " | ".join(DTYPES))
    return DTYPES[name]


def names() -> tuple[str, ...]:
    """The bundled models: published shapes, then tiny ones."""
    from attnops.hf import tiny

    return (*SHAPES, *tiny.NAMES)


def config_of(model: str) -> Any:
    """The transformers config of a bundled name, a config.json, or a folder that holds one.

    Raises InvalidInput: no such name or file, no JSON, or a model_type that the installed transformers does not know.
    MissingExtra: transformers is not installed.
    """
    require(("transformers",), "hf")
    from attnops.hf import tiny

    if model in SHAPES:
        return _from_dict(dict(SHAPES[model]), model)
    if model in tiny.NAMES:
        return tiny.config(model)
    path = Path(model)
    try:
        path = path / "config.json" if path.is_dir() else path
        found = path.is_file()
    except OSError:  # a name too long for a file
        found = False
    if not found:
        short = model if len(model) <= LONGEST_NAME else f"{model[:LONGEST_NAME]}..."
        raise InvalidInput("model", repr(short), f"a config.json, a folder with one, or one of {', '.join(names())}")
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise InvalidInput("model", f"{path} of {path.stat().st_size} bytes", f"<= {LARGEST_BYTES}")
        given = json.loads(path.read_text("utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput("model", f"{path} ({error})", "a JSON file") from None
    return _from_dict(given, str(path))


def first_line(error: BaseException) -> str:
    """An error of others in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _from_dict(given: Any, source: str) -> Any:
    from transformers import CONFIG_MAPPING

    kind = str(given.get("model_type")) if isinstance(given, dict) else "none"
    if kind not in CONFIG_MAPPING:
        raise InvalidInput("model_type", f"{kind!r} in {source}", "one that the installed transformers knows")
    _check_counts(given)
    # How the weights are stored does not change the attention calls, and needs packages of its own.
    given.pop("quantization_config", None)
    try:
        return CONFIG_MAPPING[kind].from_dict(given)
    except Exception as error:  # whatever the config class makes of a stranger's file
        raise InvalidInput("model", f"{source} ({first_line(error)})", f"a valid config of {kind}") from error


def _check_counts(given: dict[str, Any]) -> None:
    """Modules are made one by one, so a count of them that no model has would take for ever."""
    for name, value in given.items():
        if isinstance(value, dict):
            _check_counts(value)
        elif isinstance(value, (int, float)) and ("layers" in name or "experts" in name) and not value <= MOST_MODULES:
            raise InvalidInput(name, value, f"<= {MOST_MODULES}")


def build_fake(config: Any, dtype: torch.dtype) -> Any:
    """The decoder of `config` in evaluation mode. To be called under a FakeTensorMode: then no memory is taken.

    A config of several parts gives its text model. Raises InvalidInput: transformers has no causal language model for it.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        config = config.get_text_config(decoder=True)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InvalidInput("model_type", repr(config.model_type), "a decoder (AutoModelForCausalLM)")
    # The default loop over experts asks which tokens chose which, and fake tensors hold no values.
    options = {"attn_implementation": "eager", "experts_implementation": "batched_mm"}
    return AutoModelForCausalLM.from_config(config, dtype=dtype, **options).eval()
