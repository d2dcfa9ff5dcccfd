"""Stand-ins for the TensorRT-LLM entry points of flashinfer 0.7.2.post1: XQA, paged decode and
context, ragged prefill. Not the kernels.

The same parameters, argument checks and shape rules, the refusals in the package's words, and a
float32 body on the CPU. Where the real kernels read or write unpredictably, these raise; what the
real ones leave unwritten is NaN here; counters must be zero at every call and stay so, and the
scratch beside them is soiled. What the generated kernels do with NaN in a page's unused slots is
not known; these, like XQA's general kernel, load no such slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import ceil, log, sqrt
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.standins import body
from tests.standins.body import logits_of, visible
from tests.standins.checks import ALL, LAST, architecture, check, laid_out
from tests.standins.libraries import packages

SIGNATURES = {
    "decode.trtllm_batch_decode_with_kv_cache": (
        "query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale=1.0, "
        "bmm2_scale=1.0, window_left=-1, "
        "out=None, out_dtype=None, o_sf_scale=None, o_sf_vec_size=None, sinks=None, "
        "kv_layout='HND', enable_pdl=None, backend='auto', "
        "q_len_per_req=1, o_scale=1.0, mask=None, max_q_len=None, cum_seq_lens_q=None, "
        "skip_softmax_threshold_scale_factor=None, "
        "kv_cache_sf=None, uses_shared_paged_kv_idx=True, lse=None, return_lse=False, "
        "bmm1_scale_log2=None, "
        "multi_ctas_kv_counter_buffer=None, enable_block_sparse_attention=False, cp_world=1, "
        "cp_rank=0, causal_seqlens_kv_global=None, "
        "bf16q_fp8kv_transform_mode=None, request_order=None, request_order_plan=None"
    ),
    "prefill.trtllm_batch_context_with_kv_cache": (
        "query, kv_cache, workspace_buffer, block_tables, seq_lens, max_q_len, max_kv_len, "
        "bmm1_scale, bmm2_scale, batch_size, "
        "cum_seq_lens_q, cum_seq_lens_kv, window_left=-1, out=None, out_dtype=None, "
        "o_sf_scale=None, o_sf_vec_size=None, "
        "kv_layout='HND', enable_pdl=None, sinks=None, kv_cache_sf=None, "
        "skip_softmax_threshold_scale_factor=None, "
        "uses_shared_paged_kv_idx=True, causal=True, lse=None, return_lse=False, "
        "multi_ctas_kv_counter_buffer=None, "
        "use_fp16_softmax=None, uses_spcompress=None, backend='trtllm-gen'"
    ),
    "prefill.trtllm_ragged_attention_deepseek": (
        "query, key, value, workspace_buffer, seq_lens, max_q_len, max_kv_len, bmm1_scale, "
        "bmm2_scale, o_sf_scale, batch_size, "
        "window_left, cum_seq_lens_q, cum_seq_lens_kv, enable_pdl, is_causal, return_lse, "
        "attention_sinks=None, "
        "skip_softmax_threshold_scale_factor=None, out=None, lse=None, sage_attn_sfs=(None, "
        "None, None, None), "
        "num_elts_per_sage_attn_blk=(0, 0, 0, 0), backend='trtllm-gen', q_seq_lens_cpu=None, "
        "kv_seq_lens_cpu=None, "
        "use_fp16_softmax=None, uses_spcompress=None, skip_all_rows_active_check=True"
    ),
    "xqa.get_xqa_module": (
        "input_dtype, kv_cache_dtype, page_size, head_dim, head_group_ratio, use_sliding_window, "
        "output_dtype, q_seq_len, "
        "use_ragged_q=False"
    ),
}
"""Read from the package's source; annotations left out."""

XQA_SIGNATURE = (
    "run_sm90_fp8_mha, sm_count, num_kv_heads, sliding_win_size, q_scale, output, rcp_out_scale, "
    "q, sinks, k_cache, v_cache, k_sf_cache, "
    "v_sf_cache, page_table, max_seq_len, seq_lens, batch_size, kv_scale, semaphores, "
    "workspace_buffer, enable_pdl, q_seq_len, "
    "q_cu_seq_lens, mask"
)
"""Of `get_xqa_module(...).xqa`."""

WRAPPER_SIGNATURE = (
    "run_sm90_fp8_mha, sm_count, num_kv_heads, sliding_win_size, q_number, q_tensor, output, "
    "rcp_out_scale, q, sinks, k_cache, v_cache, "
    "k_sf_cache, v_sf_cache, page_table, max_seq_len, seq_lens, batch_size, kv_number, "
    "kv_tensor, q_seq_len, q_cu_seq_lens, mask, "
    "semaphores, workspace_buffer, enable_pdl"
)
"""Of `xqa_wrapper`, which the library exports (csrc/flashinfer_xqa_binding.cu)."""

SM_COUNT = 132
HALVES = (torch.float16, torch.bfloat16)
E4M3, F32, I32 = torch.float8_e4m3fn, torch.float32, torch.int32
LOG2E = 1 / log(2.0)
Called = list[tuple[str, dict[str, Any]]]


@contextmanager
def installed() -> Iterator[Called]:
    """`import flashinfer` finds the stand-ins within the block; yields the calls, each with its
    arguments by name."""
    calls: Called = []
    found = {
        path: _function(path.split(".")[1], parameters, BODIES[path], calls)
        for path, parameters in SIGNATURES.items()
    }
    found |= {
        "utils.get_device_sm_count": lambda device: SM_COUNT,
        "utils.device_support_pdl": lambda device: False,
    }
    parameters = SIGNATURES["xqa.get_xqa_module"].replace("q_seq_len,", "q_seq_len=1,")
    with TemporaryDirectory() as folder:
        make = partial(_Spec, Path(folder), calls)
        found["jit.xqa.gen_xqa_module"] = _function(
            "gen_xqa_module", parameters, lambda **m: make(m), []
        )
        with packages({f"flashinfer.{path}": function for path, function in found.items()}):
            yield calls


def _function(
    name: str, parameters: str, body: Callable[..., Any], calls: Called
) -> Callable[..., Any]:
    def run(given: dict[str, Any]) -> Any:
        calls.append((name, given))
        return body(calls=calls, **given) if name == "get_xqa_module" else body(**given)

    scope: dict[str, Any] = {"run": run}
    exec(f"def {name}({parameters}):\n    return run(locals())", scope)
    return scope[name]


def _trust(ok: bool, what: str) -> None:
    """What the real kernel takes on trust."""
    assert ok, f"the kernel would read or write what it should not: {what}"


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: int, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(output, lse in base 2) of one request: q `[n, Hq, D]`, k and v `[L, Hkv, D]`; NaN for a
    query that sees no key."""
    see = visible(q.shape[0], k.shape[0], k.shape[0], window - 1, 0 if causal else -1)
    out, alone, total = body.attend(
        q, v, logits_of(q, k, scale).masked_fill(~see, float("-inf")), sinks
    )
    return out.masked_fill((total == float("-inf")).T[..., None], float("nan")), alone.T * LOG2E


def _keys(pages: Tensor, ids: Tensor, length: int) -> Tensor:
    """`[length, Hkv, D]` of NHD pages. A page id outside the pool is what the GPU calls an illegal
    memory access."""
    ids = ids[: ceil(length / pages.shape[1])]
    _trust(bool(((ids >= 0) & (ids < pages.shape[0])).all()), "a page that does not exist")
    whole = (
        pages.view(torch.uint8)[ids.long()].view(pages.dtype)
        if pages.dtype.itemsize == 1
        else pages[ids.long()]
    )
    return whole.flatten(0, 1)[:length]


def _number(x: float | Tensor) -> float:
    if isinstance(x, Tensor):
        assert x.dtype == torch.float32 and x.numel() == 1
        return float(x)
    assert type(x) is float, "a Python float or a tensor"
    return x


# XQA ----------------------------------------------------------------------------------------------


def _get_xqa_module(calls: Called, **m: Any) -> SimpleNamespace:
    text = "Invalid dtype: {} for XQA, only float16 and bfloat16 input are supported"
    check(m["input_dtype"] in HALVES, text.format(m["input_dtype"]), ValueError)
    page, dim, group = m["page_size"], m["head_dim"], m["head_group_ratio"]
    check(
        page in (16, 32, 64, 128),
        f"Invalid page_size: {page}, only 16, 32, 64, 128 are supported",
        ValueError,
    )
    check(
        dim % 16 == 0 and 16 <= dim <= 512,
        f"Invalid head_dim: {dim}, must be divisible by 16 and in range [16, 512]",
        ValueError,
    )
    check(
        architecture() // 10 in (9, 10, 12),
        "XQA is only supported on SM90, SM100, SM120/SM121 GPUs",
    )
    padded = next(n for n in (64, 128, 256, 512) if dim <= n)
    check(2 * padded * -(-group // 16) * 16 <= 16 << 10, "static assertion failed: persistentQ")
    _trust(m["kv_cache_dtype"] in (m["input_dtype"], E4M3), "a cache of another dtype")
    _trust(
        m["output_dtype"] == m["input_dtype"] and m["q_seq_len"] == 1 and not m["use_ragged_q"],
        "this stand-in decodes one token",
    )

    def xqa(**a: Any) -> None:
        q, out, k, v, table, lens = (
            a[n] for n in ("q", "output", "k_cache", "v_cache", "page_table", "seq_lens")
        )
        assert not a["run_sm90_fp8_mha"] and a["q_seq_len"] == 1 and a["rcp_out_scale"] == 1.0, (
            "this stand-in has the general kernel only"
        )
        batch, kv_heads, sinks = a["batch_size"], a["num_kv_heads"], a["sinks"]
        row, pages = "batch, 1, kv_heads * group, dim", "pages, page, kv_heads, dim"
        laid_out(
            sizes={"batch": batch, "page": page, "kv_heads": kv_heads, "group": group, "dim": dim},
            q=(q, row, m["input_dtype"], ALL),
            output=(out, row, m["input_dtype"], ALL),
            k_cache=(k, pages, m["kv_cache_dtype"], LAST),
            v_cache=(v, pages, m["kv_cache_dtype"], LAST),
            page_table=(table, "batch, columns", I32, ALL),
            seq_lens=(lens, "batch, 1", torch.uint32, ALL),
            sinks=(sinks, "kv_heads, group", F32, ALL),
        )
        _trust(k.stride() == v.stride(), "the strides of K serve for V")
        _trust(all(s % dim == 0 for s in k.stride()[:3]), "strides count in heads")
        _trust(a["max_seq_len"] == table.shape[1] * page, "max_seq_len")
        _trust(
            (a["sliding_win_size"] > 0) == m["use_sliding_window"], "a module for another window"
        )
        parts = min(max(1, a["sm_count"] // (batch * kv_heads)), ceil(a["max_seq_len"] / 256))
        if parts > 1:
            rows = -(-group // 16) * 16
            used = parts * batch * kv_heads * (2 * 128 * -(-rows // 32) + 2 * group * dim)
            _soil(a["semaphores"], a["workspace_buffer"], 4 * batch * kv_heads, used)
        quantised = k.dtype == E4M3
        v_scale = _number(a["kv_scale"]) if quantised else 1.0
        scale = _number(a["q_scale"]) * v_scale / sqrt(dim)
        for b, length in enumerate(lens[:, 0].tolist()):
            if length == 0:
                out[b] = float("nan") if parts > 1 and sinks is None else 0.0
                continue
            keys, values = _keys(k, table[b], length), _keys(v, table[b], length)
            logits = None if sinks is None else sinks.flatten()
            out[b] = (
                _attend(q[b], keys, values, scale, False, a["sliding_win_size"], logits)[0]
                * v_scale
            ).to(out.dtype)

    return SimpleNamespace(xqa=_function("xqa", XQA_SIGNATURE, xqa, calls))


class _Spec:
    """What `gen_xqa_module` gives. A file that was loaded is not loaded again: its static variables
    are those of the first time."""

    def __init__(self, folder: Path, calls: Called, module: dict[str, Any]) -> None:
        self.path, self.calls, self.module = folder / "xqa.so", calls, module

    def get_library_path(self) -> Path:
        return self.path

    def build_and_load(self) -> Any:
        self.path.touch()
        return self.load(self.path)

    def load(self, so_path: Path | str) -> Any:
        path, body = Path(so_path), _get_xqa_module(self.calls, **self.module)
        check(path.is_file(), f"cannot open {path}")
        self.calls.append(("load", {"path": path}))

        def xqa_wrapper(
            q_number: Any, q_tensor: Any, kv_number: Any, kv_tensor: Any, **a: Any
        ) -> None:
            assert type(q_number) is float and type(kv_number) is float, "the library takes doubles"
            scales = {
                "q_scale": q_number if q_tensor is None else q_tensor,
                "kv_scale": kv_number if kv_tensor is None else kv_tensor,
            }
            body.xqa(**a, **scales)

        return SimpleNamespace(
            xqa_wrapper=_function("xqa_wrapper", WRAPPER_SIGNATURE, xqa_wrapper, self.calls)
        )


def counter_bytes(rows: int) -> int:
    """The counters of so many rows, a row a request and head: 4 bytes each, for the GPU's SMs at
    least."""
    return 4 * -(-max(rows, SM_COUNT) // 8) * 8


def stats_bytes(heads: int, batch: int, longest: int) -> int:
    """The softmax's statistics, for tiles of 256 queries."""
    return 8 * heads * batch * (-(-longest // 256) * 256) + (1 << 20)


def _soil(counters: Tensor, scratch: Tensor, counted: int, used: int) -> None:
    _trust(
        counters.numel() >= counted and scratch.numel() >= used,
        f"{counters.numel()} and {scratch.numel()} bytes for {counted}, {used}",
    )
    _trust(not counters.any(), "counters that are not zero")
    scratch[:used] = 0xFF


# The generated kernels ----------------------------------------------------------------------------


def _paged(
    a: dict[str, Any], phase: str, batch: int, longest: int, causal: bool, scale: float
) -> None:
    query, (k, v), out, lse, sinks = a["query"], a["kv_cache"], a["out"], a["lse"], a["sinks"]
    table = a["block_tables"]
    lens = a["seq_lens"]
    cu = a["cum_seq_lens_q"]
    counters = a["multi_ctas_kv_counter_buffer"]
    assert (
        a["kv_layout"] == "NHD"
        and out is not None
        and not a["return_lse"]
        and a["uses_shared_paged_kv_idx"]
    )
    mixed = (E4M3,) if (phase, query.dtype) == ("decode", torch.bfloat16) else ()
    s = laid_out(
        sizes={"batch": batch, "needed": (needed := counter_bytes(batch * query.shape[1]))},
        query=(query, "tokens, heads, dim", HALVES, LAST),
        k=(k, "pages, page, kv_heads, dim", (query.dtype, *mixed), LAST),
        v=(v, "pages, page, kv_heads, dim", k.dtype, LAST),
        out=(out, "tokens, heads, dim", query.dtype, ALL),
        lse=(lse, "tokens, heads", F32, ""),
        sinks=(sinks, "heads", F32, ""),
        block_tables=(table, "batch, columns", I32, ALL),
        seq_lens=(lens, "batch", I32, ALL),
        cum_seq_lens_q=(cu, "batch + 1", I32, ALL),
        cum_seq_lens_kv=(a.get("cum_seq_lens_kv"), "batch + 1", I32, ALL),
        counters=(counters, ">= needed", torch.uint8, ALL),
    )
    heads, dim, page = s.heads, s.dim, s.page
    check(heads % s.kv_heads == 0, "num_qo_heads must be a multiple of num_kv_heads")
    check(page & (page - 1) == 0, "NumTokensPerPage must be power of 2")
    check(
        architecture() in (100, 103) and page >= 16 and dim in (64, 128, 256),
        f"Missing TRTLLM-GEN kernel ({phase})",
    )
    _trust(k.stride() == v.stride(), "strides")
    _trust(
        bool((lens > 0).all()) and bool((table >= 0).all()),
        "requests without keys, pages that are none",
    )
    stats = 0
    if lse is not None:
        stats = stats_bytes(heads, batch, longest)
        check(
            a["workspace_buffer"].numel() >= stats,
            "Buffer overflow when allocating memory for trtllm_gen_softmax_workspace",
        )
    blocks = SM_COUNT * 256 * (2 * dim + 8) if phase == "decode" else 0
    _soil(counters, a["workspace_buffer"], needed if phase == "decode" else 0, stats + blocks)
    v_scale = _number(a["bmm2_scale"])
    out.fill_(float("nan"))
    for b, length in enumerate(lens.tolist()):
        rows = slice(int(cu[b]), int(cu[b + 1]))
        keys, values = _keys(k, table[b], length), _keys(v, table[b], length)
        found_out, found_lse = _attend(
            query[rows], keys, values, scale, causal, a["window_left"] + 1, sinks
        )
        out[rows] = (found_out * v_scale).to(out.dtype)
        if lse is not None:
            lse[rows] = found_lse


def _decode(**a: Any) -> Tensor:
    assert a["q_len_per_req"] is None and a["mask"] is None and a["backend"] == "trtllm-gen"
    _trust(
        a["max_seq_len"] == a["block_tables"].shape[1] * a["kv_cache"][0].shape[1], "max_seq_len"
    )
    if (given := a["bmm1_scale_log2"]) is not None:
        check(
            given.dtype == torch.float32,
            "bmm1_scale_log2 tensor must have dtype torch.float32",
            TypeError,
        )
        check(given.numel() == 1, "bmm1_scale_log2 must be a single-element tensor", ValueError)
    scale = _number(a["bmm1_scale"]) if given is None else float(given) / LOG2E
    _paged(a, "decode", a["cum_seq_lens_q"].shape[0] - 1, a["max_q_len"], True, scale)
    return a["out"]


def _context(**a: Any) -> Tensor:
    text = "Sliding-window non-causal attention is not supported for trtllm-gen paged KV cache. "
    check(a["causal"] or a["window_left"] < 0, text, NotImplementedError)
    _trust(
        a["cum_seq_lens_kv"].tolist() == [0, *a["seq_lens"].cumsum(0).tolist()], "cum_seq_lens_kv"
    )
    _paged(a, "context", a["batch_size"], a["max_q_len"], a["causal"], _number(a["bmm1_scale"]))
    return a["out"]


def _ragged(**a: Any) -> Any:
    query, key, value, out, lse = (a[n] for n in ("query", "key", "value", "out", "lse"))
    cu_q = a["cum_seq_lens_q"]
    cu_k = a["cum_seq_lens_kv"]
    lens = a["seq_lens"]
    batch = a["batch_size"]
    laid_out(
        sizes={"batch": batch},
        query=(query, "tokens, heads, dim", HALVES, ALL),
        key=(key, "keys, kv_heads, dim", query.dtype, LAST),
        value=(value, "keys, kv_heads, dv", query.dtype, LAST),
        out=(out, "tokens, heads, dv", query.dtype, ALL),
        seq_lens=(lens, "batch", I32, ALL),
        cum_seq_lens_q=(cu_q, "batch + 1", I32, ALL),
        cum_seq_lens_kv=(cu_k, "batch + 1", I32, ALL),
    )
    dims = (query.shape[2], key.shape[2], value.shape[2])
    supported = (
        "Supported: (192, 192, 128) for DeepSeek-R1, (128, 128, 128), or (256, 256, 256) for GLM-5."
    )
    check(
        dims in ((192, 192, 128), (128, 128, 128), (256, 256, 256)),
        f"Unsupported head dimensions. {supported}",
        AssertionError,
    )
    check(query.shape[1] % key.shape[1] == 0, "num_qo_heads must be a multiple of num_kv_heads")
    check(architecture() in (100, 103), "Missing TRTLLM-GEN kernel")
    _trust(bool((lens > 0).all()), "a request without keys")
    _trust(not value.isnan().any(), "what follows a request's values is multiplied by 0")
    _trust(a["is_causal"] or a["window_left"] < 0, "a window without causality")
    assert (
        a["return_lse"] == (lse is not None)
        and a["attention_sinks"] is None
        and a["skip_all_rows_active_check"]
    )
    stats = stats_bytes(query.shape[1], batch, a["max_q_len"]) if a["return_lse"] else 0
    check(
        a["workspace_buffer"].numel() >= stats,
        "Buffer overflow when allocating memory for trtllm_gen_softmax_workspace",
    )
    _trust(not a["workspace_buffer"].any(), "a workspace that is not zero")
    out.fill_(float("nan"))
    for b, length in enumerate(lens.tolist()):
        rows = slice(int(cu_q[b]), int(cu_q[b + 1]))
        keys = slice(int(cu_k[b]), int(cu_k[b]) + length)
        if key[keys].shape[0] < length:
            continue  # past the last key there are zeros
        found = _attend(
            query[rows],
            key[keys],
            value[keys],
            _number(a["bmm1_scale"]),
            a["is_causal"],
            a["window_left"] + 1,
            None,
        )
        out[rows] = found[0].to(out.dtype)
        if lse is not None:
            lse[rows] = found[1]
    return (out, lse) if a["return_lse"] else out


BODIES: dict[str, Callable[..., Any]] = dict(
    zip(SIGNATURES, (_decode, _context, _ragged, _get_xqa_module), strict=True)
)
