"""Finds the attention modules of a model that can be switched, by their code and not by their names."""

from __future__ import annotations

import ast
import functools
import gc
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

HANDLED = frozenset((
    "attention_mask", "scaling", "dropout", "is_causal", "sliding_window", "softcap", "s_aux", "sinks", "position_bias", "cu_seq_lens_q",
    "cu_seq_lens_k", "max_length_q", "max_length_k",
))  # fmt: skip
"""Arguments that the attention function acts on."""

HARMLESS = frozenset((
    "position_ids", "cache_position", "position_embeddings", "input_ids", "token_type_ids", "encoder_hidden_states", "labels",
    "num_items_in_batch", "logits_to_keep", "use_cache", "return_dict", "output_hidden_states", "output_router_logits", "deterministic",
    "cache_config", "cache_implementation", "guidance_scale", "max_cache_len", "prefill_chunk_size", "sequence_bias", "seq_idx",
))  # fmt: skip
"""Arguments that models pass to every layer and that do not change the result of attention."""

_KNOWN = HANDLED | HARMLESS | {"query", "key", "value", "output_attentions"}
_SWITCH = "_attn_implementation_internal"


@dataclass(frozen=True)
class Usage:
    """How a class calls the attention interface.

    foreign: arguments it passes that attnops does not know.
    edits_mask, edits_cached: it computes with the mask that it is given, or with the keys and values that its cache returns.
    moves: it keeps its keys in another layer of its cache than that of its own number, as a module does that runs in a loop.
    """

    foreign: tuple[str, ...]
    edits_mask: bool
    edits_cached: bool = False
    moves: bool = False


@dataclass
class Site:
    """An attention module of a model, and the reason it is left alone, if it is."""

    path: str
    module: nn.Module
    config: Any = None
    reason: str | None = None
    usage: Usage | None = None


@dataclass(frozen=True)
class Match:
    """The parts of a model that can be switched.

    sites: every attention module. configs: the config objects to switch.
    explicit: why the model needs masks that are written out, or None. edits: the class that computes with its masks, or None.
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
    sites = list(_sites(model))
    models = {path: m for path, m in model.named_modules() if isinstance(m, PreTrainedModel)}
    around = {site.path: [path for path in models if _within(site.path, path)] for site in sites}
    owners = {path: models[max(above, key=len)] if above else None for path, above in around.items()}
    # A model that transformers routes through sdpa computes with bool masks, too.
    odd = {path for path, owner in owners.items() if not getattr(owner, "_supports_sdpa", False)}
    # Modules that share a config object are switched together or not at all.
    kept = [site for site in sites if site.reason is not None]
    blockers = {id(site.config): site for site in kept if site.usage or (site.path in odd and _takes_mask(site.module))}
    for site in sites:
        if site.reason is None and (blocker := blockers.get(id(site.config))):
            site.reason = f"shares its config object with {blocker.path} ({type(blocker.module).__name__}), which must keep its masks"
    usable = [site for site in sites if site.reason is None]
    configs = {id(site.config): site.config for site in usable}
    for path, above in models.items():
        # The masks are made by the models above the attention modules, each by its own config object.
        below = [site for site in sites if _within(site.path, path)]
        if below and all(site.reason is None for site in below):
            configs.setdefault(id(above.config), above.config)
    switched = [m for m in models.values() if id(m.config) in configs]
    editors = [f"{type(site.module).__name__} edits its mask" for site in usable if site.usage and site.usage.edits_mask]
    editors += [f"{type(owner).__name__} edits its masks" for owner in switched if _demands_masks(_class(owner))]
    edits = next(iter(editors), None)
    told = {id(m.config) for m in switched}
    by_itself = (site for site in sites if site.reason is not None and _is_given(site, model, owners[site.path]) in told)
    others = [f"{type(site.module).__name__} computes attention by itself" for site in by_itself]
    others += [f"{type(owner).__name__} pools padding with text" for owner in switched if _pools_padding(_class(owner))]
    explicit = edits or next(iter(others), None)
    classes = dict.fromkeys(type(owner) for site in usable if (owner := owners[site.path]) is not None)
    unrouted = tuple(cls for cls in classes if not getattr(cls, "_supports_sdpa", False))
    return Match(sites, list(configs.values()), explicit, edits, _strangers(list(configs.values()), model), unrouted)


def _within(path: str, parent: str) -> bool:
    return not parent or path == parent or path.startswith(parent + ".")


def _sites(model: nn.Module) -> Iterator[Site]:
    modules = {path: m for path, m in model.named_modules() if not isinstance(m, PreTrainedModel)}
    usages = {path: usage for path, m in modules.items() if (usage := usage_of(_class(m)))}
    named = {path for path, m in modules.items() if isinstance(m, nn.MultiheadAttention) or "Attention" in type(m).__name__}
    for path, module in modules.items():
        config, usage = getattr(module, "config", None), usages.get(path)
        if usage is not None:
            reason = f"passes {', '.join(usage.foreign)} to the attention interface, which no kernel here takes" if usage.foreign else None
            reason = reason if hasattr(config, _SWITCH) else "holds no config that names an attention implementation"
            yield Site(path, module, config, reason, usage)
        elif path in named and not any(other != path and _within(other, path) for other in usages.keys() | named):
            why = "computes attention by itself, not through transformers' attention interface"
            yield Site(path, module, config, f"{type(module).__name__} {why}")


def _takes_mask(module: nn.Module) -> bool:
    return any("mask" in name for name in inspect.signature(type(module).forward).parameters)


def _is_given(site: Site, model: nn.Module, owner: PreTrainedModel | None) -> int:
    """The id of the config by which the masks of a module outside of the interface are made."""
    if site.config is not None:
        return id(site.config)
    if isinstance(site.module, nn.MultiheadAttention):
        parent = _source(_class(model.get_submodule(site.path.rpartition(".")[0])))
        given = "attn_mask" in parent or "key_padding_mask" in parent
    else:
        given = _takes_mask(site.module)
    # A module without a config is given the masks of the model around it.
    return id(getattr(owner, "config", None)) if given else 0


def _strangers(configs: list[Any], model: nn.Module) -> int:
    mine = {id(m) for m in model.modules()} | {id(m.__dict__) for m in model.modules()}
    wanted = {id(config) for config in configs}
    found = set()
    for holder in gc.get_referrers(*configs) if configs else ():
        # A module is seen as itself or through its __dict__, as the interpreter happens to store it.
        names = holder if isinstance(holder, dict) else vars(holder) if isinstance(holder, nn.Module) else {}
        if "_modules" in names and id(names.get("config")) in wanted and not mine & {id(holder), id(names)}:
            found.add(id(names))
    return len(found)


# Reading code ---------------------------------------------------------------------------------------------------------


@functools.cache
def usage_of(cls: Any) -> Usage | None:
    """How `cls` calls the attention interface, or None when it does not."""
    for base in cls.__mro__:
        if base in (nn.Module, PreTrainedModel, object):
            continue
        text = _source(base)
        asks = "get_interface" in text or "ALL_ATTENTION_FUNCTIONS" in text
        for function in ast.walk(ast.parse(text)) if asks else ():
            if isinstance(function, ast.FunctionDef) and (calls := _interface_calls(function)):
                foreign = {keyword.arg for call in calls for keyword in call.keywords if keyword.arg} - _KNOWN
                edits = any(_edits_mask(function, call) for call in calls)
                return Usage(tuple(sorted(foreign)), edits, _edits_cached(function, calls), _moves(function))
        if "forward" in vars(base) and "super().forward(" not in text:
            break  # a method that this class replaces does not count
    return None


@functools.cache
def _source(cls: Any) -> str:
    try:
        return textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError, IndentationError):
        return ""


def _assigned(function: ast.FunctionDef) -> list[tuple[Any, list[ast.expr]]]:
    """The assignments of a function with their targets."""
    nodes = [node for node in ast.walk(function) if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign))]
    return [(node, node.targets if isinstance(node, ast.Assign) else [node.target]) for node in nodes]


def _interface_calls(function: ast.FunctionDef) -> list[ast.Call]:
    """The calls of the function from `get_interface(...)` or `ALL_ATTENTION_FUNCTIONS[...]`."""
    assigned = [(node, targets) for node, targets in _assigned(function) if _asks_interface(node)]
    names = {target.id for _, targets in assigned for target in targets if isinstance(target, ast.Name)}
    return [node for node in ast.walk(function) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names]


def _asks_interface(node: Any) -> bool:
    if isinstance(node, ast.AugAssign) or not isinstance(node.value, (ast.Call, ast.Subscript)):
        return False
    head = ast.unparse(node.value.func if isinstance(node.value, ast.Call) else node.value.value)
    return head.endswith("get_interface") or "ALL_ATTENTION_FUNCTIONS" in head


def _edits_mask(function: ast.FunctionDef, call: ast.Call) -> bool:
    """Is the mask of the call anything but a parameter of the function, handed on as it came?"""
    given = [keyword.value for keyword in call.keywords if keyword.arg == "attention_mask"] or call.args[4:5]
    if not given or isinstance(given[0], ast.Constant):
        return False
    parameters = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
    if not isinstance(given[0], ast.Name) or given[0].id not in parameters:
        return True
    for node, targets in _assigned(function):
        if any(isinstance(target, ast.Name) and target.id == given[0].id for target in targets):
            chosen = [node.value.body, node.value.orelse] if isinstance(node.value, ast.IfExp) else [node.value]
            if isinstance(node, ast.AugAssign) or not all(isinstance(one, ast.Name) for one in chosen):
                return True
    return False


def _edits_cached(function: ast.FunctionDef, calls: list[ast.Call]) -> bool:
    """Are the keys and values of the calls others than those from `update(...)`, or from a module applied to them (a norm)?"""
    assigned = [
        (node, {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)})
        for node, targets in _assigned(function)
    ]
    updates = [(node, names) for node, names in assigned if isinstance(node, ast.Assign) and _asks_cache(node)]
    if not updates:
        return False
    kept = {name for _, names in updates for name in names}
    for call in calls:
        named = {keyword.arg: keyword.value for keyword in call.keywords}
        given = [call.args[at] if len(call.args) > at else named.get(name) for at, name in ((2, "key"), (3, "value"))]
        if not all(isinstance(one, ast.Name) and one.id in kept for one in given):
            return True
    last = max(node.lineno for node, _ in updates)
    later = any(node.lineno > last and names & kept and not _is_module_call(node.value) for node, names in assigned)
    return later or len(calls) > 1


def _moves(function: ast.FunctionDef) -> bool:
    """Is a layer's number in a call of `update(...)` anything but an attribute of the module?"""
    updates: list[Any] = [node.value for node, _ in _assigned(function) if isinstance(node, ast.Assign) and _asks_cache(node)]
    numbers = [number for call in updates if (number := _layer_number(call)) is not None]
    return any(not (isinstance(number, ast.Attribute) and ast.unparse(number.value) == "self") for number in numbers)


def _layer_number(call: ast.Call) -> ast.expr | None:
    """The argument `layer_idx` of `update(key_states, value_states, layer_idx)`."""
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    return call.args[2] if len(call.args) > 2 else named.get("layer_idx")


def _asks_cache(node: ast.Assign) -> bool:
    function = getattr(node.value, "func", None)
    return isinstance(node.targets[0], ast.Tuple) and isinstance(function, ast.Attribute) and function.attr == "update"


def _is_module_call(value: Any) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func).startswith("self.") and len(value.args) == 1 and not value.keywords


@functools.cache
def _demands_masks(cls: Any) -> bool:
    """Does the class ask transformers for masks that are never left out? It does so when it computes with them."""
    return any(word in _source(cls) for word in ("allow_is_causal_skip", "allow_is_bidirectional_skip"))


@functools.cache
def _pools_padding(cls: Any) -> bool:
    """Does text read what layers give for padding?

    Layers give something else there with lengths than with masks. BLT's patches hold the bytes of both.
    """
    return "patch_cross_attention_mask(" in _source(cls)


@functools.cache
def cached_routed(cls: Any) -> bool:
    """As `routed`, for callers that no compiler traces."""
    defined = vars(sys.modules[cls.__module__]).values()
    models = [m for m in defined if inspect.isclass(m) and issubclass(m, PreTrainedModel) and m.__module__ == cls.__module__]
    if not models or any(getattr(m, "_supports_sdpa", False) for m in models):
        return True
    # Sinks alone keep such a model from torch's sdpa.
    return any(getattr(m, "_supports_flash_attn", False) for m in models) and "s_aux" in inspect.getsource(cls)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def routed(cls: Any) -> bool:
    """Does transformers itself route modules of this class through an attention without additive masks?

    The models in the file that defines the class answer for it.
    """
    return cached_routed(cls)
