"""Calls that break a contract: the error is typed, names the field, what was given and what is allowed, and nothing was written."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

import attnops
from attnops import ops
from attnops.errors import AttnopsError, InvalidInput, NoGradient, NoKernel, UnknownKernel, find

I32, I64, U8, BF16, F32, F64 = torch.int32, torch.int64, torch.uint8, torch.bfloat16, torch.float32, torch.float64
E4M3, INT8 = torch.float8_e4m3fn, torch.int8
NAN, INF = float("nan"), float("inf")
SPEC = ops.PagedSpec(4, 2, 8, 2, F32)
LATENTS = ops.LatentSpec(4, 2, F32)


def f(*shape, dtype=F32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def i(*values, dtype=I32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def good(name) -> dict[str, Any]:
    """A call of the public function that is in order."""
    cu = i(0, 1, 3)
    calls: dict[str, Callable[[], dict[str, Any]]] = {
        "attention": lambda: {"query": f(2, 3, 4, 8), "key": f(2, 5, 2, 8), "value": f(2, 5, 2, 6)},
        "varlen_attention": lambda: {
            "query": f(3, 4, 8), "key": f(5, 2, 8), "value": f(5, 2, 6), "cu_seqlens_q": cu, "cu_seqlens_k": i(0, 2, 5),
            "max_seqlen_q": 2, "max_seqlen_k": 3,
        },
        "paged_attention": lambda: {
            "query": f(3, 4, 8), "k_pages": f(4, 2, 2, 8), "v_pages": f(4, 2, 2, 6), "page_table": i(0, 1, 2, 3).reshape(2, 2),
            "seq_lens": i(2, 3), "cu_seqlens_q": cu, "max_seqlen_q": 2, "output": torch.full((3, 4, 6), 7.0),
        },
        "decode_attention": lambda: {
            "query": f(2, 4, 8), "key": torch.ones(2, 2, 8), "value": torch.ones(2, 2, 8), "k_pages": f(4, 2, 2, 8),
            "v_pages": f(4, 2, 2, 8), "page_table": i(0, 1, 2, 3).reshape(2, 2), "seq_lens": i(2, 3), "slots": i(1, 6, dtype=I64),
            "cos": f(2, 8), "sin": f(2, 8), "output": torch.full((2, 4, 8), 7.0),
        },
        "write_kv": lambda: {
            "key": torch.ones(3, 2, 8), "value": torch.ones(3, 2, 6), "k_pages": f(4, 2, 2, 8), "v_pages": f(4, 2, 2, 6),
            "slots": i(0, -1, 5, dtype=I64),
        },
        "mla_attention": lambda: {
            "q_nope": f(3, 4, 6), "q_pe": f(3, 4, 2), "latent_pages": f(4, 2, 8), "page_table": i(0, 1, 2, 3).reshape(2, 2),
            "seq_lens": i(2, 3), "cu_seqlens_q": cu, "max_seqlen_q": 2, "scale": 0.3, "output": torch.full((3, 4, 6), 7.0),
        },
        "write_latent": lambda: {
            "latent": torch.ones(3, 6), "k_pe": torch.ones(3, 2), "latent_pages": f(4, 2, 8), "slots": i(0, -1, 5, dtype=I64),
        },
        "rope_quantize_latent": lambda: {
            "q_nope": f(3, 4, 6), "q_pe": f(3, 4, 2), "latent": f(3, 6), "k_pe": f(3, 2), "cos_sin": f(9, 2), "positions": i(0, 1, 8),
        },
        "sparse_mla_attention": lambda: {
            "q_nope": f(3, 4, 128), "q_pe": f(3, 4, 2), "latent_pages": f(4, 2, 136, dtype=U8),
            "indices": i(0, -1, 7, 3, -1, -1).reshape(3, 2), "scale": 0.3, "output": torch.full((3, 4, 128), 7.0),
        },
        "write_latent_packed": lambda: {
            "latent": torch.ones(3, 128), "k_pe": torch.ones(3, 2), "latent_pages": f(4, 2, 136, dtype=U8), "slots": i(0, -1, 5, dtype=I64),
        },
        "merge_state": lambda: {"output_a": f(3, 2, 4), "lse_a": f(3, 2), "output_b": f(3, 2, 4), "lse_b": f(3, 2)},
        "merge_states": lambda: {"outputs": f(3, 5, 2, 4), "lses": f(3, 5, 2)},
        "vertical_slash_indexes": lambda: {
            "q_lens": i(2, 70), "k_lens": i(3, 90), "vertical": i(0, 4).expand(2, 4, 2), "slash": i(0).expand(2, 4, 1), "max_seqlen_q": 70,
        },
        "vertical_slash_attention": lambda: {
            "query": f(3, 4, 8), "key": f(5, 2, 8), "value": f(5, 2, 6), "cu_seqlens_q": cu, "cu_seqlens_k": i(0, 2, 5),
            "indexes": (i(1).expand(2, 4, 1), i(0).expand(2, 4, 1, 3), i(0).expand(2, 4, 1), i(0).expand(2, 4, 1, 7)),
            "max_seqlen_q": 2, "max_seqlen_k": 3, "output": torch.full((3, 4, 6), 7.0),
        },
        "copy_kv": lambda: {
            "k_pages": torch.ones(2, 4, 2, 2, 8), "v_pages": torch.ones(2, 4, 2, 2, 6), "source": i(0, -1, 5), "target": i(1, 2, 3),
        },
        "experts": lambda: {
            "x": torch.ones(3, 8), "gate_up": torch.ones(4, 10, 8), "down": torch.ones(4, 6, 5), "top_k_index": torch.tensor([[0, 3]] * 3),
            "top_k_weights": torch.ones(3, 2), "gate_up_bias": f(4, 10), "down_bias": f(4, 6), "output": torch.full((3, 6), 7.0),
        },
        "mxfp4_experts": lambda: {
            "x": torch.ones(3, 64), "gate_up": f(4, 128, 32, dtype=U8), "gate_up_scales": f(4, 128, 2, dtype=U8),
            "down": f(4, 16, 32, dtype=U8), "down_scales": f(4, 16, 2, dtype=U8), "top_k_index": torch.tensor([[0, 3]] * 3),
            "top_k_weights": torch.ones(3, 2), "gate_up_bias": f(4, 128), "down_bias": f(4, 16), "output": torch.full((3, 16), 7.0),
        },
        "route": lambda: {"logits": torch.ones(3, 8), "top_k": 2, "bias": f(8), "groups": 4, "top_groups": 2, "scoring": "sigmoid"},
        "linear": lambda: {
            "x": torch.ones(3, 2, 8), "weight": torch.ones(6, 8), "bias": f(6), "norm_weight": torch.ones(8), "norm_eps": 1e-5,
            "activation": "silu", "residual": f(3, 2, 3), "output": torch.full((3, 2, 3), 7.0),
        },
        "cu_seqlens": lambda: {"lengths": i(1, 2)},
        "request_starts": lambda: {"begins": torch.tensor([[True, False, True]])},
        "token_rows": lambda: {"cu_seqlens": cu, "num_tokens": 3},
        "slot_mapping": lambda: {"positions": i(0, 1), "rows": i(0, 0), "page_table": i(0, 1).reshape(1, 2), "page_size": 2},
        "kv_indices": lambda: {"page_table": i(0, 1).reshape(1, 2), "seq_lens": i(3), "page_size": 2},
        "named_pages": lambda: {
            "page_table": i(0, 1, 2, 3).reshape(2, 2), "seq_lens": i(2, 3), "cu_seqlens_q": cu, "num_pages": 4, "page_size": 2,
        },
        "decode_rows": lambda: {
            "page_table": i(0, 1, 2, 3).reshape(2, 2), "seq_lens": i(2, 3), "cu_seqlens_q": cu, "num_tokens": 3,
        },
        "plan_paged_attention": lambda: {
            "spec": SPEC, "page_table": i(0, 1, 2, 3).reshape(2, 2), "seq_lens": i(2, 3), "cu_seqlens_q": cu, "num_tokens": 3,
            "max_seqlen_q": 2, "plan": i(7, 7, dtype=I64), "workspace": torch.full((3,), 7, dtype=torch.uint8),
        },
        "plan_mla_attention": lambda: {**good("plan_paged_attention"), "spec": LATENTS},
    }  # fmt: skip
    return calls[name]()


class Bad(NamedTuple):
    function: str
    change: dict[str, Any]
    field: str
    got: str
    want: str
    error: type[AttnopsError] = InvalidInput


BAD = [
    # dense: ranks, dtypes, sizes
    Bad("attention", {"query": f(3, 4, 8)}, "query", "(3, 4, 8)", "[B, S, Hq, D]"),
    Bad("attention", {"key": f(2, 5, 8)}, "key", "(2, 5, 8)", "[B, K, Hkv, D]"),
    Bad("attention", {"value": f(2, 5, 2, 1, 6)}, "value", "(2, 5, 2, 1, 6)", "[B, K, Hkv, Dv]"),
    Bad("attention", {"query": i(0).expand(2, 3, 4, 8)}, "query.dtype", "int32", "float16 | bfloat16 | float32 | float64"),
    Bad("attention", {"query": f(2, 3, 4, 8).to(torch.complex64)}, "query.dtype", "complex64", "float16"),
    Bad("attention", {"key": i(0).expand(2, 5, 2, 8)}, "key.dtype", "int32", "int8"),
    Bad("attention", {"query": f(2, 3, 4, 8, dtype=BF16)}, "key.dtype", "float32", "bfloat16 (the query's)"),
    Bad("attention", {"value": f(2, 5, 2, 6, dtype=BF16)}, "value.dtype", "bfloat16", "float32, as key"),
    Bad("attention", {"key": f(2, 5, 2, 8).to(E4M3), "value": f(2, 5, 2, 6).to(E4M3)}, "k_scale, v_scale", "None", "float8_e4m3fn"),
    Bad("attention", {"key": f(3, 5, 2, 8)}, "key.shape[0]", "3", "2 (B, as query.shape[0])"),
    Bad("attention", {"value": f(3, 5, 2, 6)}, "value.shape[0]", "3", "2 (B, as query.shape[0])"),
    Bad("attention", {"value": f(2, 4, 2, 6)}, "value.shape[1]", "4", "5 (K, as key.shape[1])"),
    Bad("attention", {"key": f(2, 5, 2, 9)}, "key.shape[3]", "9", "8 (D, as query.shape[3])"),
    Bad("attention", {"value": f(2, 5, 4, 6)}, "value.shape[2]", "4", "2 (Hkv, as key.shape[2])"),
    Bad("attention", {"key": f(2, 5, 3, 8), "value": f(2, 5, 3, 6)}, "query.shape[2]", "4", "multiple of the key's 3"),
    Bad("attention", {"key": f(2, 5, 0, 8), "value": f(2, 5, 0, 6)}, "key.shape[2]", "0", ">= 1 head"),
    Bad("attention", {"query": f(2, 3, 4, 0), "key": f(2, 5, 2, 0), "scale": 1.0}, "query.shape[3]", "0", ">= 1"),
    Bad("attention", {"value": f(2, 5, 2, 0)}, "value.shape[3]", "0", ">= 1"),
    Bad("attention", {"key": f(2, 5, 2, 8).to("meta"), "value": f(2, 5, 2, 6)}, "key.device", "meta", "cpu"),
    # dense: scalars
    Bad("attention", {"scale": NAN}, "scale", "nan", "finite"),
    Bad("attention", {"scale": INF}, "scale", "inf", "finite"),
    Bad("attention", {"scale": -INF}, "scale", "-inf", "finite"),
    Bad("attention", {"softcap": -1.0}, "softcap", "-1.0", ">= 0"),
    Bad("attention", {"softcap": NAN}, "softcap", "nan", ">= 0"),
    Bad("attention", {"softcap": INF}, "softcap", "inf", "finite"),
    Bad("attention", {"softcap": 1e308}, "softcap", "1e+308", "<= 1e+30"),
    Bad("attention", {"window": (-2, 0)}, "window_left", "-2", ">= -1"),
    Bad("attention", {"window": (0, -7)}, "window_right", "-7", ">= -1"),
    Bad("attention", {"window": 4}, "window", "4", "(left, right)"),
    Bad("varlen_attention", {"window": (1, 2, 3)}, "window", "(1, 2, 3)", "(left, right)"),
    Bad("paged_attention", {"window": (4,)}, "window", "(4,)", "(left, right)"),
    Bad("attention", {"attention_chunk": -1}, "attention_chunk", "-1", ">= 0"),
    Bad("varlen_attention", {"attention_chunk": -2}, "attention_chunk", "-2", ">= 0"),
    Bad("paged_attention", {"attention_chunk": -3}, "attention_chunk", "-3", ">= 0"),
    # float8 queries
    Bad("attention", {"query": f(2, 3, 4, 8).to(E4M3)}, "q_scale", "None", "a scale, because the query is float8_e4m3fn"),
    Bad("attention", {"q_scale": f(1)}, "q_scale", "a tensor", "None, because the query is float32"),
    Bad("varlen_attention", {"query": f(3, 4, 8).to(E4M3), "q_scale": f(1)}, "key.dtype", "float32", "float8_e4m3fn (the query's)"),
    Bad("attention", {"query": f(2, 3, 4, 8).to(torch.float8_e5m2)}, "query.dtype", "float8_e5m2", "float8_e4m3fn"),
    Bad("varlen_attention", {"q_scale": f(2)}, "q_scale", "a tensor", "None, because the query is float32"),
    Bad("paged_attention", {"query": f(3, 4, 8).to(E4M3)}, "output.dtype", "float32", "bfloat16"),
    Bad("paged_attention", {"query": f(3, 4, 8).to(E4M3), "output": f(3, 4, 6, dtype=BF16), "q_scale": f(3), "k_scale": f(1),
                            "k_pages": f(4, 2, 2, 8).to(E4M3), "v_pages": f(4, 2, 2, 6).to(E4M3), "v_scale": f(1)},
        "q_scale.shape[0]", "3", "1 or 2 (1 or Hkv)"),
    Bad("varlen_attention", {"query": f(3, 4, 8).to(E4M3), "key": f(5, 2, 8).to(E4M3), "value": f(5, 2, 6).to(E4M3), "q_scale": f(1)},
        "k_scale, v_scale", "None", "both, because key is float8_e4m3fn"),
    # dense: optional tensors
    Bad("attention", {"mask": f(2, 1, 3, 4)}, "mask.shape[3]", "4", "5 (K, as key.shape[1])"),
    Bad("attention", {"mask": f(3, 1, 3, 5)}, "mask.shape[0]", "3", "1 or 2"),
    Bad("attention", {"mask": f(2, 2, 3, 5)}, "mask.shape[1]", "2", "1 or 4"),
    Bad("attention", {"mask": f(2, 4, 2, 5)}, "mask.shape[2]", "2", "1 or 3"),
    Bad("attention", {"mask": f(5)}, "mask", "(5,)", "[1 | B, 1 | Hq, 1 | S, K]"),
    Bad("attention", {"mask": f(4, 5)}, "mask.shape[2]", "4", "1 or 3"),
    Bad("attention", {"mask": f(2, 5)}, "mask", "shape (2, 5)", "of a mask [B, K] give mask[:, None, None]"),
    Bad("attention", {"mask": f(3, 3, 5)}, "mask.shape[1]", "3", "1 or 4"),
    Bad("attention", {"mask": lambda b, h, i, j: i >= j}, "mask", "function", "torch.nn.attention.flex_attention"),
    Bad("varlen_attention", {"mask": max}, "mask", "builtin", "torch.nn.attention.flex_attention"),
    Bad("paged_attention", {"mask": lambda b, h, i, j: i >= j}, "mask", "function", "write a mask_mod or score_mod out"),
    Bad("mla_attention", {"mask": "causal"}, "mask", "str", "a tensor, bool or additive"),
    Bad("attention", {"mask": causal_lower_right(4, 5)}, "mask", "a CausalBias of 4 queries and 5 keys", "3 queries and 5 keys"),
    Bad("varlen_attention", {"mask": causal_lower_right(3, 5)}, "mask", "a CausalBias", "a plain tensor"),
    Bad("attention", {"mask": f(2, 1, 3, 5).to(I32)}, "mask.dtype", "int32", "bool | float16"),
    Bad("attention", {"sinks": f(2)}, "sinks.shape[0]", "2", "4 (Hq, as query.shape[2])"),
    Bad("attention", {"sinks": f(4, 1)}, "sinks", "(4, 1)", "[Hq]"),
    Bad("attention", {"sinks": i(1, 2, 3, 4)}, "sinks.dtype", "int32", "float32"),
    Bad("attention", {"k_scale": f(3)}, "k_scale.shape[0]", "3", "1 or 2 (1 or Hkv)"),
    Bad("attention", {"v_scale": f(2, 1)}, "v_scale", "(2, 1)", "[1 | Hkv]"),
    Bad("attention", {"k_scale": f(2, dtype=F64)}, "k_scale.dtype", "float64", "float32"),
    Bad("attention", {"kv_start": i(0, 0, 0)}, "kv_start.shape[0]", "3", "2 (B, as query.shape[0])"),
    Bad("attention", {"kv_end": i(5)}, "kv_end.shape[0]", "1", "2 (B, as query.shape[0])"),
    Bad("attention", {"kv_end": f(2)}, "kv_end.dtype", "float32", "int32 | int64"),
    Bad("attention", {"kv_end": i(5, 5).to("meta")}, "kv_end.device", "meta", "cpu"),
    # packed
    Bad("varlen_attention", {"query": f(1, 3, 4, 8)}, "query", "(1, 3, 4, 8)", "[T, Hq, D]"),
    Bad("varlen_attention", {"key": f(1, 5, 2, 8)}, "key", "(1, 5, 2, 8)", "[N, Hkv, D]"),
    Bad("varlen_attention", {"value": f(6, 2, 6)}, "value.shape[0]", "6", "5 (N, as key.shape[0])"),
    Bad("varlen_attention", {"cu_seqlens_q": i(0, 1, 3, dtype=I64)}, "cu_seqlens_q.dtype", "int64", "int32"),
    Bad("varlen_attention", {"cu_seqlens_k": i(0, 5)}, "cu_seqlens_k.shape[0]", "2", "3 (starts, as cu_seqlens_q.shape[0])"),
    Bad("varlen_attention", {"cu_seqlens_q": i(), "cu_seqlens_k": i()}, "cu_seqlens_q.shape[0]", "0", ">= 1"),
    Bad("varlen_attention", {"cu_seqlens_k": i(0, 2, 5).reshape(3, 1)}, "cu_seqlens_k", "(3, 1)", "[starts]"),
    Bad("varlen_attention", {"max_seqlen_q": -1}, "max_seqlen_q", "-1", ">= 0"),
    Bad("varlen_attention", {"max_seqlen_k": -3}, "max_seqlen_k", "-3", ">= 0"),
    Bad("varlen_attention", {"mask": f(3, 2)}, "mask.shape[1]", "2", ">= 3 (max_seqlen_k)"),
    Bad("varlen_attention", {"mask": f(2, 3)}, "mask.shape[0]", "2", "3 (T, as query.shape[0])"),
    Bad("varlen_attention", {"mask": f(1, 1, 3, 3)}, "mask", "(1, 1, 3, 3)", "[T, >= max_seqlen_k]"),
    Bad("varlen_attention", {"query": f(3, 5, 8)}, "query.shape[1]", "5", "multiple of the key's 2"),
    Bad("varlen_attention", {"softcap": -0.5}, "softcap", "-0.5", ">= 0"),
    # paged
    Bad("paged_attention", {"query": f(2, 3, 4, 8)}, "query", "(2, 3, 4, 8)", "[T, Hq, D]"),
    Bad("paged_attention", {"k_pages": f(8, 2, 8)}, "k_pages", "(8, 2, 8)", "[P, page, Hkv, D]"),
    Bad("paged_attention", {"v_pages": f(3, 2, 2, 6)}, "v_pages.shape[0]", "3", "4 (P, as k_pages.shape[0])"),
    Bad("paged_attention", {"v_pages": f(4, 3, 2, 6)}, "v_pages.shape[1]", "3", "2 (page, as k_pages.shape[1])"),
    Bad("paged_attention", {"k_pages": f(4, 0, 2, 8), "v_pages": f(4, 0, 2, 6)}, "k_pages.shape[1]", "0", ">= 1 token a page"),
    Bad("paged_attention", {"page_table": i(0, 1, 2, 3, dtype=I64).reshape(2, 2)}, "page_table.dtype", "int64", "int32"),
    Bad("paged_attention", {"page_table": i(0, 1, 2, 3)}, "page_table", "(4,)", "[B, max_pages]"),
    Bad("paged_attention", {"plan": f(3)}, "plan.dtype", "float32", "int32 | int64"),
    Bad("mla_attention", {"plan": f(3, dtype=BF16)}, "plan.dtype", "bfloat16", "int32 | int64"),
    Bad("paged_attention", {"seq_lens": i(2, 3, 1)}, "seq_lens.shape[0]", "3", "2 (B, as page_table.shape[0])"),
    Bad("paged_attention", {"seq_lens": i(2, 3, dtype=I64)}, "seq_lens.dtype", "int64", "int32"),
    Bad("paged_attention", {"cu_seqlens_q": i(0, 3)}, "cu_seqlens_q.shape[0]", "2", "3 (B + 1)"),
    Bad("paged_attention", {"max_seqlen_q": -1}, "max_seqlen_q", "-1", ">= 0"),
    Bad("paged_attention", {"mask": f(3, 3)}, "mask.shape[1]", "3", ">= 4 (max_pages * page)"),
    Bad("paged_attention", {"output": f(3, 4, 8)}, "output.shape[2]", "8", "6 (Dv, as v_pages.shape[3])"),
    Bad("paged_attention", {"output": f(3, 4, 6, dtype=BF16)}, "output.dtype", "bfloat16", "float32"),
    Bad("paged_attention", {"lse": f(4, 3)}, "lse.shape[0]", "4", "3 (T, as query.shape[0])"),
    Bad("paged_attention", {"lse": f(3, 4, dtype=BF16)}, "lse.dtype", "bfloat16", "float32"),
    Bad("paged_attention", {"k_pages": f(4, 2, 2, 8).to(INT8), "v_pages": f(4, 2, 2, 6).to(INT8)}, "k_scale, v_scale", "None", "int8"),
    Bad("paged_attention", {"temperature": f(2)}, "temperature.shape[0]", "2", "3 (T, as query.shape[0])"),
    Bad("paged_attention", {"temperature": f(3, 1)}, "temperature", "(3, 1)", "[T]"),
    Bad("paged_attention", {"temperature": f(3, dtype=BF16)}, "temperature.dtype", "bfloat16", "float32"),
    Bad("paged_attention", {"temperature": f(3).to("meta")}, "temperature.device", "meta", "cpu"),
    Bad("paged_attention", {"scale": NAN, "lse": f(3, 4)}, "scale", "nan", "finite"),
    # KV write
    Bad("decode_attention", {"query": f(4, 8)}, "query", "(4, 8)", "[B, Hq, D]"),
    Bad("decode_attention", {"query": None, "output": None}, "query", "None", "a tensor"),
    Bad("decode_attention", {"key": f(1, 2, 8)}, "key.shape[0]", "1", "2 (B, as query.shape[0])"),
    Bad("decode_attention", {"key": f(2, 3, 8), "value": f(2, 3, 8)}, "k_pages.shape[2]", "2", "3 (Hkv, as key.shape[1])"),
    Bad("decode_attention", {"query": f(2, 3, 8), "output": f(2, 3, 8)}, "query.shape[1]", "3", "multiple of the key's 2"),
    Bad("decode_attention", {"value": f(2, 2, 6)}, "value.shape[2]", "6", "8 (D, as query.shape[2])"),
    Bad("decode_attention", {"key": f(2, 2, 8, dtype=BF16)}, "key.dtype", "bfloat16", "float32, as query"),
    Bad("decode_attention", {"k_pages": f(4, 2, 2, 8).to(E4M3)}, "k_pages.dtype", "float8_e4m3fn", "float32, as query"),
    Bad("decode_attention", {"v_pages": f(4, 3, 2, 8)}, "v_pages.shape[1]", "3", "2 (page, as k_pages.shape[1])"),
    Bad("decode_attention", {"page_table": i(0, 1).reshape(1, 2)}, "page_table.shape[0]", "1", "2 (B, as query.shape[0])"),
    Bad("decode_attention", {"seq_lens": i(2, 3, dtype=I64)}, "seq_lens.dtype", "int64", "int32"),
    Bad("decode_attention", {"slots": i(1)}, "slots.shape[0]", "1", "2 (B, as query.shape[0])"),
    Bad("decode_attention", {"sin": None}, "cos, sin", "one of them", "both, or neither"),
    Bad("decode_attention", {"cos": None}, "cos", "None", "a tensor, because sin is one"),
    Bad("decode_attention", {"cos": f(2, 6), "sin": f(2, 6)}, "cos.shape[1]", "6", "8 or 4 (D or D // 2)"),
    Bad("decode_attention", {"sin": f(2, 4)}, "sin.shape[1]", "4", "8, as cos.shape[1]"),
    Bad("decode_attention", {"sin": f(2, 8, dtype=BF16)}, "sin.dtype", "bfloat16", "float32, as cos"),
    Bad("decode_attention", {"q_norm": f(4)}, "q_norm.shape[0]", "4", "8 (D, as query.shape[2])"),
    Bad("decode_attention", {"k_norm": i(1)}, "k_norm.dtype", "int32", "float16 | bfloat16"),
    Bad("decode_attention", {"sinks": f(2)}, "sinks.shape[0]", "2", "4 (Hq, as query.shape[1])"),
    Bad("decode_attention", {"eps": -1.0}, "eps", "-1.0", ">= 0"),
    Bad("decode_attention", {"eps": NAN}, "eps", "nan", "finite"),
    Bad("decode_attention", {"window_left": -2}, "window_left", "-2", ">= -1"),
    Bad("decode_attention", {"softcap": -1.0}, "softcap", "-1.0", ">= 0"),
    Bad("decode_attention", {"softcap": 1e31}, "softcap", "1e+31", "<= 1e+30"),
    Bad("decode_attention", {"scale": INF}, "scale", "inf", "finite"),
    Bad("decode_attention", {"output": f(2, 4, 8, dtype=BF16)}, "output.dtype", "bfloat16", "float32, as query"),
    Bad("decode_attention", {"workspace": f(8)}, "workspace.dtype", "float32", "uint8"),
    Bad("decode_attention", {"workspace": f(8, dtype=U8)[::2]}, "workspace.stride()", "(2,)", "(1,)"),
    Bad("decode_attention", {"slots": i(1, 6).to("meta")}, "slots.device", "meta", "cpu"),
    Bad("decode_attention", {"kernel": "triton"}, "target", "target=cpu", "(wants CUDA, sm80", NoKernel),
    Bad("decode_attention", {"key": f(2, 2, 8).requires_grad_()}, "key", "requires_grad=True on key", "no gradient", NoGradient),
    Bad("write_kv", {"key": f(3, 2, 1, 8)}, "key", "(3, 2, 1, 8)", "[T, Hkv, D]"),
    Bad("write_kv", {"value": f(2, 2, 6)}, "value.shape[0]", "2", "3 (T, as key.shape[0])"),
    Bad("write_kv", {"slots": i(0, 1)}, "slots.shape[0]", "2", "3 (T, as key.shape[0])"),
    Bad("write_kv", {"slots": f(3)}, "slots.dtype", "float32", "int32 | int64"),
    Bad("write_kv", {"key": f(3, 1, 8)}, "value.shape[1]", "2", "1 (Hkv, as key.shape[1])"),
    Bad("write_kv", {"value": f(3, 2, 8)}, "v_pages.shape[3]", "6", "8 (Dv, as value.shape[2])"),
    Bad("write_kv", {"key": f(3, 2, 8, dtype=BF16), "value": f(3, 2, 6, dtype=BF16)}, "k_pages.dtype", "float32", "bfloat16"),
    Bad("write_kv", {"v_pages": f(4, 2, 2, 6, dtype=BF16)}, "v_pages.dtype", "bfloat16", "float32"),
    Bad("write_kv", {"k_pages": f(4, 2, 2, 8).to(E4M3), "v_pages": f(4, 2, 2, 6).to(E4M3)}, "k_scale, v_scale", "None", "float8_e4m3fn"),
    Bad("write_kv", {"v_scale": f(5)}, "v_scale.shape[0]", "5", "1 or 2"),
    # merge
    Bad("merge_state", {"output_a": f(3, 8)}, "output_a", "(3, 8)", "[T, H, D]"),
    Bad("merge_state", {"output_b": f(3, 2, 4, dtype=BF16)}, "output_b.dtype", "bfloat16", "float32"),
    Bad("merge_state", {"lse_a": f(3, 2, dtype=F64)}, "lse_a.dtype", "float64", "float32"),
    Bad("merge_state", {"lse_b": f(2, 3)}, "lse_b.shape[0]", "2", "3 (T, as output_a.shape[0])"),
    Bad("merge_state", {"output_b": f(3, 2, 5)}, "output_b.shape[2]", "5", "4 (D, as output_a.shape[2])"),
    Bad("merge_states", {"outputs": f(3, 2, 4)}, "outputs", "(3, 2, 4)", "[T, N, H, D]"),
    Bad("merge_states", {"outputs": i(0).expand(3, 5, 2, 4)}, "outputs.dtype", "int32", "float16"),
    Bad("merge_states", {"lses": f(3, 5, 2, dtype=BF16)}, "lses.dtype", "bfloat16", "float32"),
    Bad("merge_states", {"lses": f(3, 4, 2)}, "lses.shape[1]", "4", "5 (N, as outputs.shape[1])"),
    Bad("merge_states", {"outputs": f(3, 0, 2, 4), "lses": f(3, 0, 2)}, "outputs.shape[1]", "0", ">= 1 part"),
    Bad("merge_states", {"lses": f(3, 5, 2).to("meta")}, "lses.device", "meta", "cpu"),
    Bad("merge_states", {"kernel": "fa3"}, "kernel", "'fa3'", "op merge_states", UnknownKernel),
    # vertical-slash
    Bad("vertical_slash_indexes", {"q_lens": i(2, 70, dtype=I64)}, "q_lens.dtype", "int64", "int32"),
    Bad("vertical_slash_indexes", {"k_lens": i(3)}, "k_lens.shape[0]", "1", "2 (B, as q_lens.shape[0])"),
    Bad("vertical_slash_indexes", {"vertical": i(0, 4).expand(4, 2)}, "vertical", "(4, 2)", "[B, H, V]"),
    Bad("vertical_slash_indexes", {"slash": i(0).expand(2, 3, 1)}, "slash.shape[1]", "3", "4 (H, as vertical.shape[1])"),
    Bad("vertical_slash_indexes", {"slash": i(0).expand(1, 4, 1)}, "slash.shape[0]", "1", "2 (B, as q_lens.shape[0])"),
    Bad("vertical_slash_indexes", {"slash": i().expand(2, 4, 0)}, "slash.shape[2]", "0", ">= 1"),
    Bad("vertical_slash_indexes", {"slash_counts": i(1, 1, 1, 1)}, "vertical_counts, slash_counts", "one of them", "both or neither"),
    Bad("vertical_slash_indexes", {"vertical_counts": i(1), "slash_counts": i(1)}, "vertical_counts.shape[0]", "1", "4 (H, as vertical"),
    Bad("vertical_slash_indexes", {"max_seqlen_q": -1}, "max_seqlen_q", "-1", ">= 0"),
    Bad("vertical_slash_attention", {"query": f(1, 3, 4, 8)}, "query", "(1, 3, 4, 8)", "[T, Hq, D]"),
    Bad("vertical_slash_attention", {"key": f(5, 2, 8, dtype=BF16)}, "key.dtype", "bfloat16", "float32"),
    Bad("vertical_slash_attention", {"value": f(4, 2, 6)}, "value.shape[0]", "4", "5 (N, as key.shape[0])"),
    Bad("vertical_slash_attention", {"cu_seqlens_k": i(0, 5)}, "cu_seqlens_k.shape[0]", "2", "3 (B + 1)"),
    Bad("vertical_slash_attention", {"max_seqlen_q": 65}, "block_count.shape[2]", "1", "2 ((max_seqlen_q + 63) // 64)"),
    Bad("vertical_slash_attention", {"query": f(3, 2, 8)}, "block_count.shape[1]", "4", "2 (Hq, as query.shape[1])"),
    Bad("vertical_slash_attention", {"indexes": 3}, "indexes", "int", "the four tensors"),
    Bad("vertical_slash_attention", {"max_seqlen_k": -1}, "max_seqlen_k", "-1", ">= 0"),
    Bad("vertical_slash_attention", {"scale": NAN}, "scale", "nan", "finite"),
    Bad("vertical_slash_attention", {"output": f(3, 4, 8)}, "output.shape[2]", "8", "6 (Dv, as value.shape[2])"),
    Bad("vertical_slash_attention", {"lse": f(4, 3)}, "lse.shape[0]", "4", "3 (T, as query.shape[0])"),
    Bad("vertical_slash_attention", {"kernel": "sgl_sparse"}, "head_dim", "head_dim=8", "(wants 128)", NoKernel),
    Bad("vertical_slash_attention", {"key": f(5, 2, 8).requires_grad_()}, "key", "requires_grad=True on key", "no gradient", NoGradient),
    # metadata
    Bad("cu_seqlens", {"lengths": f(2)}, "lengths.dtype", "float32", "int32 | int64"),
    Bad("cu_seqlens", {"lengths": i(1, 2).reshape(1, 2)}, "lengths", "(1, 2)", "[B]"),
    Bad("request_starts", {"begins": i(1, 0).reshape(1, 2)}, "begins.dtype", "int32", "bool"),
    Bad("request_starts", {"begins": torch.tensor([True])}, "begins", "(1,)", "[B, S]"),
    Bad("token_rows", {"cu_seqlens": i(0, 1, dtype=I64)}, "cu_seqlens.dtype", "int64", "int32"),
    Bad("token_rows", {"cu_seqlens": i()}, "cu_seqlens.shape[0]", "0", ">= 1"),
    Bad("token_rows", {"num_tokens": -1}, "num_tokens", "-1", ">= 0"),
    Bad("slot_mapping", {"rows": i(0)}, "rows.shape[0]", "1", "2 (T, as positions.shape[0])"),
    Bad("slot_mapping", {"page_size": 0}, "page_size", "0", ">= 1"),
    Bad("slot_mapping", {"page_table": i(0, 1)}, "page_table", "(2,)", "[B, max_pages]"),
    Bad("kv_indices", {"page_table": i(0, 1, dtype=I64).reshape(1, 2)}, "page_table.dtype", "int64", "int32"),
    Bad("kv_indices", {"seq_lens": i(3, 3)}, "seq_lens.shape[0]", "2", "1 (B, as page_table.shape[0])"),
    Bad("named_pages", {"page_table": i(0, 1)}, "page_table", "(2,)", "[B, max_pages]"),
    Bad("named_pages", {"seq_lens": i(3)}, "seq_lens.shape[0]", "1", "2 (B, as page_table.shape[0])"),
    Bad("named_pages", {"num_pages": -1}, "num_pages", "-1", ">= 0"),
    Bad("named_pages", {"page_size": 0}, "page_size", "0", ">= 1"),
    Bad("named_pages", {"window_left": -2}, "window_left", "-2", ">= -1"),
    Bad("decode_rows", {"page_table": i(0, 1)}, "page_table", "(2,)", "[B, max_pages]"),
    Bad("decode_rows", {"seq_lens": i(3)}, "seq_lens.shape[0]", "1", "2 (B, as page_table.shape[0])"),
    Bad("decode_rows", {"cu_seqlens_q": i(0, 1)}, "cu_seqlens_q.shape[0]", "2", "3 (B + 1)"),
    Bad("decode_rows", {"num_tokens": -1}, "num_tokens", "-1", ">= 0"),
    Bad("decode_rows", {"q_heads": -1}, "q_heads", "-1", ">= 0"),
    Bad("decode_rows", {"float8": True}, "float8", "True", "False without q_heads"),
    Bad("decode_rows", {"q_heads": 16, "kernel": "flashmla"}, "target", "target=cpu", "(wants sm90)", NoKernel),
    # rows that move
    Bad("copy_kv", {"k_pages": f(4, 2, 8)}, "k_pages", "(4, 2, 8)", "[L, P, page, ...]"),
    Bad("copy_kv", {"k_pages": f(2, 4, 0, 2, 8), "v_pages": f(2, 4, 0, 2, 6)}, "k_pages.shape[2]", "0", ">= 1 token a page"),
    Bad("copy_kv", {"k_pages": f(2, 4, 2, 2, 8, dtype=I32)}, "k_pages.dtype", "int32", "uint8"),
    Bad("copy_kv", {"v_pages": f(2, 4, 2, 8)}, "v_pages", "(2, 4, 2, 8)", "as the keys"),
    Bad("copy_kv", {"v_pages": f(2, 4, 2, 2, 6, dtype=BF16)}, "v_pages.dtype", "bfloat16", "float32, as k_pages"),
    Bad("copy_kv", {"v_pages": f(3, 4, 2, 2, 6)}, "v_pages.shape[0]", "3", "2 (L, as k_pages.shape[0])"),
    Bad("copy_kv", {"v_pages": f(2, 4, 2, 3, 6)}, "v_pages.shape[3]", "3", "2 (Hkv, as k_pages.shape[3])"),
    Bad("copy_kv", {"source": f(3)}, "source.dtype", "float32", "int32 | int64"),
    Bad("copy_kv", {"target": i(1, 2)}, "target.shape[0]", "2", "3 (N, as source.shape[0])"),
    Bad("copy_kv", {"k_pages": f(2, 4, 2, 2, 8).requires_grad_()}, "k_pages", "requires_grad=True on k_pages", "no gradient", NoGradient),
    Bad("copy_kv", {"kernel": "nope"}, "kernel", "'nope'", "op copy_kv", UnknownKernel),
    # plans
    Bad("plan_paged_attention", {"page_table": i(0, 1, 2, 3)}, "page_table", "(4,)", "[B, max_pages]"),
    Bad("plan_paged_attention", {"seq_lens": i(2, 3, 1)}, "seq_lens.shape[0]", "3", "2 (B, as page_table.shape[0])"),
    Bad("plan_paged_attention", {"cu_seqlens_q": i(0, 3)}, "cu_seqlens_q.shape[0]", "2", "3 (B + 1)"),
    Bad("plan_paged_attention", {"num_tokens": -1}, "num_tokens", "-1", ">= 0"),
    Bad("plan_paged_attention", {"plan": i(7, 7)}, "plan.dtype", "int32", "int64"),
    Bad("plan_paged_attention", {"workspace": f(8).to(torch.uint8)[::2]}, "workspace.stride()", "(2,)", "(1,)"),
    Bad("plan_paged_attention", {"workspace": f(3)}, "workspace.dtype", "float32", "uint8"),
    Bad("plan_paged_attention", {"spec": replace(SPEC, q_heads=3)}, "q_heads", "3", "a multiple of kv_heads = 2"),
    Bad("plan_paged_attention", {"spec": replace(SPEC, window=(-4, 1))}, "window_left", "-4", ">= -1"),
    Bad("plan_paged_attention", {"spec": replace(SPEC, dtype=I32)}, "dtype", "'int32'", "float16 | bfloat16"),
    Bad("plan_paged_attention", {"kernel": "flashinfer"}, "target", "target=cpu", "(wants sm80", NoKernel),
    Bad("plan_mla_attention", {"seq_lens": i(2, 3, 1)}, "seq_lens.shape[0]", "3", "2 (B, as page_table.shape[0])"),
    Bad("plan_mla_attention", {"num_tokens": -1}, "num_tokens", "-1", ">= 0"),
    Bad("plan_mla_attention", {"plan": i(7, 7)}, "plan.dtype", "int32", "int64"),
    Bad("plan_mla_attention", {"spec": replace(LATENTS, head_dim=512)}, "head_dim", "512", "> v_head_dim = 512"),
    Bad("plan_mla_attention", {"spec": replace(LATENTS, dtype=I32)}, "dtype", "'int32'", "float16 | bfloat16"),
    Bad("plan_mla_attention", {"kernel": "flashinfer_mla_fa3"}, "target", "target=cpu", "(wants sm90", NoKernel),
    # kernels asked for by name
    Bad("attention", {"kernel": "fa9"}, "kernel", "'fa9'", "one of", UnknownKernel),
    Bad("attention", {"kernel": "scatter"}, "kernel", "'scatter'", "reference", UnknownKernel),
    Bad("attention", {"kernel": "sdpa", "softcap": 1.0, "sinks": f(4)}, "softcap", "softcap=True", "sinks=True", NoKernel),
    Bad("varlen_attention", {"kernel": "sdpa", "return_lse": True}, "lse", "lse=True", "'sdpa' was asked for", NoKernel),
    Bad("paged_attention", {"kernel": "sdpa", "lse": f(3, 4)}, "lse", "lse=True", "(wants no)", NoKernel),
    Bad("paged_attention", {"kernel": "sdpa", "temperature": f(3)}, "temperature", "temperature=True", "(wants no", NoKernel),
    Bad("write_kv", {"kernel": "nope"}, "kernel", "'nope'", "op write_kv", UnknownKernel),
    # gradients of what has none
    Bad("paged_attention", {"query": f(3, 4, 8).requires_grad_()}, "query", "requires_grad=True on query", "no gradient", NoGradient),
    Bad("paged_attention", {"temperature": f(3).requires_grad_()}, "temperature", "requires_grad=True on temperature", "no gradient",
        NoGradient),
    Bad("write_kv", {"key": f(3, 2, 8).requires_grad_()}, "key", "requires_grad=True on key", "torch.no_grad()", NoGradient),
    # latents
    Bad("mla_attention", {"q_nope": f(3, 24)}, "q_nope", "(3, 24)", "[T, H, Dc]"),
    Bad("mla_attention", {"q_nope": f(3, 4, 6, dtype=torch.float8_e5m2)}, "q_nope.dtype", "float8_e5m2", "bfloat16"),
    Bad("mla_attention", {"q_pe": f(3, 4, 2, dtype=BF16)}, "q_pe.dtype", "bfloat16", "float32"),
    Bad("mla_attention", {"q_pe": f(2, 4, 2)}, "q_pe.shape[0]", "2", "3 (T, as q_nope.shape[0])"),
    Bad("mla_attention", {"q_pe": f(3, 2, 2)}, "q_pe.shape[1]", "2", "4 (H, as q_nope.shape[1])"),
    Bad("mla_attention", {"latent_pages": f(4, 2, 1, 8)}, "latent_pages", "(4, 2, 1, 8)", "[P, page, Dc + Dr]"),
    Bad("mla_attention", {"latent_pages": f(4, 2, 6)}, "latent_pages.shape[2]", "6", "8 (Dc + Dr)"),
    Bad("mla_attention", {"latent_pages": f(4, 0, 8)}, "latent_pages.shape[1]", "0", ">= 1 token a page"),
    Bad("mla_attention", {"latent_pages": f(4, 2, 8, dtype=BF16)}, "latent_pages.dtype", "bfloat16", "float32 | float8_e4m3fn | int8"),
    Bad("mla_attention", {"latent_pages": f(4, 2, 8).to(INT8)}, "kv_scale", "None", "because the latents are int8"),
    Bad("mla_attention", {"kv_scale": f(2)}, "kv_scale.shape[0]", "2", "1"),
    Bad("mla_attention", {"q_scale": f(1)}, "q_scale", "a tensor", "None, because the query is float32"),
    Bad("mla_attention", {"q_scale": f(1, dtype=F64)}, "q_scale.dtype", "float64", "float32"),
    Bad("mla_attention", {"seq_lens": i(2, 3, 1)}, "seq_lens.shape[0]", "3", "2 (B, as page_table.shape[0])"),
    Bad("mla_attention", {"cu_seqlens_q": i(0, 3)}, "cu_seqlens_q.shape[0]", "2", "3 (B + 1)"),
    Bad("mla_attention", {"mask": f(3, 3)}, "mask.shape[1]", "3", ">= 4 (max_pages * page)"),
    Bad("mla_attention", {"output": f(3, 4, 8)}, "output.shape[2]", "8", "6 (Dc, as q_nope.shape[2])"),
    Bad("mla_attention", {"lse": f(4, 3)}, "lse.shape[0]", "4", "3 (T, as q_nope.shape[0])"),
    Bad("mla_attention", {"scale": NAN}, "scale", "nan", "finite"),
    Bad("mla_attention", {"window_left": -2}, "window_left", "-2", ">= -1"),
    Bad("mla_attention", {"max_seqlen_q": -1}, "max_seqlen_q", "-1", ">= 0"),
    Bad("mla_attention", {"kernel": "flashmla"}, "target", "target=cpu", "(wants sm90)", NoKernel),
    Bad("mla_attention", {"q_pe": f(3, 4, 2).requires_grad_()}, "q_pe", "requires_grad=True on q_pe", "no gradient", NoGradient),
    Bad("write_latent", {"latent": f(3, 1, 6)}, "latent", "(3, 1, 6)", "[T, Dc]"),
    Bad("write_latent", {"k_pe": f(2, 2)}, "k_pe.shape[0]", "2", "3 (T, as latent.shape[0])"),
    Bad("write_latent", {"slots": i(0, 1)}, "slots.shape[0]", "2", "3 (T, as latent.shape[0])"),
    Bad("write_latent", {"latent_pages": f(4, 2, 9)}, "latent_pages.shape[2]", "9", "8 (Dc + Dr)"),
    Bad("write_latent", {"latent_pages": f(4, 2, 8).to(E4M3)}, "kv_scale", "None", "because the latents are float8_e4m3fn"),
    Bad("write_latent", {"latent_pages": f(4, 2, 8).to(torch.float8_e5m2)}, "latent_pages.dtype", "float8_e5m2", "float8_e4m3fn"),
    Bad("write_latent", {"latent": f(3, 6).to(E4M3), "k_pe": f(3, 2).to(E4M3)},
        "latent_pages.dtype", "float32", "float8_e4m3fn, as the latents"),
    Bad("write_latent", {"latent": f(3, 6).to(INT8), "k_pe": f(3, 2).to(INT8), "latent_pages": f(4, 2, 8).to(INT8), "kv_scale": f(1)},
        "kv_scale", "a tensor", "None, because the latents are int8 already"),
    Bad("write_latent", {"latent": f(3, 6).to(E4M3)}, "k_pe.dtype", "float32", "float8_e4m3fn"),
    Bad("write_latent", {"latent": f(3, 6, dtype=torch.float8_e5m2)}, "latent.dtype", "float8_e5m2", "float8_e4m3fn | int8"),
    # rotated and quantised
    Bad("rope_quantize_latent", {"q_nope": f(3, 24)}, "q_nope", "(3, 24)", "[T, H, Dc]"),
    Bad("rope_quantize_latent", {"q_nope": f(3, 4, 6).to(E4M3)}, "q_nope.dtype", "float8_e4m3fn", "bfloat16"),
    Bad("rope_quantize_latent", {"q_pe": f(3, 4, 2, dtype=BF16)}, "q_pe.dtype", "bfloat16", "float32"),
    Bad("rope_quantize_latent", {"q_pe": f(3, 3, 2)}, "q_pe.shape[1]", "3", "4 (H, as q_nope.shape[1])"),
    Bad("rope_quantize_latent", {"q_pe": f(3, 4, 3), "k_pe": f(3, 3), "cos_sin": f(9, 3)}, "q_pe.shape[2]", "3", "even"),
    Bad("rope_quantize_latent", {"q_pe": f(3, 4, 0), "k_pe": f(3, 0), "cos_sin": f(9, 0)}, "q_pe.shape[2]", "0", ">= 2"),
    Bad("rope_quantize_latent", {"latent": f(2, 6)}, "latent.shape[0]", "2", "3 (T, as q_nope.shape[0])"),
    Bad("rope_quantize_latent", {"latent": f(3, 5)}, "latent.shape[1]", "5", "6 (Dc, as q_nope.shape[2])"),
    Bad("rope_quantize_latent", {"k_pe": f(3, 1, 2)}, "k_pe", "(3, 1, 2)", "[T, Dr]"),
    Bad("rope_quantize_latent", {"cos_sin": f(9, 1)}, "cos_sin.shape[1]", "1", "2 (Dr, as q_pe.shape[2])"),
    Bad("rope_quantize_latent", {"cos_sin": f(9, 2, dtype=BF16)}, "cos_sin.dtype", "bfloat16", "float32"),
    Bad("rope_quantize_latent", {"positions": f(3)}, "positions.dtype", "float32", "int32 | int64"),
    Bad("rope_quantize_latent", {"positions": i(0, 1)}, "positions.shape[0]", "2", "3 (T, as q_nope.shape[0])"),
    Bad("rope_quantize_latent", {"positions": i(0, 1, 2).to("meta")}, "positions.device", "meta", "cpu"),
    Bad("rope_quantize_latent", {"q_scale": 0.0}, "q_scale", "0.0", "a finite number > 0"),
    Bad("rope_quantize_latent", {"kv_scale": NAN}, "kv_scale", "nan", "a finite number"),
    Bad("rope_quantize_latent", {"kernel": "flashinfer_rope"}, "target", "target=cpu", "(wants sm89", NoKernel),
    Bad("rope_quantize_latent", {"k_pe": f(3, 2).requires_grad_()}, "k_pe", "requires_grad=True on k_pe", "no gradient", NoGradient),
    # picked latents, packed latents
    Bad("sparse_mla_attention", {"q_nope": f(3, 512)}, "q_nope", "(3, 512)", "[T, H, Dc]"),
    Bad("sparse_mla_attention", {"q_pe": f(3, 3, 2)}, "q_pe.shape[1]", "3", "4 (H, as q_nope.shape[1])"),
    Bad("sparse_mla_attention", {"indices": f(3, 2)}, "indices.dtype", "float32", "int32"),
    Bad("sparse_mla_attention", {"indices": i(0, 1).reshape(1, 2)}, "indices.shape[0]", "1", "3 (T, as q_nope.shape[0])"),
    Bad("sparse_mla_attention", {"indices": i(0, 1, 2).reshape(3, 1, 1)}, "indices", "(3, 1, 1)", "[T, topk]"),
    Bad("sparse_mla_attention", {"topk_length": i(0, 1)}, "topk_length.shape[0]", "2", "3 (T, as q_nope.shape[0])"),
    Bad("sparse_mla_attention", {"topk_length": i(0, 1, 2, dtype=I64)}, "topk_length.dtype", "int64", "int32"),
    Bad("sparse_mla_attention", {"sinks": f(2)}, "sinks.shape[0]", "2", "4 (H, as q_nope.shape[1])"),
    Bad("sparse_mla_attention", {"latent_pages": f(4, 2, 130, dtype=U8)}, "latent_pages.shape[2]", "130", "136 (bytes of a packed latent)"),
    Bad("sparse_mla_attention", {"latent_pages": f(4, 0, 136, dtype=U8)}, "latent_pages.shape[1]", "0", ">= 1 token a page"),
    Bad("sparse_mla_attention", {"latent_pages": f(8, 136, dtype=U8)}, "latent_pages", "(8, 136)", "[P, page, numbers]"),
    Bad("sparse_mla_attention", {"latent_pages": f(4, 2, 136)}, "latent_pages.shape[2]", "136", "130 (Dc + Dr)"),
    Bad("sparse_mla_attention", {"latent_pages": f(4, 2, 130, dtype=BF16)}, "latent_pages.dtype", "bfloat16", "float32 | float8_e4m3fn"),
    Bad("sparse_mla_attention", {"latent_pages": f(4, 2, 130).to(E4M3)}, "kv_scale", "None", "because the latents are float8_e4m3fn"),
    Bad("sparse_mla_attention", {"kv_scale": f(1)}, "kv_scale", "a tensor", "None, because packed pages hold their own"),
    Bad("sparse_mla_attention", {"q_nope": f(3, 4, 16), "output": f(3, 4, 16)}, "q_nope.shape[2]", "16", "a multiple of 128"),
    Bad("sparse_mla_attention", {"scale": NAN}, "scale", "nan", "finite"),
    Bad("sparse_mla_attention", {"output": f(3, 4, 130)}, "output.shape[2]", "130", "128 (Dc, as q_nope.shape[2])"),
    Bad("sparse_mla_attention", {"lse": f(4, 3)}, "lse.shape[0]", "4", "3 (T, as q_nope.shape[0])"),
    Bad("sparse_mla_attention", {"plan": f(3)}, "plan.dtype", "float32", "int32 | int64"),
    Bad("sparse_mla_attention", {"kernel": "flashmla"}, "target", "target=cpu", "(wants sm90 | sm100)", NoKernel),
    Bad("sparse_mla_attention", {"q_pe": f(3, 4, 2).requires_grad_()}, "q_pe", "requires_grad=True on q_pe", "no gradient", NoGradient),
    Bad("write_latent_packed", {"latent": f(3, 100)}, "latent.shape[1]", "100", "a multiple of 128 (pages are packed)"),
    Bad("write_latent_packed", {"latent": f(3, 1, 128)}, "latent", "(3, 1, 128)", "[T, Dc]"),
    Bad("write_latent_packed", {"k_pe": f(2, 2)}, "k_pe.shape[0]", "2", "3 (T, as latent.shape[0])"),
    Bad("write_latent_packed", {"slots": i(0, 1)}, "slots.shape[0]", "2", "3 (T, as latent.shape[0])"),
    Bad("write_latent_packed", {"latent_pages": f(4, 2, 136)}, "latent_pages.dtype", "float32", "uint8"),
    Bad("write_latent_packed", {"latent_pages": f(4, 2, 656, dtype=U8)}, "latent_pages.shape[2]", "656", "136 (bytes of a packed latent)"),
    Bad("write_latent_packed", {"k_pe": f(3, 2).requires_grad_()}, "k_pe", "requires_grad=True on k_pe", "no gradient", NoGradient),
    # experts
    Bad("experts", {"x": f(3, 2, 8)}, "x", "(3, 2, 8)", "[T, In]"),
    Bad("experts", {"x": f(3, 7)}, "gate_up.shape[2]", "8", "7 (In, as x.shape[1])"),
    Bad("experts", {"x": f(3, 8, dtype=I32)}, "x.dtype", "int32", "float16 | bfloat16"),
    Bad("experts", {"gate_up": f(10, 8)}, "gate_up", "(10, 8)", "[E, 2 Inner, In]"),
    Bad("experts", {"gate_up": f(4, 11, 8)}, "gate_up.shape[1]", "11", "10 (2 * Inner)"),
    Bad("experts", {"gate_up": f(4, 10, 8, dtype=BF16)}, "gate_up.dtype", "bfloat16", "float32, as x"),
    Bad("experts", {"gate_up": f(4, 10, 8).to("meta")}, "gate_up.device", "meta", "cpu"),
    Bad("experts", {"down": f(6, 5)}, "down", "(6, 5)", "[E, Out, Inner]"),
    Bad("experts", {"down": f(3, 6, 5)}, "down.shape[0]", "3", "4 (E, as gate_up.shape[0])"),
    Bad("experts", {"top_k_index": torch.ones(3, 2)}, "top_k_index.dtype", "float32", "int32 | int64"),
    Bad("experts", {"top_k_index": torch.zeros(2, 2, dtype=torch.int64)}, "top_k_index.shape[0]", "2", "3 (T, as x.shape[0])"),
    Bad("experts", {"top_k_index": torch.zeros(3, 5, dtype=I32), "top_k_weights": f(3, 5)}, "top_k_index.shape[1]", "5", "<= 4"),
    Bad("experts", {"top_k_index": torch.tensor([[0, 4]] * 3)}, "top_k_index", "4", "0 to 3, the experts of gate_up"),
    Bad("experts", {"top_k_index": torch.tensor([[0, 1], [-1, 2], [0, 1]])}, "top_k_index", "-1", "0 to 3, the experts of gate_up"),
    Bad("experts", {"top_k_weights": f(3, 1)}, "top_k_weights.shape[1]", "1", "2 (K, as top_k_index.shape[1])"),
    Bad("experts", {"top_k_weights": torch.ones(3, 2, dtype=I32)}, "top_k_weights.dtype", "int32", "float16 | bfloat16"),
    Bad("experts", {"gate_up_bias": f(4, 5)}, "gate_up_bias.shape[1]", "5", "10 (2 * Inner)"),
    Bad("experts", {"down_bias": f(4, 6, dtype=F64)}, "down_bias.dtype", "float64", "float32, as x"),
    Bad("experts", {"activation": "relu"}, "activation", "'relu'", "silu | gelu | gelu_tanh"),
    Bad("experts", {"activation": "gelu", "alpha": 1.7}, "alpha", "1.7", "1, because activation is not 'silu'"),
    Bad("experts", {"limit": -1.0}, "limit", "-1.0", ">= 0"),
    Bad("experts", {"offset": NAN}, "offset", "nan", "a finite number"),
    Bad("experts", {"output": f(3, 5)}, "output.shape[1]", "5", "6 (Out, as down.shape[1])"),
    Bad("experts", {"kernel": "triton"}, "target", "target=cpu", "(wants CUDA, sm80", NoKernel),
    Bad("experts", {"down": f(4, 6, 5).requires_grad_()}, "down", "requires_grad=True on down", "no gradient", NoGradient),
    # route
    Bad("route", {"logits": f(8)}, "logits", "(8,)", "[T, E]"),
    Bad("route", {"logits": f(3, 8, dtype=I32)}, "logits.dtype", "int32", "float16 | bfloat16"),
    Bad("route", {"logits": f(3, 0), "bias": f(0)}, "top_k", "2", "1 to 0"),
    Bad("route", {"top_k": 9}, "top_k", "9", "1 to 8 (E, as logits.shape[1])"),
    Bad("route", {"top_k": 0}, "top_k", "0", "1 to 8"),
    Bad("route", {"top_k": 5}, "index.shape[1]", "5", "<= 4, the experts of top_groups groups"),
    Bad("route", {"top_k": 2.0}, "top_k", "2.0", "a value of type int"),
    Bad("route", {"bias": f(7)}, "bias.shape[0]", "7", "8 (E, as logits.shape[1])"),
    Bad("route", {"bias": f(3, 8)}, "bias", "(3, 8)", "[E]"),
    Bad("route", {"bias": f(8, dtype=I32)}, "bias.dtype", "int32", "float16 | bfloat16"),
    Bad("route", {"bias": f(8).to("meta")}, "bias.device", "meta", "cpu"),
    Bad("route", {"scoring": "relu"}, "scoring", "'relu'", "softmax | sigmoid"),
    Bad("route", {"groups": 3}, "groups", "3", "a divisor of 8 (E, as logits.shape[1])"),
    Bad("route", {"groups": 0}, "groups", "0", ">= 1"),
    Bad("route", {"groups": 1}, "top_groups", "2", "1, because groups is 1"),
    Bad("route", {"top_groups": 5}, "top_groups", "5", "<= 4 (groups)"),
    Bad("route", {"group_best": 3}, "group_best", "3", "<= 2, the experts of a group"),
    Bad("route", {"eps": 1e-20}, "eps", "1e-20", "0, because normalize is False"),
    Bad("route", {"eps": -1.0, "normalize": True}, "eps", "-1.0", ">= 0"),
    Bad("route", {"scale": NAN}, "scale", "nan", "a finite number"),
    Bad("route", {"dtype": I32}, "dtype", "int32", "float16"),
    Bad("route", {"kernel": "triton"}, "target", "target=cpu", "(wants CUDA, sm80", NoKernel),
    Bad("route", {"logits": f(3, 8).requires_grad_()}, "logits", "requires_grad=True on logits", "no gradient", NoGradient),
    # mxfp4_experts
    Bad("mxfp4_experts", {"x": f(3, 2, 64)}, "x", "(3, 2, 64)", "[T, In]"),
    Bad("mxfp4_experts", {"x": f(3, 64, dtype=torch.float16)}, "x.dtype", "float16", "bfloat16 | float32 | float64"),
    Bad("mxfp4_experts", {"gate_up": f(4, 128, 32)}, "gate_up.dtype", "float32", "uint8"),
    Bad("mxfp4_experts", {"gate_up": f(4, 128, 2, 16, dtype=U8)}, "gate_up", "(4, 128, 2, 16)", "[E, 2 Inner, In // 2]"),
    Bad("mxfp4_experts", {"gate_up": f(4, 128, 64, dtype=U8)}, "gate_up.shape[2]", "64", "32 (In // 2)"),
    Bad("mxfp4_experts", {"gate_up_scales": f(4, 128, 3, dtype=U8)}, "gate_up_scales.shape[2]", "3", "2 (In // 32)"),
    Bad("mxfp4_experts", {"gate_up_scales": f(4, 128, 2)}, "gate_up_scales.dtype", "float32", "uint8"),
    Bad("mxfp4_experts", {"down": f(4, 16, 16, dtype=U8)}, "gate_up.shape[1]", "128", "64 (4 * Half)"),
    Bad("mxfp4_experts", {"down": f(4, 16, 32, dtype=U8).to("meta")}, "down.device", "meta", "cpu"),
    Bad("mxfp4_experts", {"down_scales": f(4, 16, 1, dtype=U8)}, "down_scales.shape[2]", "1", "2 (Half // 16)"),
    Bad("mxfp4_experts", {
        "down": f(4, 20, 32, dtype=U8), "down_scales": f(4, 20, 2, dtype=U8), "down_bias": f(4, 20), "output": f(3, 20),
    }, "down.shape[1]", "20", "a multiple of 16"),
    Bad("mxfp4_experts", {
        "x": f(3, 32), "gate_up": f(4, 128, 16, dtype=U8), "gate_up_scales": f(4, 128, 1, dtype=U8),
    }, "x.shape[1]", "32", "a multiple of 64"),
    Bad("mxfp4_experts", {"top_k_index": torch.tensor([[0, 4]] * 3)}, "top_k_index", "4", "0 to 3, the experts of gate_up"),
    Bad("mxfp4_experts", {"gate_up_bias": f(4, 64)}, "gate_up_bias.shape[1]", "64", "128 (4 * Half)"),
    Bad("mxfp4_experts", {"limit": -1.0}, "limit", "-1.0", ">= 0"),
    Bad("mxfp4_experts", {"output": f(3, 5)}, "output.shape[1]", "5", "16 (Out, as down.shape[1])"),
    Bad("mxfp4_experts", {"kernel": "triton"}, "target", "target=cpu", "(wants CUDA, sm80", NoKernel),
    Bad("mxfp4_experts", {"x": f(3, 64).requires_grad_()}, "x", "requires_grad=True on x", "no gradient", NoGradient),
    # linear layers
    Bad("linear", {"x": f(3, 2, 7)}, "weight.shape[1]", "8", "7 (In, as x.shape[1])"),
    Bad("linear", {"x": torch.tensor(1.0)}, "x", "shape ()", "[..., In]"),
    Bad("linear", {"x": f(3, 2, 0), "weight": f(6, 0), "norm_weight": f(0)}, "x.shape[1]", "0", ">= 1 column"),
    Bad("linear", {"x": f(3, 2, 8, dtype=I32)}, "x.dtype", "int32", "float16 | bfloat16"),
    Bad("linear", {"weight": f(1, 6, 8)}, "weight", "(1, 6, 8)", "[Out, In]"),
    Bad("linear", {"weight": f(6, 8, dtype=BF16)}, "weight.dtype", "bfloat16", "float32, as x"),
    Bad("linear", {"weight": f(6, 8).to("meta")}, "weight.device", "meta", "cpu"),
    Bad("linear", {"weight": f(7, 8), "bias": f(7)}, "weight.shape[0]", "7", "a multiple of 2: rows of the gate"),
    Bad("linear", {"bias": f(3)}, "bias.shape[0]", "3", "6 (Out, as weight.shape[0])"),
    Bad("linear", {"norm_weight": f(6)}, "norm_weight.shape[0]", "6", "8 (In, as x.shape[1])"),
    Bad("linear", {"norm_weight": f(8, dtype=F64)}, "norm_weight.dtype", "float64", "float32, as x"),
    Bad("linear", {"norm_eps": -1e-5}, "norm_eps", "-1e-05", ">= 0"),
    Bad("linear", {"norm_eps": NAN}, "norm_eps", "nan", "a finite number"),
    Bad("linear", {"norm_eps": 0.0}, "norm_eps", "0.0", "> 0, because norm_weight is given"),
    Bad("linear", {"norm_weight": None}, "norm_eps", "1e-05", "0, because norm_weight is None"),
    Bad("linear", {"norm_weight": None, "norm_eps": 0.0, "norm_offset": 1.0}, "norm_offset", "1.0", "0, because norm_weight is None"),
    Bad("linear", {"activation": "relu"}, "activation", "'relu'", "silu | gelu | gelu_tanh"),
    Bad("linear", {"residual": f(3, 2, 6)}, "residual.shape[1]", "6", "3 (Out // 2 if activation else Out)"),
    Bad("linear", {"residual": f(6, 3)}, "residual", "shape (6, 3)", "3 dims, as x"),
    Bad("linear", {"residual": f(2, 3, 3)}, "residual.shape[0]", "2", "3, as x"),
    Bad("linear", {"output": f(3, 2, 6)}, "output.shape[1]", "6", "3 (Out // 2 if activation else Out)"),
    Bad("linear", {"output": f(2, 3, 3).transpose(0, 1)}, "output.stride()", "(3, 9, 1)", "one dim in memory"),
    Bad("linear", {"kernel": "triton"}, "target", "target=cpu", "(wants CUDA, sm80", NoKernel),
    Bad("linear", {"weight": f(6, 8).requires_grad_()}, "weight", "requires_grad=True on weight", "no gradient", NoGradient),
]  # fmt: skip


def name(bad: Bad) -> str:
    return f"{bad.function}-{bad.field}-{bad.got}".replace("[", "").replace("]", "")


def function(bad: Bad):
    return getattr(attnops, bad.function, None) or getattr(ops, bad.function)


WRITTEN = ("output", "lse", "k_pages", "v_pages", "latent_pages", "plan", "workspace")


@pytest.mark.parametrize("bad", BAD, ids=name)
def test_bad_input(bad):
    arguments = good(bad.function) | bad.change
    before = {n: arguments[n].clone() for n in WRITTEN if isinstance(arguments.get(n), Tensor)}
    with pytest.raises(bad.error) as caught:
        function(bad)(**arguments)
    text = str(caught.value)
    assert bad.got in text
    assert bad.want in text
    if bad.error is InvalidInput:
        assert caught.value.field == bad.field
        assert text == f"{bad.field}: got {caught.value.got}, want {caught.value.want}"
        assert bad.got in str(caught.value.got)
        assert bad.want in caught.value.want
    for n, held in before.items():
        assert torch.equal(arguments[n].view(torch.uint8), held.view(torch.uint8)), f"{n} was written"


def test_there_are_enough_of_them():
    assert len(BAD) >= 70
    assert len({name(b) for b in BAD}) == len(BAD)
    assert {b.function for b in BAD} == {o for o in ops.OPS if not o.endswith("_backward")}


@pytest.mark.parametrize("function_name", sorted({b.function for b in BAD}))
def test_the_good_call_is_good(function_name):
    function(Bad(function_name, {}, "", "", ""))(**good(function_name))


# A compiler runs the same check on fake tensors, or traces it; the user must still read the sentence, and find the error. One call of
# each kind. The functions that plan are left out: they are never compiled.
TRACED = [b for b in BAD if not b.function.startswith("plan_")]
COMPILED = [
    *{b.function: b for b in reversed(TRACED) if b.error is InvalidInput}.values(),
    *[b for b in TRACED if b.field in ("window", "indexes", "rule", "q_scale")],
    *[b for b in TRACED if b.field in ("softcap", "mask.shape[1]", "key.shape[3]", "k_scale, v_scale")],
    *[b for b in TRACED if b.error is not InvalidInput],
]

# After a graph break the call is an eager one, whatever is wrong with it: a call of each error, of what returns and of what writes.
BROKEN = [*{(b.function, b.error): b for b in reversed(TRACED) if b.function in ("attention", "write_kv")}.values()]


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    ("bad", "fullgraph"),
    [
        pytest.param(b, whole, id=f"{name(b)}-{how}")
        for bads, whole, how in ((COMPILED, True, "whole"), (BROKEN, False, "broken"))
        for b in bads
    ],
)
def test_message_and_error_survive_compilation(bad, fullgraph):
    arguments = good(bad.function) | bad.change
    before = {n: arguments[n].clone() for n in WRITTEN if isinstance(arguments.get(n), Tensor)}
    public = function(bad)
    with pytest.raises(Exception) as caught:  # Dynamo wraps it in an error of its own
        torch.compile(lambda: public(**arguments), backend="eager", fullgraph=fullgraph)()
    text = str(caught.value)
    assert type(find(caught.value)) is bad.error
    assert bad.got in text
    assert bad.want in text
    for n, held in before.items():
        assert torch.equal(arguments[n].view(torch.uint8), held.view(torch.uint8)), f"{n} was written"


# What the dispatcher would turn down without a word of the field, or what the public functions would trip over before the op's check.
FIRST = {name: next(n for n, v in good(name).items() if isinstance(v, Tensor)) for name in sorted({b.function for b in BAD})}
MALFORMED = [
    *((name, {field: given}, field, got, "a tensor") for name, field in FIRST.items() for given, got in ((None, "None"), ("x", "str"))),
    ("attention", {"value": [1.0]}, "value", "list", "a tensor [B, K, Hkv, Dv]"),
    ("attention", {"sinks": "causal"}, "sinks", "str", "a tensor [Hq]"),
    ("paged_attention", {"v_pages": None, "output": None}, "v_pages", "None", "a tensor"),
    ("attention", {"query": f(2, 3, 4, 0), "key": f(2, 5, 2, 0)}, "query.shape[3]", "0", ">= 1"),
    ("attention", {"query": f()}, "query", "shape ()", "[B, S, Hq, D]"),
    ("attention", {"scale": "1"}, "scale", "'1'", "a value of type float"),
    ("attention", {"scale": 10**400}, "scale", "1329 bits", "fits into 64 bits"),
    ("attention", {"window": (1.5, 0)}, "window_left", "1.5", "a value of type int"),
    ("attention", {"window": (-(2**63) - 1, 0)}, "window_left", "64 bits", ">= -1 that fits into 64 bits"),
    ("attention", {"causal": "yes"}, "causal", "'yes'", "a value of type bool"),
    ("varlen_attention", {"max_seqlen_q": 2.0}, "max_seqlen_q", "2.0", "a value of type int"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "field", "got", "want"), MALFORMED, ids=lambda v: v if isinstance(v, str) else None)
def test_what_no_dispatcher_takes_is_named(name, change, field, got, want):
    public, arguments = function(Bad(name, {}, "", "", "")), good(name) | change
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode(), pytest.raises(InvalidInput) as caught:
            public(**arguments)
        assert caught.value.field == field
        assert got in str(caught.value.got)
        assert want in caught.value.want


@pytest.mark.parametrize(
    ("change", "field"), [({"window_left": -2}, "window_left"), ({"softcap": NAN}, "softcap"), ({"scale": INF}, "scale")]
)
def test_torch_ops_check_the_same(change, field):
    given = {**good("attention"), "scale": 1.0, **change}
    with pytest.raises(InvalidInput) as caught:
        torch.ops.attnops.attention(**given)
    assert caught.value.field == field


def test_errors_are_ordinary_python_errors_too():
    q = f(1, 2, 2, 4)
    with pytest.raises(ValueError, match=r"^softcap: got -1.0, want >= 0"):
        attnops.attention(q, q, q, softcap=-1.0)
    with pytest.raises(RuntimeError, match="no gradient"):
        attnops.write_kv(f(1, 1, 2).requires_grad_(), f(1, 1, 2), f(1, 1, 1, 2), f(1, 1, 1, 2), i(0))


def test_a_backward_checks_what_it_is_given():
    q, k = f(2, 3, 4, 8), f(2, 5, 2, 8)
    lse = f(2, 3, 4)
    op = torch.ops.attnops.attention_backward.default
    with pytest.raises(InvalidInput, match=r"^query.shape\[1\]: got 3, want 2 \(S, as grad_output.shape\[1\]\)"):
        op(f(2, 2, 4, 8), None, q, k, k, f(2, 3, 4, 8), lse, scale=1.0)
    with pytest.raises(InvalidInput, match=r"^lse.shape\[2\]: got 3, want 4"):
        op(f(2, 3, 4, 8), None, q, k, k, f(2, 3, 4, 8), f(2, 3, 3), scale=1.0)
    with pytest.raises(InvalidInput, match=r"^grad_lse.dtype: got float64, want float32"):
        op(f(2, 3, 4, 8), f(2, 3, 4, dtype=F64), q, k, k, f(2, 3, 4, 8), lse, scale=1.0)
