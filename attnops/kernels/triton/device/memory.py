"""Device functions: loads of numbers, and the order of launches that overlap."""

import triton
import triton.language as tl
from triton.language import constexpr


@triton.jit
def floats(ptr, mask):
    """float32 of numbers in memory; 0 where they are masked off."""
    return tl.load(ptr, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def streamed(ptr, mask):
    """Numbers that need not stay in the cache; 0 where they are masked off."""
    return tl.load(ptr, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def let_next_begin():
    """Let programs of the next kernel start once all programs of this one have called it (PTX:
    griddepcontrol, sm90)."""
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def await_previous(OVERLAP: constexpr):
    """Where this kernel is launched while the one before it runs, wait for that one's writes.

    Every exit needs it, too: the kernel after this one relies on both.
    """
    if OVERLAP:
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
