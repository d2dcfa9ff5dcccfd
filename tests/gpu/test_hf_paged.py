"""Patched Hugging Face models over pages on a real GPU: tokens of eager in changing batches, through generate's own compilation."""

from typing import Any

import pytest
import torch

from attnops.hf.cache_names import named

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")

FAMILIES = ("llama", "qwen3", "mistral", "gemma2", "gpt_oss", "deepseek_v3")
CALLS = ((3, 14, 12), (2, 14, 12), (1, 30, 12), (3, 60, 30), (5, 20, 6), (2, 14, 12))
"""Rows, length of the prompt, new tokens."""


def asked(rows: int, length: int, new: int) -> tuple[torch.Tensor, dict[str, Any]]:
    ids = torch.randint(2, 100, (rows, length), generator=torch.Generator().manual_seed(length), device="cpu").cuda()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return ids, {"attention_mask": mask, "max_new_tokens": new, "min_new_tokens": new, "do_sample": False}


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_over_pages_equals_eager(family: str, found: dict[str, Any]) -> None:
    """generate() compiles decode with CUDA graphs by itself, as for static caches. What no request has stored holds NaN."""
    import attnops
    from attnops.hf import tiny

    torch._dynamo.reset()
    model = tiny.model(family).cuda().eval()
    want = [model.generate(ids, **more) for ids, more in (asked(*call) for call in CALLS)]
    with attnops.patch(model, cache="paged", decode="hf") as handle:
        for call, tokens in zip(CALLS, want, strict=True):
            ids, more = asked(*call)
            assert torch.equal(model.generate(ids, **more), tokens), call
        # Small pages, so that windows are shorter than the text.
        for rows, length, new in CALLS[:4]:
            ids, more = asked(rows, length, new)
            cache = handle.new_cache(rows + 1, length + new, page_size=16 if family != "deepseek_v3" else 64)
            pages = cache.state.pages
            for pool in pages.pools:
                pool[1 + rows * ((pool.shape[0] - 1) // (rows + 1)) :] = float("nan")  # those of the row that is not there
            got = model.generate(ids, **named(cache), **more)
            assert torch.equal(got, want[CALLS.index((rows, length, new))]), (rows, length, new)
    found.setdefault("hf_paged_tokens_equal", {})[family] = True


@pytest.mark.parametrize("batch", [1, 8])
def test_a_llama_shape_over_pages(batch: int, found: dict[str, Any]) -> None:
    """Heads and head dim of Llama 3 8B, two layers, bfloat16: a decode step compiled whole, its kernels and its error."""
    import attnops
    from tests.hf.helpers import relative
    from tests.lowering.models import compiled_code, kernel_calls

    torch.manual_seed(batch)
    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=4096, num_hidden_layers=2, num_attention_heads=32, num_key_value_heads=8, vocab_size=1024
    )
    model = transformers.LlamaForCausalLM(config).cuda().eval()
    ids, new = torch.randint(2, 1000, (batch, 1024 + 8), device="cuda"), 8

    def run(call: Any, cache: Any) -> torch.Tensor:
        with torch.no_grad():
            out = [model(ids[:, :1024], **named(cache), use_cache=True, logits_to_keep=1).logits.float()]
            for at in range(1024, 1024 + new):
                out.append(call(ids[:, at : at + 1].contiguous(), **named(cache), use_cache=True).logits.float())
        return torch.cat(out, 1)

    exact = run(model, transformers.DynamicCache(config=config))
    model.bfloat16()
    eager = run(model, transformers.DynamicCache(config=config))
    with attnops.patch(model, cache="paged", decode="hf") as handle:
        step, box = torch.compile(model, fullgraph=True), []
        _, code = compiled_code(lambda: box.append(run(step, handle.new_cache(batch, 1024 + new))))
    errors = {"eager": relative(eager, exact), "ours": relative(box[0], exact)}
    found.setdefault("llama_shape_over_pages", {})[f"batch_{batch}"] = {
        "step": sorted(set(kernel_calls(code))), **{f"{name}_error": round(error, 5) for name, error in errors.items()},
    }  # fmt: skip
    assert errors["ours"] <= 1.5 * errors["eager"] + 2**-8


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_continuous_batching(family: str, found: dict[str, Any]) -> None:
    """A patched model has the tokens of transformers' sdpa: eager, in graphs, and in graphs over block tables."""
    import attnops
    from attnops.hf import batching_config, tiny
    from attnops.hf.attention.batched import FILLS

    model = tiny.model(family).cuda().eval()
    prompts = [torch.randint(2, 100, (n,), generator=torch.Generator().manual_seed(n), device="cpu").tolist() for n in (5, 31, 9, 70, 3)]
    options = transformers.GenerationConfig(max_new_tokens=24, do_sample=False, eos_token_id=-1, pad_token_id=0)
    page = "page_size" if hasattr(transformers.ContinuousBatchingConfig, "page_size") else "block_size"
    sizes: dict[str, Any] = {page: 32, "num_blocks": 16, "max_batch_tokens": 64}
    # Other attention may be installed, and transformers would take it in place of sdpa.
    stay = {"auto_switch_to_flash": False} if hasattr(transformers.ContinuousBatchingConfig, "auto_switch_to_flash") else {}
    config = transformers.ContinuousBatchingConfig
    graphs = {"use_cuda_graph": True, "use_async_batching": True, "kv_padding_interval_size": 128}
    tables = batching_config(model, **sizes, kv_padding_interval_size=128)
    ways = [config(**sizes, use_cuda_graph=False, max_blocks_per_request=0), config(**sizes, **graphs, max_blocks_per_request=0), tables]

    def batch(how: Any) -> list[list[int]]:
        done = model.generate_batch(inputs=prompts, generation_config=options, continuous_batching_config=how)
        return [done[request].generated_tokens for request in sorted(done)]

    model.set_attn_implementation("sdpa" if FILLS else "paged|sdpa")
    tokens = [batch(config(**sizes, **stay, use_cuda_graph=False))]
    with attnops.patch(model):
        tokens += [batch(how) for how in ways]
    assert len(tokens[0][0]) == 24
    for way, each in enumerate(tokens[1:], 1):
        off = {
            r: next(i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b)
            for r, (x, y) in enumerate(zip(each, tokens[0], strict=True))
            if x != y
        }
        assert not off, f"way {way}: by request, the first token that differs: {off}"
    found.setdefault("hf_continuous_batching", {})[family] = len(tokens)


@pytest.mark.parametrize("mode", ["piecewise", "breakable"])
@pytest.mark.parametrize("family", FAMILIES)
def test_decode_in_graphs_equals_eager(family: str, mode: Any, found: dict[str, Any]) -> None:
    """Decode steps of generate() from graphs, captured when a number of rows is first met; pages hold NaN where nothing is stored."""
    import attnops
    from attnops.hf import tiny
    from attnops.hf.paged import pool

    torch._dynamo.reset()
    model = tiny.model(family).cuda().eval()
    want = [model.generate(ids, **more) for ids, more in (asked(*call) for call in CALLS)]
    real: Any = pool.ModelPages  # type: ignore[attr-defined]

    def made(sizes: Any, page_size: int | None = None) -> Any:
        pages: Any = real(sizes, page_size)
        for each in pages.pools:
            each.fill_(float("nan"))
        return pages

    with pytest.MonkeyPatch.context() as patched, attnops.patch(model, cache="paged", decode=mode) as handle:
        patched.setattr(pool, "ModelPages", made)
        for call, tokens in zip(CALLS, want, strict=True):
            ids, more = asked(*call)
            assert torch.equal(model.generate(ids, **more), tokens), call
        assert handle._paged is not None and handle._paged.decoder().plain_steps == 0 and handle.graphs is not None
        report = handle.graphs.report()
        assert set(report.modes.values()) == {"whole"}
        found.setdefault("hf_decode_in_graphs", {})[f"{family}_{mode}"] = {"compiled": report.compiled, "parts": report.parts}


@pytest.mark.parametrize("family", FAMILIES)
def test_without_options_generate_takes_graphs(family: str, found: dict[str, Any]) -> None:
    """Eager's tokens in breakable steps, in the call that switches to compiled ones, after it, and on two caches in turn."""
    import attnops
    from attnops.hf import Decode, tiny

    torch._dynamo.reset()
    model = tiny.model(family).cuda().eval()
    want = [model.generate(ids, **more) for ids, more in (asked(*call) for call in CALLS)]
    with attnops.patch(model, decode=Decode(compile_after=16)) as handle:
        took = []
        for call, tokens in zip(CALLS, want, strict=True):
            ids, more = asked(*call)
            assert torch.equal(model.generate(ids, **more), tokens), call
            took.append(str(handle.took))
        assert took[0] == "cache=paged, decode=breakable" and took[-1] == "cache=paged, decode=piecewise", took
        assert handle.plain_steps == 0
        rows, length, new = CALLS[-1]
        caches = [handle.new_cache(rows, length + new) for _ in range(2)]
        for cache in (*caches, *caches):
            cache.reset()
            ids, more = asked(rows, length, new)
            assert torch.equal(model.generate(ids, **named(cache), **more), want[-1])
    found.setdefault("hf_without_options", {})[family] = took


@pytest.mark.parametrize("rows", [1, 3])
def test_the_loop_in_graphs_draws_as_transformers_does(rows: int, found: dict[str, Any]) -> None:
    """The tokens of transformers' loop around the same graphs, which a processor of the caller's asks for, and its random numbers."""
    import attnops
    from attnops.hf import tiny
    from tests.hf.test_loop import ENDS, OPTIONS, Streamer

    model = tiny.model("llama").cuda().eval()
    ids, more = asked(rows, 14, 40)
    del more["min_new_tokens"]
    lengths = []
    with attnops.patch(model, cache="paged", decode="breakable") as handle:
        for name, ends in ((name, ends) for name in OPTIONS for ends in (None, ENDS)):
            call: dict[str, Any] = {**more, "pad_token_id": 1, "eos_token_id": ends, **OPTIONS[name]}
            drawn = []
            for processors in ([lambda ids, scores: scores], []):
                torch.manual_seed(7)
                streamer = Streamer()
                texts = [model.generate(ids, **call, logits_processor=processors, streamer=each).tolist() for each in (streamer, None)]
                drawn.append((texts, streamer.got, torch.cuda.get_rng_state().tolist()))
                assert handle.took is not None and (handle.took.loop == "") is (not processors), handle.took
            assert drawn[0] == drawn[1], (name, ends)
            lengths.append(len(streamer.got))
        assert handle.plain_steps == 0
    found.setdefault("hf_loop_in_graphs", {})[f"{rows} rows"] = lengths


@pytest.mark.parametrize("mode", ["piecewise", "breakable"])
def test_steps_of_a_llama_shape_in_graphs(mode: Any, found: dict[str, Any]) -> None:
    """bfloat16, heads of Llama 3 8B: logits of graphs against those of the same patched model without, over a thousand steps."""
    import attnops
    from tests.hf.helpers import relative

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=1024, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        vocab_size=1024,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).cuda().bfloat16().eval()
    ids = torch.randint(2, 1000, (8, 64), device="cuda")
    worst, held = 0.0, 0
    with torch.no_grad(), attnops.patch(model, cache="paged", decode=mode) as handle:
        cache, other = handle.new_cache(8, 64 + 256), handle.new_cache(8, 64 + 256)
        for turn in range(4):
            rows = (8, 3, 5, 1)[turn]
            for each in (cache, other):
                each.reset()
                model(ids[:rows, :40], **named(each), use_cache=True)
            for at in range(250):
                one = torch.randint(2, 1000, (rows, 1), device="cuda")
                got = handle.step(one, cache)
                if at % 25 == 0 or (turn == 0 and at < 8):
                    want = model(one, **named(other), use_cache=True).logits
                    worst = max(worst, relative(got.float(), want.float()))
                else:
                    model(one, **named(other), use_cache=True)
            torch.cuda.synchronize()
            if turn == 3:
                assert torch.cuda.memory_allocated() <= held + (1 << 20)
            held = torch.cuda.memory_allocated()
    found.setdefault("hf_steps_in_graphs", {})[mode] = {"steps": 1000, "worst_error": round(worst, 5)}
    assert worst < 2**-5
