"""Regional compilation: identical layers compile once, at any depth."""

from typing import Any

from torch import nn

from ..core.record import need


def compile_layers(model: nn.Module, **options: Any) -> tuple[str, ...]:
    """Compile every repeated block of `model` in place with `torch.compile(**options)`.

    N identical layers give one graph. A block is a child of an outermost nn.ModuleList with two or
    more children of one class. Code outside the blocks runs eagerly, and compile time does not grow
    with depth.

    Returns:
        The dotted names of the compiled blocks.

    Raises:
        InvalidInput: the model has no repeated blocks.
    """
    names = tuple(repeated_blocks(model))
    want = "a module with an nn.ModuleList of two or more blocks of one class"
    need(bool(names), "model", type(model).__name__, want)
    for name in names:
        model.get_submodule(name).compile(**options)
    return names


def repeated_blocks(module: nn.Module, prefix: str = "") -> list[str]:
    """The dotted names of the children of every outermost nn.ModuleList of blocks."""
    names: list[str] = []
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList) and len(child) > 1 and len({*map(type, child)}) == 1:
            names += [f"{prefix}{name}.{i}" for i in range(len(child))]
        else:
            names += repeated_blocks(child, f"{prefix}{name}.")
    return names
