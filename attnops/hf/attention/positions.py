"""Warns of packed documents that `position_ids` alone do not keep apart.

transformers hands a mask function no positions. It joins documents to the rule of a mask where the
model's code hands it positions (that of gpt-oss does not), and where the call has no attention mask
and no cache. Else the documents of a row see each other, as they do without attnops.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attnops.core.errors import warn_once
from attnops.core.private_torch import capturing
from attnops.core.tracers import is_recorded
from attnops.hf.attention import packed
from attnops.hf.generation import THREAD, running_generation


def look(rule: Any, queries: int) -> None:
    """Warn, once for a class of models, if documents are packed that the rule of a causal mask does
    not keep apart.

    The host waits for the device where a model was given positions and no mask.
    """
    given, THREAD.given = getattr(THREAD, "given", None), None
    positions = None if given is None else given[1]()
    if (
        given is None
        or positions is None
        or positions.shape[1] != queries
        or running_generation() is not None
    ):
        return
    if (
        packed.of_rule(rule) is not None
        or type(positions) is not Tensor
        or is_recorded()
        or capturing(positions)
    ):
        return
    if bool((positions[:, 1:] == 0).any()):
        name = given[0]
        text = (
            f"attnops: position_ids begin anew within a row of {name}, and its masks do not "
            "read them: the documents of a row see"
        )
        text += (
            " each other, as they do without attnops. Pass cu_seq_lens_q, cu_seq_lens_k, "
            "max_length_q and max_length_k, as"
        )
        text += (
            " DataCollatorWithFlattening(return_flash_attn_kwargs=True) does, and use_cache=False."
        )
        warn_once(UserWarning, f"{name}: packed by positions", text)
