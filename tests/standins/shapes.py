"""Sizes of dense and packed calls that the tests of gradient kernels share, by name: functions of Features."""

from collections.abc import Callable

from attnops.testing import Call, Features, Source, make_call

SHAPES: dict[str, Callable[[Features], Call]] = {
    "dense": lambda f: make_call("attention", Source(3), 2, 5, 11, f),
    "tall": lambda f: make_call("attention", Source(3), 2, 7, 4, f),
    "no_key": lambda f: make_call("attention", Source(3), 2, 3, 0, f),
    "ragged": lambda f: make_call("varlen_attention", Source(3), (5, 0, 1, 20, 4), (5, 3, 7, 4, 0), f, padding=(3, 4)),
    "no_keys": lambda f: make_call("varlen_attention", Source(3), (3, 1), (0, 0), f, padding=(2, 2)),
}
DENSE = {name: SHAPES[name] for name in ("dense", "tall", "no_key")}
