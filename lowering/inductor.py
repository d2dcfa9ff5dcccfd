"""Private names of torch that lowering alone needs, with what each is for. See
`attnops.core.private_torch`.

None has another way: a torch that lacks one says so by its name, when an op is lowered or a pass is
imported.
"""

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch._dispatch.python import enable_python_dispatcher as enable_python_dispatcher
from torch._guards import Guard as Guard, detect_fake_mode as detect_fake_mode
from torch._higher_order_ops import auto_functionalize as auto_functionalize

from ..core.private_torch import late

if TYPE_CHECKING:
    from torch._inductor.custom_graph_pass import CustomGraphModulePass as CustomGraphModulePass

# Loaded by `import torch`: `enable_python_dispatcher` keeps the C++ of some ops from specialising
# symbolic sizes, `Guard` is a condition on a frame that Dynamo compiles, `detect_fake_mode` finds
# the mode of fake inputs, and `auto_functionalize` names written views, see written_views.py.

ENTER_AUTOCAST: Any = torch.amp.autocast_mode._enter_autocast
"""What Dynamo writes into a graph for torch.autocast."""

ASSERT_SCALAR: Any = torch.ops.aten._assert_scalar.default
"""What a check of a size is in a graph that AOTAutograd has traced."""


def dynamo_is_loaded() -> bool:
    """Has this process imported Dynamo, so that something may be compiled?"""
    return "torch._dynamo" in sys.modules


# By their modules, which take a second to import: bound when they are first asked for.
_LATE = {
    # Lowerings: the table, an entry, inputs that must be in memory, a call as it is, and a write.
    "lowerings": "torch._inductor.lowering",
    "register_lowering": "torch._inductor.lowering",
    "add_needs_realized_inputs": "torch._inductor.lowering",
    "fallback_handler": "torch._inductor.lowering",
    "mutate_to": "torch._inductor.lowering",
    # The graph that is lowered now, and its fake mode.
    "V": "torch._inductor.virtualized",
    # A traced graph of torch ops becomes part of it, with Inductor's own decompositions.
    "inline_subgraph_to_ir_nodes": "torch._inductor.codegen.subgraph",
    "select_decomp_table": "torch._inductor.decomposition",
    # Its memory: what is empty, what may be one, and a view at another offset.
    "ComputedBuffer": "torch._inductor.ir",
    "FixedLayout": "torch._inductor.ir",
    "ReinterpretView": "torch._inductor.ir",
    "StorageBox": "torch._inductor.ir",
    "TensorBox": "torch._inductor.ir",
    "as_storage_and_layout": "torch._inductor.ir",
    "is_storage_and_layout": "torch._inductor.ir",
    # What the keys of Inductor's caches hash, by device.
    "custom_backend_passes": "torch._inductor.codegen.common",
    "init_backend_registration": "torch._inductor.codegen.common",
    "CustomGraphModulePass": "torch._inductor.custom_graph_pass",
}


def __getattr__(name: str) -> Any:
    found = globals()[name] = late(_LATE, name)
    return found
