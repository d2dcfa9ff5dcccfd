"""The settings of transformers' continuous batching for `paged|attnops`."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
import transformers

from attnops.errors import InvalidInput, fail
from attnops.hf.attention.continuous import PREFIX
from attnops.hf.interface import NAME


def batching_config(model: Any, **options: Any) -> Any:
    """A ContinuousBatchingConfig for `generate_batch` with `paged|attnops`: block tables, and on CUDA graphs and two steps under way.

    transformers itself turns these off for all attention but FlashAttention's. Without block tables it lists the places of all keys on the
    host in every step. A model with sliding windows has no block tables, nor has one whose steps are compiled.

    Args:
        model: the model to generate with.
        options: arguments of ContinuousBatchingConfig, before these settings; `max_blocks_per_request=0` turns block tables off. Assigning
            0 to that field of the result has no effect.

    Raises:
        InvalidInput: this transformers has no continuous batching, or takes no attention but its own in it, as 5.23 does.
    """
    base = getattr(transformers, "ContinuousBatchingConfig", None)
    if base is None or find_spec("transformers.generation.continuous_batching.cache_manager") is None:
        want = "a version whose continuous batching takes attention of others, as 5.17"
        fail(InvalidInput, "transformers.__version__", transformers.__version__, want)
    cuda, config = torch.cuda.is_available(), model.config.get_text_config()
    given = {"use_cuda_graph": cuda, "use_async_batching": cuda, **options}
    kinds = getattr(config, "layer_types", None) or ("full_attention" if getattr(config, "sliding_window", None) is None else "",)
    compiled = any(given.get(name) for name in ("default_compile_level", "varlen_compile_config", "decode_compile_config"))
    if compiled or given.get("max_blocks_per_request") == 0 or {*kinds} != {"full_attention"}:
        return base(**given)

    class BatchingConfig(base):  # type: ignore[misc, valid-type]
        def __setattr__(self, name: str, value: Any) -> None:
            # transformers writes 0 where the attention is not FlashAttention. Others than ours, to which a model may be switched later,
            # do not know block tables.
            ours = str(config._attn_implementation).startswith(PREFIX + NAME)
            if name != "max_blocks_per_request" or value != 0 or not ours:
                super().__setattr__(name, value)

    return BatchingConfig(**given)
