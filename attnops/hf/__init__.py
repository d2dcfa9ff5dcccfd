"""HuggingFace transformers on attnops.

    import attnops
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="attnops")

works by the name that transformers learns from `import attnops` (attnops.announce).
`attnops.patch(model)` does the same to an existing model, reaches all its parts (encoder-decoder
models copy their config), can be undone, and returns a report.
"""

from __future__ import annotations

from attnops.adapters.report import Verification as Verification
from attnops.announce import NAME as NAME
from attnops.hf import (
    supported as supported,
)  # first: with an old transformers it raises a clear error  # isort: split
from attnops.hf.batching import batching_config as batching_config
from attnops.hf.cache.paged_cache import (
    PagedKeyCache as PagedKeyCache,
    PagedLatentCache as PagedLatentCache,
    PagedModelCache as PagedModelCache,
)
from attnops.hf.interface import register as register
from attnops.hf.models.mxfp4 import pack_experts as pack_experts, unpack_experts as unpack_experts
from attnops.hf.patching import Patched as Patched, patch as patch
from attnops.hf.report import Report as Report, Took as Took
from attnops.hf.steps.options import Decode as Decode

register()
