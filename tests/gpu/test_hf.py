"""Patched Hugging Face models on a real GPU: eager's tokens over caches and pages, in graphs, in
batches, and by attnops' own linears."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the hf extra is not installed")

import transformers

import attnops
from attnops.core.kernel import kernels_of
from attnops.core.problem import Target
from attnops.hf import Decode, batching_config, tiny
from attnops.hf.attention.batched import FILLS
from attnops.hf.cache import idle_pages as pool
from attnops.hf.cache.names import named
from tests.hf.decoding import ENDS, OPTIONS, Streamer
from tests.hf.helpers import relative, static
from tests.lowering.models import compiled_code, kernel_calls

FAMILIES = ("llama", "qwen3", "mistral", "gemma2", "gpt_oss", "deepseek_v3")
LINEARS = (
    *FAMILIES,
    "qwen2",
    "phi3",
    "gemma",
    "gemma3",
    "glm4",
    "granite",
    "olmo2",
    "cohere2",
    "starcoder2",
    "qwen3_moe",
    "mixtral",
)
CALLS = ((3, 14, 12), (2, 14, 12), (1, 30, 12), (3, 60, 30), (5, 20, 6), (2, 14, 12))
"""Rows, length of the prompt, new tokens."""


def asked(rows: int, length: int, new: int) -> dict[str, Any]:
    ids = torch.randint(
        2, 100, (rows, length), generator=torch.Generator().manual_seed(length), device="cpu"
    ).cuda()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return {
        "inputs": ids,
        "attention_mask": mask,
        "max_new_tokens": new,
        "min_new_tokens": new,
        "do_sample": False,
    }


@contextmanager
def served(
    family: str, *calls: tuple[int, int, int], options: dict[str, Any] | None = None, **how: Any
) -> Iterator[tuple[Any, Any, list[torch.Tensor], list[str]]]:
    """A patched model that has given eager's tokens for these calls, its handle, the tokens, and
    what each call took.

    options: of generate.
    """
    torch._dynamo.reset()
    model, options = tiny.model(family).cuda().eval(), options or {}
    want = [model.generate(**asked(*call), **options) for call in calls]
    took = []
    with attnops.patch(model, **how) as handle:
        for call, tokens in zip(calls, want, strict=True):
            assert torch.equal(model.generate(**asked(*call), **options), tokens), call
            took.append(str(handle.took))
        yield model, handle, want, took


@pytest.mark.parametrize(
    "options", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_generate_equals_eager(family: str, options: dict[str, Any]) -> None:
    """Static caches through generate's own compilation with CUDA graphs, which the second call
    replays."""
    with served(family, CALLS[0], CALLS[0], options=options):
        pass


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_over_pages_equals_eager(family: str) -> None:
    """generate() compiles decode with CUDA graphs by itself, as for static caches. What no request
    has stored holds NaN."""
    with served(family, *CALLS, cache="paged", decode="hf") as (model, handle, want, _):
        # Small pages, so that windows are shorter than the text.
        for (rows, length, new), tokens in zip(CALLS[:4], want, strict=False):
            cache = handle.new_cache(
                rows + 1, length + new, page_size=16 if family != "deepseek_v3" else 64
            )
            for each in cache.state.pages.pools:
                each[1 + rows * ((each.shape[0] - 1) // (rows + 1)) :] = float(
                    "nan"
                )  # those of the row that is not there
            assert torch.equal(
                model.generate(**named(cache), **asked(rows, length, new)), tokens
            ), (rows, length, new)


@pytest.mark.parametrize("mode", ["piecewise", "breakable"])
@pytest.mark.parametrize("family", FAMILIES)
def test_decode_in_graphs_equals_eager(
    family: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode steps of generate() from graphs, captured when a number of rows is first met; pages
    hold NaN where nothing is stored."""
    real: Any = pool.ModelPages  # type: ignore[attr-defined]

    def made(sizes: Any, page_size: int | None = None) -> Any:
        pages = real(sizes, page_size)
        for each in pages.pools:
            each.fill_(float("nan"))
        return pages

    monkeypatch.setattr(pool, "ModelPages", made)
    with served(family, *CALLS, cache="paged", decode=mode) as (_, handle, *_):
        assert (
            handle._paged is not None
            and handle._paged.decoder().plain_steps == 0
            and handle.graphs is not None
        )
        assert set(handle.graphs.report().modes.values()) == {"whole"}


@pytest.mark.parametrize("family", FAMILIES)
def test_without_options_generate_takes_graphs(family: str) -> None:
    """Eager's tokens in breakable steps, in the call that switches to compiled ones, after it, and
    on two caches in turn."""
    with served(family, *CALLS, decode=Decode(compile_after=16)) as (model, handle, want, took):
        assert (
            took[0] == "cache=paged, decode=breakable"
            and took[-1] == "cache=paged, decode=piecewise"
        ), took
        assert handle.plain_steps == 0
        rows, length, new = CALLS[-1]
        caches = [handle.new_cache(rows, length + new) for _ in range(2)]
        for cache in (*caches, *caches):
            cache.reset()
            assert torch.equal(model.generate(**named(cache), **asked(*CALLS[-1])), want[-1])


@pytest.mark.parametrize("family", LINEARS)
def test_tokens_by_own_linears_and_experts_equal_eagers(family: str) -> None:
    """For every form of linears and experts that is recognised."""
    own = attnops.use(kernel={"linear": "triton", "experts": "triton"})
    with (
        own,
        served(family, (1, 30, 12), (3, 14, 12), cache="paged", decode="piecewise") as (
            _,
            handle,
            *_,
        ),
    ):
        assert handle.plain_steps == 0
        [linears] = [
            note
            for note in str(handle.report()).splitlines()
            if "linears of compiled layers" in note
        ]
        assert "by triton" in linears and "by aten" not in linears, linears


def llama(**more: Any) -> Any:
    """Heads and head dim of Llama 3 8B."""
    given = {
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 1024,
        **more,
    }
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**given))
    return model.cuda().eval()


@pytest.mark.parametrize("kind", ["static", "paged"])
@pytest.mark.parametrize("batch", [1, 8])
def test_a_llama_shape_compiles_to_the_best_kernels(
    batch: int, kind: str, found: dict[str, Any]
) -> None:
    """Two layers, bfloat16: a prefill and steps of one token, compiled whole, their kernels and
    their error."""
    model, new = llama(hidden_size=4096, intermediate_size=4096, num_hidden_layers=2), 8
    # Longer prompts than those for which the table has sdpa and fa3 within 1 % of each other.
    ids = torch.randint(2, 1000, (batch, 1024 + new), device="cuda")

    def run(call: Any, cache: Any) -> torch.Tensor:
        """Logits of the prefill's last token and of the steps."""
        with torch.no_grad():
            out = [
                model(
                    ids[:, :1024], **named(cache), use_cache=True, logits_to_keep=1
                ).logits.float()
            ]
            for at in range(1024, 1024 + new):
                out.append(
                    call(
                        ids[:, at : at + 1].contiguous(), **named(cache), use_cache=True
                    ).logits.float()
                )
        return torch.cat(out, 1)

    exact = run(model, static(model, 2048))
    model.bfloat16()
    eager = run(model, static(model, 2048))
    chosen, box = {}, list[torch.Tensor]()
    how: dict[str, Any] = (
        {"mask": "compact"} if kind == "static" else {"cache": "paged", "decode": "hf"}
    )
    with attnops.patch(model, **how) as handle:
        if kind == "static":
            run(
                model, static(model, 2048)
            )  # the static cache of a model is set up by its first eager call
            with torch.no_grad():
                _, code = compiled_code(lambda: torch.compile(model, fullgraph=True)(ids[:, :1024]))
            chosen["prefill"] = sorted(set(kernel_calls(code)))
        cache = handle.new_cache(batch, 1024 + new) if kind == "paged" else static(model, 2048)
        step = torch.compile(model, fullgraph=True, dynamic=False)
        _, code = compiled_code(lambda: box.append(run(step, cache)))
        chosen["step"] = sorted(set(kernel_calls(code)))
    errors = {"eager": relative(eager, exact), "ours": relative(box[0], exact)}
    found["llama_shape"] = {f"{kind}, batch_{batch}": {**chosen, **errors}}
    assert errors["ours"] <= 1.5 * errors["eager"] + 2**-8
    if kind == "static":
        assert len(chosen["step"]) == 1, "both layers are the same call"
        if not kernels_of("attention")["fa3"].absences(Target.of(torch.device("cuda"))):
            assert chosen["prefill"] == ["attention.fa3"]


@pytest.mark.parametrize("mode", ["piecewise", "breakable"])
def test_steps_of_a_llama_shape_in_graphs(mode: Any) -> None:
    """bfloat16: logits of graphs against those of the same patched model without, over a thousand
    steps of constant memory."""
    model = llama(hidden_size=1024, intermediate_size=2048, num_hidden_layers=4).bfloat16()
    ids = torch.randint(2, 1000, (8, 64), device="cuda")
    held = 0
    with torch.no_grad(), attnops.patch(model, cache="paged", decode=mode) as handle:
        cache, other = handle.new_cache(8, 64 + 256), handle.new_cache(8, 64 + 256)
        for turn, rows in enumerate((8, 3, 5, 1)):
            for each in (cache, other):
                each.reset()
                model(ids[:rows, :40], **named(each), use_cache=True)
            for at in range(250):
                one = torch.randint(2, 1000, (rows, 1), device="cuda")
                got = handle.step(one, cache)
                want = model(one, **named(other), use_cache=True).logits
                if at % 25 == 0 or (turn == 0 and at < 8):
                    assert relative(got.float(), want.float()) < 2**-5
            torch.cuda.synchronize()
            assert turn != 3 or torch.cuda.memory_allocated() <= held + (1 << 20)
            held = torch.cuda.memory_allocated()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_continuous_batching(family: str) -> None:
    """A patched model has the tokens of transformers' sdpa: eager, in graphs, and in graphs over
    block tables."""
    model, config = tiny.model(family).cuda().eval(), transformers.ContinuousBatchingConfig
    prompts = [
        torch.randint(
            2, 100, (n,), generator=torch.Generator().manual_seed(n), device="cpu"
        ).tolist()
        for n in (5, 31, 9, 70, 3)
    ]
    options = transformers.GenerationConfig(
        max_new_tokens=24, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    page = "page_size" if hasattr(config, "page_size") else "block_size"
    sizes: dict[str, Any] = {page: 32, "num_blocks": 16, "max_batch_tokens": 64}
    # Other attention may be installed, and transformers would take it in place of sdpa.
    stay = {"auto_switch_to_flash": False} if hasattr(config, "auto_switch_to_flash") else {}
    graphs = {"use_cuda_graph": True, "use_async_batching": True, "kv_padding_interval_size": 128}
    ways = [
        config(**sizes, use_cuda_graph=False, max_blocks_per_request=0),
        config(**sizes, **graphs, max_blocks_per_request=0),
        batching_config(model, **sizes, kv_padding_interval_size=128),
    ]

    def batch(how: Any) -> list[list[int]]:
        done = model.generate_batch(
            inputs=prompts, generation_config=options, continuous_batching_config=how
        )
        return [done[request].generated_tokens for request in sorted(done)]

    model.set_attn_implementation("sdpa" if FILLS else "paged|sdpa")
    want = batch(config(**sizes, **stay, use_cuda_graph=False))
    assert len(want[0]) == 24
    with attnops.patch(model):
        for number, how in enumerate(ways):
            assert batch(how) == want, f"way {number}"


@pytest.mark.parametrize("rows", [1, 3])
def test_the_loop_in_graphs_draws_as_transformers_does(rows: int) -> None:
    """The tokens of transformers' loop around the same graphs, which a processor of the caller's
    asks for, and its random numbers."""
    model, given = tiny.model("llama").cuda().eval(), asked(rows, 14, 40)
    del given["min_new_tokens"]
    with attnops.patch(model, cache="paged", decode="breakable") as handle:
        for name, ends in ((name, ends) for name in OPTIONS for ends in (None, ENDS)):
            call: dict[str, Any] = {
                **given,
                "pad_token_id": 1,
                "eos_token_id": ends,
                **OPTIONS[name],
            }
            drawn = []
            for processors in ([lambda ids, scores: scores], []):
                torch.manual_seed(7)
                streamer = Streamer()
                texts = [
                    model.generate(**call, logits_processor=processors, streamer=each).tolist()
                    for each in (streamer, None)
                ]
                drawn.append((texts, streamer.got, torch.cuda.get_rng_state().tolist()))
                assert handle.took is not None and (handle.took.loop == "") is (not processors), (
                    handle.took
                )
            assert drawn[0] == drawn[1], (name, ends)
        assert handle.plain_steps == 0
