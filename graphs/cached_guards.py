"""Guards of cached code, which are evaluated as a whole.

Code from torch's compile caches comes with guards as Python source, `min(3, L['t0']) == L['t0']`,
which torch (2.11 to 2.13) evaluates on symbolic sizes. Python's `min` and `or` then guard on the
comparison of one part, so that a trace of many sizes specialises to one.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..core.private_torch import tracing_context


def shape_env() -> Any:
    """The shape environment of the current trace, or None."""
    found = tracing_context()
    return None if found is None or found.fake_mode is None else found.fake_mode.shape_env


@contextmanager
def whole_guards() -> Iterator[None]:
    """Have the current trace evaluate every cached guard as a whole within the block."""
    if (env := shape_env()) is None:
        yield
        return
    # torch has no public way to this. `evaluate_guards` of FxGraphCache.load_with_key is no option
    # of standalone_compile, unsafe_skip_cache_dynamic_shape_guards skips all guards, and without
    # the caches every start compiles anew.
    own = env.evaluate_guards_expression
    env.evaluate_guards_expression = lambda code, args: own(whole(code), args)
    try:
        yield
    finally:
        del env.evaluate_guards_expression


def whole(code: str) -> str:
    """The expression with `|`, `&` and torch functions for `or`, a nested `and`, min and max.

    A top-level `and` or chain of comparisons stays, because each of its parts has to hold anyway.
    """
    visit = _Whole()
    body = ast.parse(code, mode="eval").body
    parts = body.values if isinstance(body, ast.BoolOp) and isinstance(body.op, ast.And) else [body]
    taken: list[Any] = [
        (visit.generic_visit if isinstance(part, ast.Compare) else visit.visit)(part)
        for part in parts
    ]
    return ast.unparse(ast.BoolOp(ast.And(), taken) if len(taken) > 1 else taken[0])


class _Whole(ast.NodeTransformer):
    def visit(self, node: ast.AST) -> Any:
        self.generic_visit(node)
        match node:
            case ast.Call(ast.Name("min" | "max" as name)):
                return functools.reduce(lambda a, b: _call(f"sym_{name}", a, b), node.args)
            case ast.BoolOp():
                return _joined(
                    ast.BitOr() if isinstance(node.op, ast.Or) else ast.BitAnd(), node.values
                )
            case ast.UnaryOp(ast.Not()):
                return _call("sym_not", node.operand)
            case ast.Compare():
                sides = [node.left, *node.comparators]
                return _joined(
                    ast.BitAnd(),
                    [ast.Compare(sides[i], [op], [sides[i + 1]]) for i, op in enumerate(node.ops)],
                )
        return node


def _call(name: str, *given: ast.expr) -> ast.expr:
    return ast.Call(ast.Attribute(ast.Name("torch", ast.Load()), name, ast.Load()), list(given), [])


def _joined(op: ast.operator, parts: Sequence[ast.expr]) -> ast.expr:
    return functools.reduce(lambda a, b: ast.BinOp(a, op, b), parts)
