"""Checks that stand-ins share. A stand-in registers ops at its import, which must not happen beside the wheels: this file has none."""

from attnops.problem import pretended


def check(ok: bool, message: str) -> None:
    """TORCH_CHECK."""
    if not ok:
        raise RuntimeError(message)


def architecture() -> int:
    """Of the GPU that a test pretends to have; 0 where it pretends none."""
    target = pretended()
    return 0 if target is None else target.arch
