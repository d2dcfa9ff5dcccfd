"""transformers' continuous batching (`generate_batch`) of a patched model.

While a batch runs, the model's attention has the name that transformers takes for it. The settings
of a batch keep what transformers turns off for all attention but FlashAttention's.
"""

from __future__ import annotations

import functools
import inspect
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import transformers

from attnops.adapters.handle import MARK
from attnops.announce import NAME
from attnops.core.errors import InvalidInput, fail
from attnops.core.record import need
from attnops.graphs.capturing import quiet
from attnops.hf.attention.batched import ENDING, FILLS, name_for_batches
from attnops.hf.attention.continuous import PREFIX, refusal
from attnops.hf.models.methods import Method
from attnops.hf.report import switch

if TYPE_CHECKING:
    from attnops.hf.patching import Patched

ENTRY = "init_continuous_batching"
"""The method of a model by which all ways into continuous batching go."""

_TABLES = "max_blocks_per_request"
_CONFIG = "continuous_batching_config"
# The method of a manager that makes the buffers of inputs, or resets them in the thread that runs
# batches.
_MAKE = "_create_batch_processor"
_COMPILES = ("default_compile_level", "varlen_compile_config", "decode_compile_config")
_OLD_CACHE = "transformers.generation.continuous_batching.cache_manager"


def batching_config(model: Any, **options: Any) -> Any:
    """A ContinuousBatchingConfig for `generate_batch` with attnops.

    It has block tables, and on CUDA graphs and two steps under way. transformers itself keeps block
    tables from all attention but FlashAttention's, and up to 5.18 graphs, too. Without block tables
    each step gathers the keys of all its requests, or up to 5.18 lists their places on the host.

    A model with sliding windows has no block tables, nor up to 5.18 has one whose steps are
    compiled. `generate_batch` of a patched model gives a plain config block tables by itself.

    Args:
        model: the model to generate with: patched, or with transformers up to 5.18 any whose
            attention is set to "paged|attnops".
        options: arguments of ContinuousBatchingConfig, before these settings;
            `max_blocks_per_request=0` turns block tables off. Assigning 0 to that field of the
            result has no effect.

    Raises:
        InvalidInput: this transformers has no continuous batching, or none that takes the attention
            of this model.
    """
    base = getattr(transformers, "ContinuousBatchingConfig", None)
    if base is None:
        want = "a version with continuous batching"
        fail(InvalidInput, "transformers.__version__", transformers.__version__, want)
    if FILLS and MARK not in vars(model):
        name = str(model.config._attn_implementation)
        want = "a model patched by attnops.patch(model): its batches have a name with 'flash'"
        taken = not name.startswith(NAME) or name.endswith(ENDING)
        need(taken, "model.config._attn_implementation", repr(name), want)
    cuda = torch.cuda.is_available()
    given = {"use_cuda_graph": cuda, "use_async_batching": cuda, **options}
    return with_block_tables(base(**given), model.config)


def with_block_tables(given: Any, model_config: Any) -> Any:
    """A copy of this ContinuousBatchingConfig that keeps block tables while the attention is ours.

    `given` itself where the model, or this transformers, can have none.
    """
    config, base = model_config.get_text_config(), type(given)
    slides = getattr(config, "sliding_window", None) is not None
    if kinds := getattr(config, "layer_types", None):
        slides = {*kinds} != {"full_attention"}
    if slides or getattr(given, _TABLES) == 0 or not _keeps_tables(given):
        return given

    class BatchingConfig(base):  # type: ignore[misc, valid-type]
        def __setattr__(self, name: str, value: Any) -> None:
            # transformers writes 0 where the attention is not FlashAttention. Others than ours, to
            # which a model may be switched later, do not know block tables.
            if name != _TABLES or value != 0 or not _is_ours(str(config._attn_implementation)):
                super().__setattr__(name, value)

    kept = object.__new__(BatchingConfig)
    kept.__dict__.update(vars(given))
    return kept


def _keeps_tables(given: Any) -> bool:
    """Does this transformers hand block tables to the attention of others?"""
    if FILLS:
        return True
    # Up to 5.18 compiled steps gather the keys; the cache of 5.18 has tables for its own alone.
    return not any(getattr(given, n, None) for n in _COMPILES) and find_spec(_OLD_CACHE) is not None


def _is_ours(name: str) -> bool:
    """Is this the name of our attention in continuous batching?"""
    return (
        name.startswith(NAME) and name.endswith(ENDING) if FILLS else name.startswith(PREFIX + NAME)
    )


# A patched model ----------------------------------------------------------------------------------


def names_of(handle: Patched) -> tuple[str, str]:
    """The names of a patched model's attention: outside of continuous batching, and within."""
    return handle.implementation, name_for_batches(handle.implementation)


def begin(method: Method, *args: Any, **kwargs: Any) -> Any:
    """`init_continuous_batching()` of a patched model.

    The model's attention has the name that transformers takes until the manager stops. transformers
    would put FlashAttention in its place where that is installed, and from 5.19 on refuses it
    elsewhere. Raises InvalidInput: a layer that continuous batching cannot serve.
    """
    handle: Patched = method.owner.__dict__[MARK]
    _check(handle)
    asked = inspect.signature(method.original).bind(*args, **kwargs)
    _settle_config(asked.arguments, method.owner)
    ordinary, batches = names_of(handle)
    _rename(handle, ordinary, batches)
    try:
        manager = method.original(*asked.args, **asked.kwargs)
    except BaseException:
        _rename(handle, batches, ordinary)
        raise
    if not isinstance(vars(manager).get("stop"), Method):  # a manager that is kept comes back
        Method(manager, "stop", functools.partial(_stop, handle))
        if hasattr(manager, _MAKE):
            Method(manager, _MAKE, _settled)
    return manager


def _settled(method: Method, *args: Any, **kwargs: Any) -> Any:
    """Make the buffers of inputs, or reset them, and wait until the device has done so.

    transformers resets them on the current stream and copies the inputs of a batch on another one.
    That stream waits for neither the reset nor the steps of the warm-up. On a busy GPU the reset
    could come after the copy: the first requests got other tokens, or a device-side assertion.
    """
    result = method.original(*args, **kwargs)
    device = method.owner.model.device
    if device.type == "cuda":
        with quiet(device):
            torch.cuda.synchronize(device)
    return result


def _stop(handle: Patched, method: Method, *args: Any, **kwargs: Any) -> Any:
    try:
        return method.original(*args, **kwargs)
    finally:
        ordinary, batches = names_of(handle)
        _rename(handle, batches, ordinary)


def _check(handle: Patched) -> None:
    """Steps run in a thread of transformers, where an error only ends the requests."""
    for site in handle._found.sites:
        if site.reason is None:
            cls = type(site.module)
            why = refusal(cls, handle._options.proven)
            need(why is None, "generate_batch", f"a model with {cls.__name__}", str(why))


def _settle_config(arguments: dict[str, Any], model: Any) -> None:
    """Give the config of the call block tables. One inside the generation config stays as it is."""
    generation = arguments.get("generation_config") or getattr(model, "generation_config", None)
    given = arguments.get(_CONFIG)
    if given is not None:
        arguments[_CONFIG] = with_block_tables(given, model.config)
    elif getattr(generation, _CONFIG, None) is None:
        arguments[_CONFIG] = batching_config(model)


def _rename(handle: Patched, old: str, new: str) -> None:
    configs = [config for config, _ in handle._switched]
    switch([c for c in configs if c._attn_implementation_internal == old], new)
