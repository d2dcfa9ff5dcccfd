"""Finds the attention modules of a model that can be switched, by their code and not by their
names."""

from __future__ import annotations

import ast
import functools
import gc
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from attnops.hf.models import lightning

HANDLED = frozenset(
    (
        "attention_mask",
        "scaling",
        "dropout",
        "is_causal",
        "sliding_window",
        "softcap",
        "s_aux",
        "sinks",
        "position_bias",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
    )
)
"""Arguments that the attention function acts on."""

HARMLESS = frozenset(
    (
        "position_ids",
        "cache_position",
        "position_embeddings",
        "input_ids",
        "token_type_ids",
        "encoder_hidden_states",
        "labels",
        "num_items_in_batch",
        "logits_to_keep",
        "use_cache",
        "return_dict",
        "output_hidden_states",
        "output_router_logits",
        "deterministic",
        "cache_config",
        "cache_implementation",
        "guidance_scale",
        "max_cache_len",
        "prefill_chunk_size",
        "sequence_bias",
        "seq_idx",
    )
)
"""Arguments that models pass to every layer and that do not change the result of attention."""

_KNOWN = HANDLED | HARMLESS | {"query", "key", "value", "output_attentions"}
_SWITCH = "_attn_implementation_internal"


@dataclass(frozen=True)
class Usage:
    """How a class calls the attention interface.

    foreign: arguments it passes that attnops does not know.
    edits_mask, edits_cached: it computes with the mask that it is given, or with the keys and
    values that its cache returns.
    moves: it keeps its keys in another layer of its cache than that of its own number, as a module
    does that runs in a loop.
    """

    foreign: tuple[str, ...]
    edits_mask: bool
    edits_cached: bool = False
    moves: bool = False


@dataclass
class Site:
    """An attention module of a model, and the reason it is left alone, if it is. owner: the nearest
    model around it."""

    path: str
    module: nn.Module
    owner: PreTrainedModel | None
    config: Any = None
    reason: str | None = None
    usage: Usage | None = None

    @property
    def name(self) -> str:
        """That of its class."""
        return type(self.module).__name__


@dataclass(frozen=True)
class Match:
    """The parts of a model that can be switched.

    sites: every attention module. configs: the config objects to switch.
    explicit: why the model needs masks that are written out, or None. edits: the class that
    computes with its masks, or None.
    shared: number of modules of other models that hold one of the configs.
    unrouted: classes of the models of usable modules that transformers keeps from its sdpa.
    """

    sites: list[Site]
    configs: list[Any]
    explicit: str | None
    edits: str | None
    shared: int
    unrouted: tuple[type, ...]


_class: Callable[[nn.Module], Any] = type


def match(model: nn.Module) -> Match:
    """Inspect every module of `model`."""
    models = {path: m for path, m in model.named_modules() if isinstance(m, PreTrainedModel)}
    sites = list(_sites(model, models))
    _keep_together(sites)
    usable = [site for site in sites if site.reason is None]
    configs = _configs(sites, models)
    switched = [m for m in models.values() if id(m.config) in configs]
    edits = next(_editing(usable, switched), None)
    left = (site for site in sites if site.reason is not None)
    explicit = edits or next(_needing(left, switched, model), None)
    classes = dict.fromkeys(type(site.owner) for site in usable if site.owner is not None)
    unrouted = tuple(cls for cls in classes if not _takes_bools(cls))
    found = list(configs.values())
    return Match(sites, found, explicit, edits, _strangers(found, model), unrouted)


def _configs(sites: list[Site], models: dict[str, PreTrainedModel]) -> dict[int, Any]:
    """Those to switch, by their id."""
    configs = {id(site.config): site.config for site in sites if site.reason is None}
    for path, above in models.items():
        # The masks are made by the models above the attention modules, each by its own config
        # object.
        below = [site for site in sites if _within(site.path, path)]
        if below and all(site.reason is None for site in below):
            configs.setdefault(id(above.config), above.config)
    return configs


def _within(path: str, parent: str) -> bool:
    return not parent or path == parent or path.startswith(parent + ".")


def _takes_bools(cls: Any) -> bool:
    """A model that transformers routes through sdpa computes with bool masks, too."""
    return getattr(cls, "_supports_sdpa", False)


def _sites(model: nn.Module, models: dict[str, PreTrainedModel]) -> Iterator[Site]:
    modules = {path: m for path, m in model.named_modules() if path not in models}
    usages = {path: usage for path, m in modules.items() if (usage := usage_of(_class(m)))}
    named = {path for path, m in modules.items() if _is_named_so(m)}
    attend = usages.keys() | named
    for path in (path for path in modules if path in attend):
        module, usage = modules[path], usages.get(path)
        config = getattr(module, "config", None)
        above = (parent for parent in models if _within(path, parent))
        site = Site(path, module, models.get(max(above, key=len, default="")), config, None, usage)
        if usage is not None:
            site.reason = _against(usage, config)
            yield site
        elif not any(other != path and _within(other, path) for other in attend):
            site.reason = (
                f"{site.name} computes attention by itself, not through transformers' "
                "attention interface"
            )
            yield site


def _is_named_so(module: nn.Module) -> bool:
    """Is it attention by its name? Lightning attention keeps a state, and reads no masks of
    attention."""
    cls = type(module)
    named = "Attention" in cls.__name__ and not lightning.is_one(cls)
    return named or isinstance(module, nn.MultiheadAttention)


def _against(usage: Usage, config: Any) -> str | None:
    """Why a module that calls the interface is left alone, but for its neighbours; None if it is
    not."""
    if not hasattr(config, _SWITCH):
        return "holds no config that names an attention implementation"
    return (
        f"passes {', '.join(usage.foreign)} to the attention interface, which no kernel here takes"
        if usage.foreign
        else None
    )


def _keep_together(sites: list[Site]) -> None:
    """Modules that share a config object are switched together or not at all."""
    kept = [site for site in sites if site.reason is not None]
    blockers = {
        id(site.config): site
        for site in kept
        if site.usage or (not _takes_bools(site.owner) and _takes_mask(site.module))
    }
    for site in sites:
        if site.reason is None and (blocker := blockers.get(id(site.config))):
            site.reason = (
                f"shares its config object with {blocker.path} ({blocker.name}), which must "
                "keep its masks"
            )


def _editing(usable: list[Site], switched: list[PreTrainedModel]) -> Iterator[str]:
    """The classes that compute with their masks."""
    yield from (
        f"{site.name} edits its mask" for site in usable if site.usage and site.usage.edits_mask
    )
    yield from (
        f"{type(owner).__name__} edits its masks"
        for owner in switched
        if _demands_masks(_class(owner))
    )


def _needing(
    left: Iterator[Site], switched: list[PreTrainedModel], model: nn.Module
) -> Iterator[str]:
    """Other classes that need masks which are written out. left: the sites that are left alone."""
    told = {id(owner.config) for owner in switched}
    yield from (
        f"{site.name} computes attention by itself"
        for site in left
        if _is_given(site, model) in told
    )
    yield from (
        f"{type(owner).__name__} pools padding with text"
        for owner in switched
        if _pools_padding(_class(owner))
    )


def _takes_mask(module: nn.Module) -> bool:
    return any("mask" in name for name in inspect.signature(type(module).forward).parameters)


def _is_given(site: Site, model: nn.Module) -> int:
    """The id of the config by which the masks of a module outside of the interface are made."""
    if site.config is not None:
        return id(site.config)
    if isinstance(site.module, nn.MultiheadAttention):
        parent = _source(_class(model.get_submodule(site.path.rpartition(".")[0])))
        given = "attn_mask" in parent or "key_padding_mask" in parent
    else:
        given = _takes_mask(site.module)
    # A module without a config is given the masks of the model around it.
    return id(getattr(site.owner, "config", None)) if given else 0


def _strangers(configs: list[Any], model: nn.Module) -> int:
    mine = {id(m) for m in model.modules()} | {id(m.__dict__) for m in model.modules()}
    wanted = {id(config) for config in configs}
    found = set()
    for holder in gc.get_referrers(*configs) if configs else ():
        # A module is seen as itself or through its __dict__, as the interpreter happens to store
        # it.
        names = (
            holder
            if isinstance(holder, dict)
            else vars(holder)
            if isinstance(holder, nn.Module)
            else {}
        )
        if (
            "_modules" in names
            and id(names.get("config")) in wanted
            and not mine & {id(holder), id(names)}
        ):
            found.add(id(names))
    return len(found)


# Reading code -------------------------------------------------------------------------------------


@functools.cache
def usage_of(cls: Any) -> Usage | None:
    """How `cls` calls the attention interface, or None when it does not."""
    for function in _methods(cls):
        if calls := _interface_calls(function):
            foreign = {
                keyword.arg for call in calls for keyword in call.keywords if keyword.arg
            } - _KNOWN
            edits = any(_edits_mask(function, call) for call in calls)
            return Usage(
                tuple(sorted(foreign)), edits, _edits_cached(function, calls), _moves(function)
            )
    return None


def _methods(cls: Any) -> Iterator[ast.FunctionDef]:
    """Those of a class and its bases, where their code may ask for the interface."""
    for base in cls.__mro__:
        if base in (nn.Module, PreTrainedModel, object):
            continue
        text = _source(base)
        if "get_interface" in text or "ALL_ATTENTION_FUNCTIONS" in text:
            yield from (
                node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)
            )
        if "forward" in vars(base) and "super().forward(" not in text:
            return  # a method that this class replaces does not count


@functools.cache
def _source(cls: Any) -> str:
    try:
        return textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError, IndentationError):
        return ""


class _Assigned(NamedTuple):
    """An assignment. names: its targets that are variables. parts: the variables within its
    targets, too."""

    node: Any
    names: set[str]
    parts: set[str]


def _assigned(function: ast.FunctionDef) -> Iterator[_Assigned]:
    """The assignments of a function."""
    for node in ast.walk(function):
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            parts = {
                part.id
                for target in targets
                for part in ast.walk(target)
                if isinstance(part, ast.Name)
            }
            yield _Assigned(
                node, {target.id for target in targets if isinstance(target, ast.Name)}, parts
            )


def _name(value: Any) -> str | None:
    """That of a variable; None: another expression, or none."""
    return value.id if isinstance(value, ast.Name) else None


def _argument(call: ast.Call, at: int, name: str) -> ast.expr | None:
    """The argument of a call by its place or its name."""
    named = (keyword.value for keyword in call.keywords if keyword.arg == name)
    return call.args[at] if len(call.args) > at else next(named, None)


def _interface_calls(function: ast.FunctionDef) -> list[ast.Call]:
    """The calls of the function from `get_interface(...)` or `ALL_ATTENTION_FUNCTIONS[...]`."""
    names = {name for one in _assigned(function) if _asks_interface(one.node) for name in one.names}
    return [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and _name(node.func) in names
    ]


def _asks_interface(node: Any) -> bool:
    if isinstance(node, ast.AugAssign) or not isinstance(node.value, (ast.Call, ast.Subscript)):
        return False
    head = ast.unparse(node.value.func if isinstance(node.value, ast.Call) else node.value.value)
    return head.endswith("get_interface") or "ALL_ATTENTION_FUNCTIONS" in head


def _edits_mask(function: ast.FunctionDef, call: ast.Call) -> bool:
    """Is the mask of the call anything but a parameter of the function, handed on as it came?"""
    mask = _argument(call, 4, "attention_mask")
    if mask is None or isinstance(mask, ast.Constant):
        return False
    name = _name(mask)
    if name not in {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}:
        return True
    return any(name in one.names and not _chooses(one.node) for one in _assigned(function))


def _chooses(node: Any) -> bool:
    """Does it assign a variable, or one of two?"""
    value = node.value
    chosen = (value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,)
    return not isinstance(node, ast.AugAssign) and None not in map(_name, chosen)


def _edits_cached(function: ast.FunctionDef, calls: list[ast.Call]) -> bool:
    """Are the keys and values of the calls others than those from `update(...)`, or from a module
    applied to them (a norm)?"""
    updates = _updates(function)
    if not updates:
        return False
    kept = set[str]().union(*(one.parts for one in updates))
    given = [_argument(call, at, name) for call in calls for at, name in ((2, "key"), (3, "value"))]
    if not all(_name(one) in kept for one in given):
        return True
    last = max(one.node.lineno for one in updates)
    later = any(
        one.node.lineno > last and one.parts & kept and not _is_module_call(one.node.value)
        for one in _assigned(function)
    )
    return later or len(calls) > 1


def _moves(function: ast.FunctionDef) -> bool:
    """Is the `layer_idx` in a call of `update(key_states, value_states, layer_idx)` anything but an
    attribute of the module?"""
    numbers = (
        number
        for one in _updates(function)
        if (number := _argument(one.node.value, 2, "layer_idx")) is not None
    )
    return any(
        not (isinstance(number, ast.Attribute) and _name(number.value) == "self")
        for number in numbers
    )


def _updates(function: ast.FunctionDef) -> list[_Assigned]:
    """The assignments of what a cache returns."""
    return [one for one in _assigned(function) if _asks_cache(one.node)]


def _asks_cache(node: Any) -> bool:
    called = getattr(node.value, "func", None)
    unpacked = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple)
    return unpacked and isinstance(called, ast.Attribute) and called.attr == "update"


def _is_module_call(value: Any) -> bool:
    return (
        isinstance(value, ast.Call)
        and ast.unparse(value.func).startswith("self.")
        and len(value.args) == 1
        and not value.keywords
    )


@functools.cache
def _demands_masks(cls: Any) -> bool:
    """Does the class ask transformers for masks that are never left out? It does so when it
    computes with them."""
    return any(
        word in _source(cls) for word in ("allow_is_causal_skip", "allow_is_bidirectional_skip")
    )


@functools.cache
def _pools_padding(cls: Any) -> bool:
    """Does text read what layers give for padding?

    Layers give something else there with lengths than with masks. BLT's patches hold the bytes of
    both.
    """
    return "patch_cross_attention_mask(" in _source(cls)


@functools.cache
def cached_routed(cls: Any) -> bool:
    """As `routed`, for callers that no compiler traces."""
    defined = vars(sys.modules[cls.__module__]).values()
    models = [
        m
        for m in defined
        if inspect.isclass(m) and issubclass(m, PreTrainedModel) and m.__module__ == cls.__module__
    ]
    if not models or any(getattr(m, "_supports_sdpa", False) for m in models):
        return True
    # Sinks alone keep such a model from torch's sdpa.
    return any(
        getattr(m, "_supports_flash_attn", False) for m in models
    ) and "s_aux" in inspect.getsource(cls)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def routed(cls: Any) -> bool:
    """Does transformers itself route modules of this class through an attention without additive
    masks?

    The models in the file that defines the class answer for it.
    """
    return cached_routed(cls)
