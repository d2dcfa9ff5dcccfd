"""Hugging Face configs by bundled name or file, and models of them on fake tensors."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from attnops.errors import InvalidInput, fail, one_line
from attnops.package import require
from attnops.shapes import SHAPES

LARGEST_BYTES = 10_000_000
MOST_MODULES = 2048

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a name. Raises InvalidInput."""
    return DTYPES[name] if name in DTYPES else fail(InvalidInput, "dtype", repr(name), " | ".join(DTYPES))


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
    except OSError:  # the name is too long for a file
        found = False
    if not found:
        fail(InvalidInput, "model", repr(model), f"a config.json, a folder with one, or one of {', '.join(names())}")
    try:
        if path.stat().st_size > LARGEST_BYTES:
            fail(InvalidInput, "model", f"{path} of {path.stat().st_size} bytes", f"<= {LARGEST_BYTES}")
        given = json.loads(path.read_text("utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput("model", f"{path} ({error})", "a JSON file") from None
    return _from_dict(given, str(path))


def _from_dict(given: Any, source: str) -> Any:
    from transformers import CONFIG_MAPPING

    kind = str(given.get("model_type")) if isinstance(given, dict) else "none"
    if kind not in CONFIG_MAPPING:
        fail(InvalidInput, "model_type", f"{kind!r} in {source}", "one that the installed transformers knows")
    _check_counts(given)
    # Quantised weights do not change the attention calls, and need packages of their own.
    given.pop("quantization_config", None)
    try:
        return CONFIG_MAPPING[kind].from_dict(given)
    except Exception as error:  # a config class raises any error on an unknown file
        raise InvalidInput("model", f"{source} ({one_line(error)})", f"a valid config of {kind}") from error


def _check_counts(given: dict[str, Any]) -> None:
    """Reject counts of modules that no model has: transformers builds modules one by one."""
    for name, value in given.items():
        if isinstance(value, dict):
            _check_counts(value)
        elif isinstance(value, (int, float)) and ("layers" in name or "experts" in name) and not value <= MOST_MODULES:
            fail(InvalidInput, name, value, f"<= {MOST_MODULES}")


def build_fake(config: Any, dtype: torch.dtype) -> Any:
    """The decoder of `config` in evaluation mode, without memory if called under a FakeTensorMode.

    A composite config gives its text model. Raises InvalidInput: transformers has no causal language model for it.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        config = config.get_text_config(decoder=True)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        fail(InvalidInput, "model_type", repr(config.model_type), "a decoder (AutoModelForCausalLM)")
    # The default loop over experts reads the routing, and fake tensors hold no values.
    options = {"attn_implementation": "eager", "experts_implementation": "batched_mm"}
    return AutoModelForCausalLM.from_config(config, dtype=dtype, **options).eval()


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Set the loggers of transformers and its imports to ERROR: their advice is for models with weights."""
    # transformers sets the level of its logger at import, which therefore comes first.
    if find_spec("transformers") is not None:
        import_module("transformers.utils.logging")
    levels = {logger: logger.level for logger in map(logging.getLogger, ("transformers", "torchao", "torch.utils._pytree"))}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
