"""Times another engine: a script for the Python of that engine's environment, which
`attnops.bench.peers` runs.

    python engines.py '{"engine": "vllm", "model": FOLDER, "points": [[1, 1024]], "new": 128, ...}'

`model` is a folder with a config.json; weights are random. The script needs torch and the engine,
and no other module of attnops. It prints a JSON object for every point; all other output goes to
stderr, whose last line says why a run failed.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any

Spec = dict[str, Any]
"""`engine`, `model`, `points` (batch, context), `new` tokens, `rounds`, `vocab`, `dtype`.
`token_bytes`: of the keys and values of a token, in all layers. `began`: when the process was
started, by `time.time()`. `less`: the first tokens of a call, whose time does not count; 0 for
none. `long`: is a point `Point.long`? vLLM then caches prompts."""

Call = Callable[[list[list[int]], int], list[list[int]]]
"""Greedy continuations of prompts by this many tokens, on the host."""

WARM = 2  # calls of each point that are not timed
MARKS: list[float] = []
"""When a call had made `less` tokens. Of an engine that does not say so, a call of as many tokens
is timed and subtracted."""

SPARE = 64  # positions of a request beyond its tokens
UNJUDGED = "random weights of its own, tokens not judged"


def tokens(spec: Spec) -> int:
    """Cached tokens of the largest point."""
    return max(int(batch * (context + spec["new"] + SPARE)) for batch, context in spec["points"])


def vllm(spec: Spec) -> tuple[Spec, Call]:
    """Its engine in this process, compiled and in CUDA graphs, as it does by default."""
    engines = import_module("vllm")
    batches = sorted({batch for batch, _ in spec["points"]})
    # A call that is subtracted has the same prompt, whose time is no part of the difference.
    cached = bool(spec["less"] and spec["long"])
    options = {
        "model": spec["model"],
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": spec["dtype"],
        "seed": 0,
        "max_model_len": max(context for _, context in spec["points"]) + spec["new"] + SPARE,
        "max_num_seqs": batches[-1],
        "gpu_memory_utilization": 0.5,
        "kv_cache_memory_bytes": (tokens(spec) + 8192) * spec["token_bytes"],
        "enable_prefix_caching": cached,
        "disable_log_stats": True,
        "attention_config": {"backend": "FLASH_ATTN"},
        "compilation_config": {"cudagraph_capture_sizes": batches},
    }
    engine = engines.LLM(**options).llm_engine
    greedy: Spec = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    # As LLM.generate asks for: requests are answered when they are done, and a step does not copy
    # their tokens.
    greedy["output_kind"] = import_module("vllm.sampling_params").RequestOutputKind.FINAL_ONLY
    asked = 0

    def call(prompts: list[list[int]], new: int) -> list[list[int]]:
        nonlocal asked
        made: dict[str, list[int]] = {}
        for prompt in prompts:
            engine.add_request(
                str(asked),
                {"prompt_token_ids": prompt},
                engines.SamplingParams(**greedy, max_tokens=new),
            )
            asked += 1
        while engine.has_unfinished_requests():
            made.update(
                {
                    request.request_id: list(request.outputs[0].token_ids)
                    for request in engine.step()
                }
            )
        return list(made.values())

    mode = engine.vllm_config.compilation_config.cudagraph_mode
    how = f"add_request and step of its LLMEngine, with its scheduler; {UNJUDGED}"
    how += "; prompts in its prefix cache" * cached
    return {
        "version": engines.__version__,
        "attention": "FLASH_ATTN",
        "graphs": getattr(mode, "name", str(mode)),
        "how": how,
    }, call


def sglang(spec: Spec) -> tuple[Spec, Call]:
    """The runner of its `bench_one_batch`, in CUDA graphs, which waits for the device once, at the
    end of a call."""
    torch: Any = import_module("torch")
    bench: Any = import_module("sglang.bench_one_batch")
    arguments = import_module("sglang.srt.server_args")
    bench.get_tokenizer = lambda *args, **more: None  # there is none beside a config.json
    batches = sorted({batch for batch, _ in spec["points"]})
    options = {
        "model_path": spec["model"],
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": spec["dtype"],
        "attention_backend": "fa3",
        "sampling_backend": "pytorch",
        "cuda_graph_max_bs": batches[-1],
        "cuda_graph_bs": batches,
        "max_total_tokens": tokens(spec) + 4096,
        "mem_fraction_static": 0.8,
        "disable_radix_cache": True,
        "disable_piecewise_cuda_graph": True,
        "disable_custom_all_reduce": True,
        "log_level": "info",
        "random_seed": 0,
    }
    server = arguments.ServerArgs(**options)
    bench._set_envs_and_config(server)
    ports = arguments.PortArgs.init_new(server)
    for initialize in (
        bench.initialize_moe_config,
        bench.initialize_fp8_gemm_config,
        bench.initialize_fp4_gemm_config,
    ):
        initialize(server)
    runner, _ = bench.load_model(server, ports, 0, 0)

    def call(prompts: list[list[int]], new: int) -> list[list[int]]:
        runner.clear()
        requests = bench.prepare_synthetic_inputs_for_latency_test(
            len(prompts), len(prompts[0]), prompts
        )
        token, _, state = runner.extend(requests)
        made = [token]
        for _ in range(new - 1):
            if len(made) == spec["less"]:
                torch.cuda.synchronize()
                MARKS.append(time.perf_counter())
            token, _ = runner.decode(token, state)
            made.append(token)
        found: list[list[int]] = torch.stack(made, 1).tolist()
        return found

    how = f"extend and decode of its bench_one_batch, without its scheduler; {UNJUDGED}"
    graphs = "none" if server.disable_cuda_graph else "decode steps"
    version = import_module("sglang").__version__
    return {
        "version": version,
        "attention": server.attention_backend,
        "graphs": graphs,
        "how": how,
    }, call


ENGINES = {"vllm": vllm, "sglang": sglang}


def timed(call: Call, prompts: list[list[int]], new: int) -> float:
    """Seconds of a call, or since its mark. Raises RuntimeError for answers of another length."""
    MARKS.clear()
    start = time.perf_counter()
    made = call(prompts, new)
    taken = time.perf_counter() - (MARKS[0] if MARKS else start)
    if (lengths := [len(tokens) for tokens in made]) != [new] * len(prompts):
        raise RuntimeError(f"got {lengths} tokens, want {new} of each of {len(prompts)} requests")
    return taken


def main(spec: Spec, answers: Any) -> None:
    """Write a line for every point to the file `answers`. Raises RuntimeError for answers of other
    lengths, and the engine's errors."""
    facts, call = ENGINES[spec["engine"]](spec)
    some, first_s = random.Random(0), 0.0
    for batch, context in spec["points"]:
        prompts = [[some.randrange(3, spec["vocab"]) for _ in range(context)] for _ in range(batch)]
        seconds: list[float] = []
        for _ in range(WARM + spec["rounds"]):
            seconds.append(timed(call, prompts, spec["new"]))
            first_s = first_s or time.time() - spec["began"]
            if spec["less"] and not MARKS:
                seconds[-1] -= timed(call, prompts, spec["less"])
        line = {
            "batch": batch,
            "context": context,
            "seconds": seconds[WARM:],
            "first_s": first_s,
            "facts": facts,
        }
        print(json.dumps(line), file=answers, flush=True)


if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [
        path for path in sys.path if os.path.abspath(path) != here
    ]  # modules beside this file have names of packages
    answers, code = os.fdopen(os.dup(1), "w"), 0
    os.dup2(2, 1)
    try:
        main(json.loads(sys.argv[1]), answers)
    except BaseException as error:
        traceback.print_exc()
        print(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", file=sys.stderr)
        code = 1
    sys.stderr.flush()
    os._exit(code)  # threads and processes of an engine may outlive it
