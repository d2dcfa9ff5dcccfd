"""A call of every op that is in order: what its record asks for, of the sizes given here."""

from collections.abc import Mapping
from inspect import signature
from math import prod
from typing import Any

import torch
from torch import Tensor

import attnops
from attnops import ops
from attnops.core.arguments import REQUIRED, Arg, evaluate
from attnops.core.kernel import kernels_of
from attnops.ops import OPS

FORWARD = [name for name in OPS if not name.endswith("_backward")]
FUNCTIONS = {name: getattr(attnops, name, None) or getattr(ops, name) for name in FORWARD}
"""The public function of every op that has one."""

OVERLOADS = [(op, name) for op in OPS for name in ("default", *kernels_of(op))]
"""Of every op, its own and those of its kernels."""

PARAMETERS = {name: signature(function).parameters for name, function in FUNCTIONS.items()}

SPEC = ops.paged_layers(4, 2, 8, 2, torch.float32)
LATENTS = ops.latent_layers(4, 2, torch.float32)


def i(*values) -> Tensor:
    """Integers in a row."""
    return torch.tensor(values, dtype=torch.int32)


REQUESTS = {"B": 2, "T": 3, "Hq": 4, "H": 4, "Hkv": 2, "D": 8, "Dv": 6, "Dc": 6, "Dr": 2}
PAGES = {"P": 4, "page": 2, "max_pages": 2, "words": 2, "bytes": 3}
MIXTURE = {"E": 4, "K": 2, "In": 8, "Inner": 5, "Out": 6}
SIZES: dict[str, dict[str, int]] = {
    "attention": {"S": 3, "K": 5},
    "varlen_attention": {"starts": 3, "N": 5},
    "sparse_mla_attention": {"Dc": 128, "numbers": 130, "topk": 2},
    "write_latent_packed": {"Dc": 128, "bytes": 136},
    "rope_quantize_latent": {"N": 9},
    "merge_states": {"N": 5},
    "vertical_slash_indexes": {"V": 2, "S": 1, "max_seqlen_q": 70},
    "vertical_slash_attention": {"N": 5, "V": 7, "S": 3},
    "copy_kv": {"L": 2, "N": 3},
    "experts": MIXTURE,
    "mxfp4_experts": MIXTURE | {"In": 64, "Half": 32, "Out": 16},
    "route": MIXTURE | {"E": 8},
    "linear": MIXTURE,
    "rms_norm": {"In": 8},
    "gated_delta_rule": {"Hk": 2, "Hv": 4, "Dk": 8, "Dv": 6},
    "mamba2_scan": {"Hk": 2, "Hv": 4, "Dk": 8, "Dv": 6},
    "causal_conv1d": {"C": 4, "W": 3},
    "request_starts": {"S": 3},
    "token_rows": {"starts": 3},
    "kv_indices": {"B": 1},
    "slot_mapping": {"T": 2, "B": 1},
}
"""Sizes by the names of the records' layouts, in place of or beside those that most ops have."""

NUMBERS: dict[str, Any] = {
    "scale": 0.3,
    "eps": 1e-5,
    "max_seqlen_q": 2,
    "max_seqlen_k": 3,
    "num_tokens": 3,
    "page_size": 2,
    "num_pages": 4,
    "max_ngram": 2,
    "num_drafts": 2,
    "num_nodes": 3,
    "num_keys": 5,
    "words": 9,
    "q_heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "v_head_dim": 8,
    "dtype": "float32",
    "kv_dtype": "float32",
}
"""Arguments that are no tensors and have no default."""

SIZE = 4
"""Of a letter that is in none of these tables."""

DATA = {
    "cu_seqlens": i(0, 1, 3),
    "cu_seqlens_q": i(0, 1, 3),
    "cu_seqlens_k": i(0, 2, 5),
    "seq_lens": i(2, 3),
    "lengths": i(1, 2),
    "q_lens": i(2, 70),
    "k_lens": i(3, 90),
    "slots": i(1, 6, -1),
    "source": i(0, -1, 5),
    "target": i(1, 2, 3),
    "positions": i(0, 1, 8),
    "indices": i(0, -1, 7, 3, -1, -1),
    "page_table": i(0, 1, 2, 3),
    "top_k_index": i(0, 3, 1, 2, 3, 0),
    "block_count": i(1, 1, 1, 1, 1, 1, 1, 1),
}
"""Integers that are not all 0, as many as a call in order has room for, or more."""

OPTIONS: dict[str, dict[str, Any]] = {
    "decode_attention": dict.fromkeys(("cos", "sin")),
    "experts": dict.fromkeys(("gate_up_bias", "down_bias")),
    "mxfp4_experts": dict.fromkeys(("gate_up_bias", "down_bias")),
    "linear": {"norm_weight": None, "norm_eps": 1e-5, "activation": "silu"},
    "route": {"groups": 4, "top_groups": 2, "scoring": "sigmoid"},
    "copy_kv": {"v_pages": None},
}
"""Arguments that could be left out, and are not; None for tensors."""

HIDDEN: dict[str, dict[str, Any]] = {
    "plan_paged_attention": {"spec": SPEC},
    "plan_mla_attention": {"spec": LATENTS},
    "route": {"top_k": 2},
}
"""What public functions take in place of arguments of their ops."""


def sizes_of(op: str) -> dict[str, Any]:
    """The sizes of the call that is in order, by name, and its numbers."""
    spec = OPS[op].spec
    letters = (size.text for a in spec.args for size in a.layout if size.text.isidentifier())
    defaults = dict.fromkeys(letters, SIZE) | {
        a.name: a.default for a in spec.args if a.default is not REQUIRED
    }
    own = SIZES.get(op.removesuffix("_backward"), {})
    return defaults | REQUESTS | PAGES | NUMBERS | own | OPTIONS.get(op, {})


def tensor(a: Arg, sizes: Mapping[str, Any], call: Mapping[str, Any]) -> Tensor:
    """A tensor for an argument. call: the arguments before it, of which one may have its dtype."""
    # Of "1 | Hkv" the last, of ">= n" the least; and pages of any further dims have two.
    entries = [size.text.split("|")[-1].removeprefix(">=") for size in a.layout]
    shape = [max(int(evaluate(text, dict(sizes))), 0) for text in entries if text != "..."]
    shape += [2, 8] * ("..." in entries)
    if isinstance(a.dtypes, str):
        dtype = call[a.dtypes].dtype
    elif callable(a.dtypes) or torch.float32 in a.dtypes:
        dtype = torch.float32
    else:
        dtype = a.dtypes[0]
    count = prod(shape)
    if a.written:
        return torch.full(shape, 7, dtype=dtype)
    if dtype.is_floating_point:
        return (torch.arange(count) % 5 / 4).to(dtype).reshape(shape)
    numbers = DATA.get(a.name, i())[:count]
    return torch.cat([numbers, numbers.new_zeros(count - len(numbers))]).to(dtype).reshape(shape)


def record_call(op: str, **changed: int) -> dict[str, Any]:
    """The op's arguments, those that may be left out apart. changed: sizes in place of others."""
    sizes, call = sizes_of(op) | changed, dict[str, Any]()
    for a in OPS[op].spec.args:
        if a.default is REQUIRED or a.name in OPTIONS.get(op, {}):
            call[a.name] = tensor(a, sizes, call) if a.tensor else sizes[a.name]
    return call


def good(op: str, **changed: int) -> dict[str, Any]:
    """Arguments of the public function that are in order. changed: sizes in place of others."""
    call, takes = record_call(op, **changed), PARAMETERS[op]
    if "indexes" in takes:
        call["indexes"] = tuple(x for n, x in call.items() if n.startswith(("block_", "column_")))
    call = {n: x for n, x in (call | HIDDEN.get(op, {})).items() if n in takes}
    if "scale" in call and takes["scale"].default is not REQUIRED:
        del call["scale"]
    return call


def written(op: str, arguments: Mapping[str, Any]) -> dict[str, bytes]:
    """The memory of the plain tensors that the op writes."""
    given = {a.name: arguments.get(a.name) for a in OPS[op].spec.args if a.written}
    plain = {n: x for n, x in given.items() if type(x) is Tensor and x.device.type == "cpu"}
    plain = {n: x for n, x in plain.items() if x.layout is torch.strided and not x.is_nested}
    memory = torch.empty(0, dtype=torch.uint8)
    return {n: memory.set_(x.untyped_storage()).numpy().tobytes() for n, x in plain.items()}
