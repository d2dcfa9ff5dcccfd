"""torch.utils.checkpoint with `use_reentrant=False`, seen from within the function that it runs.

A checkpoint hooks the tensors that autograd saves; its hook knows how to run the function again.
None of this is public. Where torch has moved the latter, `frame` finds nothing; a test runs both.
"""

from __future__ import annotations

from typing import Any

from attnops.core.private_torch import saved_tensors_hooks


def current() -> Any:
    """The hook of the innermost checkpoint, unless other hooks hide it; None without one."""
    hooks = saved_tensors_hooks(True)
    found = hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"
    return hooks[0] if hooks is not None and found else None


def frame(hook: Any) -> Any:
    """What the checkpoint with this hook remembers, with `recompute_fn`; None if not found."""
    variables = getattr(getattr(hook, "__code__", None), "co_freevars", ())
    if "frame" not in variables:
        return None
    remembered = hook.__closure__[variables.index("frame")].cell_contents
    return remembered if hasattr(remembered, "recompute_fn") else None
