"""Lets a config ask for attention weights, `config.output_attentions = True`, while its attention
is one of attnops.

transformers' own config takes it for eager attention alone, and raises ValueError for any other
name: when it is set, and again when the config is checked to be saved. attnops returns weights,
whether the config asks or an argument of the call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedConfig

from attnops.announce import NAME

_FIELD, _CHECK = "output_attentions", "validate_output_attentions"
_THEIRS: Any = vars(PreTrainedConfig).get(_FIELD)
_THEIR_CHECK: Any = vars(PreTrainedConfig).get(_CHECK)


def let_configs_ask(configs: Iterable[Any]) -> None:
    """Let these configs ask for attention weights while their attention is one of attnops. Calling
    it again has no effect.

    Other configs are checked as before. A transformers without the check needs nothing.
    """
    if isinstance(_THEIRS, property) and vars(PreTrainedConfig)[_FIELD] is _THEIRS:
        setattr(PreTrainedConfig, _FIELD, _THEIRS.setter(_set))
    for kind in {kind for config in configs for kind in type(config).__mro__}:
        checks = vars(kind).get("__class_validators__", [])
        checks[:] = [
            validate_output_attentions if check is _THEIR_CHECK else check for check in checks
        ]


def _is_ours(config: Any) -> bool:
    return NAME in str(config._attn_implementation)


def _set(config: Any, value: Any) -> None:
    if _is_ours(config):
        config._output_attentions = value
    else:
        _THEIRS.fset(config, value)


def validate_output_attentions(config: Any) -> None:
    """In place of the check of this name, which errors show."""
    if not _is_ours(config):
        _THEIR_CHECK(config)
