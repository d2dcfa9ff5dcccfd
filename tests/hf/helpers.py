"""What the tests of attnops.hf share: the families, inputs with padding, ways to run a model, a
backend that counts."""

import copy
import functools
import importlib
import io
import re
from contextlib import contextmanager

import torch
from transformers import CompileConfig, DynamicCache, StaticCache

import attnops
from attnops.hf import tiny
from attnops.hf.attention import (
    function as attention_module,
    over_pages as paged_attention,
    straight,
)
from attnops.hf.cache.names import named

# Newer versions of transformers run GPT-J through the interface.
_ITSELF = (
    ()
    if "ALL_ATTENTION_FUNCTIONS"
    in vars(importlib.import_module("transformers.models.gptj.modeling_gptj"))
    else ("gptj",)
)
NOT_THROUGH_THE_INTERFACE = (*_ITSELF, "falcon", "bloom", "mpt")
SPARSE = ("deepseek_v32",)
PARTLY = ("kimi_linear",)  # some of its modules are attention by name and not through the interface
ENCODERS = ("t5", "bart", "whisper", "bert", "llava")
DEMO = ("llama-small", "mistral-small", "gpt-oss-small")
DECODERS = tuple(
    n for n in tiny.NAMES if n not in (*NOT_THROUGH_THE_INTERFACE, *SPARSE, *ENCODERS, *DEMO)
)

# One of each kind: plain, sliding (some with sinks, or a window that the mask alone knows), latent,
# absolute positions, linear attention; chunked and a model that edits its masks, which a descriptor
# cannot serve.
_SLIDING = ("mistral", "gemma2", "gemma3", "gpt_oss", "mimo_v2_flash", "qwen2_moe", "phimoe")
COMPACT = (
    "llama",
    *_SLIDING,
    "deepseek_v3",
    "gpt2",
    "opt",
    "gpt_neox",
    "qwen3_next",
    "llama4",
    "doge",
)

# Eager and attnops differ by the order of float32 sums only: a few units in the last place (1.2e-7)
# a layer.
LIMIT = 128 * torch.finfo(torch.float32).eps


def tokens(batch=3, length=20, seed=1):
    return torch.randint(
        2, 100, (batch, length), generator=torch.Generator().manual_seed(seed), device="cpu"
    )


def left_padded(batch=3, length=20, pads=(3, 5, 0)):
    mask = torch.ones(batch, length, dtype=torch.int64)
    for row, n in enumerate(pads[:batch]):
        mask[row, :n] = 0
    return mask


def positions(mask):
    return (mask.cumsum(-1) - 1).clamp(min=0)


def relative(ours, eager):
    return ((ours - eager).abs().max() / eager.abs().max()).item()


def near(ours, eager):
    """They differ by the order of sums alone."""
    assert relative(ours, eager) < LIMIT


def same_tokens(model, patched=None, **more):
    """The tokens of `generated` are the same with the model patched. patched: options of
    `patch`."""
    want = generated(model, **more)
    with attnops.patch(model, **(patched or {})):
        assert torch.equal(generated(model, **more), want)


def make_cache(kind, model, size=48):
    if kind is None:
        return None
    return static(model, size) if kind == "static" else DynamicCache(config=model.config)


def static(model, size):
    return StaticCache(config=model.config, max_cache_len=size)


STEPS = ((0, 14), (14, 15), (15, 16), (16, 18), (18, 19), (19, 20))
"""Of 20 tokens: a prefill, one-token steps and a step of two."""


def logits(model, cache, ids, mask, steps=STEPS, first=None):
    """As `by_hand`, with a cache of a kind of transformers', or None. first: what runs the
    prefill."""
    past = make_cache(cache, model)
    return by_hand(model, past, ids, mask, steps if past is not None else steps[:1], first)


@torch.no_grad()
def by_hand(call, cache, ids, mask, steps=STEPS, first=None):
    """The logits of every position that is not padding, with this cache. All must be finite."""
    where, out = positions(mask), []
    for begin, end in steps:
        # Contiguous, as generate() makes them: a stride that happens to equal a length would be
        # guarded.
        ids_now, mask_now, where_now = (
            x.contiguous() for x in (ids[:, begin:end], mask[:, :end], where[:, begin:end])
        )
        now = first if first is not None and begin == 0 else call
        given = {
            "attention_mask": mask_now,
            "position_ids": where_now,
            **named(cache),
            "use_cache": cache is not None,
        }
        result = now(ids_now, **given).logits
        assert torch.isfinite(result).all(), "padding rows too shall stay finite"
        out.append(result[mask[:, begin:end].bool()])
    return torch.cat(out)


def generated(model, new=14, kind=None, length=14, device="cpu", **more):
    """kind: of transformers' caches."""
    mask = left_padded()[:, :length].to(device)
    options = {
        "max_new_tokens": new,
        "min_new_tokens": new,
        "do_sample": False,
        "attention_mask": mask,
        **more,
    }
    return model.generate(tokens()[:, :length].to(device), cache_implementation=kind, **options)


def of_a_library(hook):
    """A hook that counts as one of transformers' own: a caller's hooks leave a model without
    graphs."""
    hook.__module__ = "transformers.of_a_test"
    return hook


class Counter:
    """A torch.compile backend that runs the graph as it is and counts how many it was given."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        return graph.forward

    def __len__(self):
        return len(self.graphs)

    def __deepcopy__(self, memo):
        return self  # transformers copies its CompileConfig, and a copy would count for itself

    def targets(self):
        return [str(node.target) for graph in self.graphs for node in graph.graph.nodes]


@contextmanager
def replaced(module, **functions):
    """Within the block `module` has these functions."""
    before = {name: getattr(module, name) for name in functions}
    vars(module).update(functions)
    try:
        yield
    finally:
        vars(module).update(before)


@contextmanager
def watched():
    """Within the block: the calls of `attention` and `varlen_attention` by a model, as a list of
    their arguments and the op's name."""
    calls = []
    dense, packed = attention_module.attend, attention_module.varlen_attention

    def spy(call):
        calls.append(
            {"op": "attention", **call._asdict(), "window": (call.window_left, call.window_right)}
        )
        return dense(call)

    def spy_packed(query, key, value, cu_seqlens_q, cu_seqlens_k, **rest):
        starts = {
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_k": cu_seqlens_k,
            **dict.fromkeys(("mask", "kv_start", "kv_end")),
        }
        calls.append(
            {"op": "varlen_attention", "query": query, "key": key, "value": value, **starts, **rest}
        )
        return packed(query, key, value, cu_seqlens_q, cu_seqlens_k, **rest)

    # `profiling`: so that no layer answers a call like one before by itself.
    ops = replaced(attention_module, attend=spy, varlen_attention=spy_packed)
    with ops, replaced(straight, profiling=lambda: True):
        yield calls


# MLA models over pages ----------------------------------------------------------------------------

LATENT = (
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "axk1",
    "minicpm3",
    "youtu",
    "mistral4",
    "longcat_flash",
    "kimi_linear",
)


@functools.cache
def eager_tokens(name):
    return generated(tiny.model(name))


def gives_eagers_tokens(model, name, **more):
    """more: beside the arguments of `eager_tokens`."""
    assert torch.equal(generated(model, **more), eager_tokens(name))


@functools.cache
def eager_logits(name):
    return logits(tiny.model(name), "dynamic", tokens(), left_padded())


@contextmanager
def counted():
    """Within the block: how often a patched layer attended in each form."""
    calls = {"absorbed": 0, "expanded": 0}
    absorbed, write = paged_attention.absorbed, paged_attention.write_latent

    def attend(*args, **kwargs):
        calls["absorbed"] += 1
        calls["expanded"] -= 1
        return absorbed(*args, **kwargs)

    def written(*args, **kwargs):
        calls["expanded"] += 1
        return write(*args, **kwargs)

    with replaced(paged_attention, absorbed=attend, write_latent=written):
        yield calls


# Models of ordinary attention over pages ----------------------------------------------------------

SLIDING = (*_SLIDING, "cohere2", "olmo3")
"""Their layers have a window of 8, some of them or all."""

UNPAGED = ("doge", "llama4")  # one edits its masks, one sees chunks
KEYED = tuple(n for n in DECODERS if n not in (*LATENT, *UNPAGED))


@contextmanager
def over_pages():
    """Within the block: how often a patched layer attended over pages, to its step's own tokens,
    and to copies beside them."""
    calls = {"paged": 0, "alone": 0, "beside": 0}
    paged, dense = paged_attention.paged_attention, paged_attention.dense_attention

    def count_paged(*args, **kwargs):
        calls["paged"] += 1
        return paged(*args, **kwargs)

    def count_dense(query, key, *args, **kwargs):
        calls["alone" if query.shape[1] == key.shape[1] else "beside"] += 1
        return dense(query, key, *args, **kwargs)

    with replaced(paged_attention, paged_attention=count_paged, dense_attention=count_dense):
        yield calls


def allocated(code):
    """The shapes that generated code allocates."""
    found = [
        tuple(map(int, re.findall(r"\d+", sizes)))
        for sizes in re.findall(r"empty_strided\w*\(\(([\d, ]+)\)", code)
    ]
    assert found
    return found


def paged(model, **more):
    """A model patched for pages. more: options of `patch`."""
    return attnops.patch(model, cache="paged", **more)


def poison(cache):
    """NaN wherever nothing is stored yet."""
    for pages in cache.state.pages.pools:
        pages.fill_(float("nan"))


def poisoned(handle, rows, length, page_size=4):
    """A new cache whose pages hold NaN."""
    cache = handle.new_cache(rows, length, page_size=page_size)
    poison(cache)
    return cache


def copies(model):
    """A deep copy of the model, and one that was saved and loaded."""
    written = io.BytesIO()
    torch.save(model, written)
    written.seek(0)
    return copy.deepcopy(model), torch.load(written, weights_only=False)


@contextmanager
def calls_of(monkeypatch, module, op):
    """The numbers of rows of the calls of an op that `module` makes, which its reference serves."""
    made, honest = [], getattr(module, op)

    def counted(*args, **kwargs):
        made.append(args[0].shape[0])
        return honest(*args, **kwargs)

    monkeypatch.setattr(module, op, counted)
    with attnops.use(kernel={op: "reference"}):
        yield made


def in_generate(model, rows, length, new, counter, **more):
    """What generate() gives, which compiles the one-token step by itself on GPUs, and here with a
    counter."""
    mask = left_padded(rows, length, (0, 3, 1, 2, 0))
    options = {
        "max_new_tokens": new,
        "min_new_tokens": new,
        "do_sample": False,
        "attention_mask": mask,
        **more,
    }
    if counter is not None:
        how = CompileConfig(fullgraph=True, backend=counter)
        how.mode, how._compile_all_devices = None, True
        options["compile_config"] = how
    return model.generate(tokens(rows, length), **options)
