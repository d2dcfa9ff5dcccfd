"""Suite `training_steps`: forward and backward of whole Hugging Face models over packed documents,
checkpointed by the layer.

`hf_sdpa`, `hf_eager`, `hf_flex`, `hf_fa4`: transformers' own attention. `attnops`:
`attnops.patch(model)`, no more. The documents follow one another in one row, as
DataCollatorWithFlattening lays them out: position_ids start again at each, and there is no mask. At
a point such as 8x4k the row has 8 * 4096 tokens. Loss and norm of the gradient of every way are
compared with those of transformers, by the first of PEERS that runs: gpt-oss has no SDPA there, and
eager attention holds all pairs. `peak_gib`: the most memory that tensors took in a step, weights
included. Others run only if `--ways` names them. `hf_compiled` and `attnops_compiled` run
`torch.compile(model)` of `hf_flex` and `attnops`; `hf_liger` and `attnops_liger` run the two with
Liger's norms, MLPs and fused loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

import attnops.hf
from attnops.bench import Point, Setup, models, ways
from attnops.bench.rows import Case, LeftOut, Make, Row, Rows, Way, time_if_right, with_ratios
from attnops.bench.ways import How
from attnops.ops.points import documents
from attnops.tune.clock import Timed, steps_us

PEERS = ("hf_sdpa", "hf_flex", "hf_eager")
DOCUMENT = 1820  # tokens of a document, on average
SPREAD = 0.02  # between ways in bfloat16, of the loss and of the logarithm of the gradient's norm


def cases(setup: Setup) -> dict[str, Case]:
    """Every model at its points. Raises InvalidInput for an unknown way."""
    ways.check(setup, "training_steps", everywhere=True)
    return models.over(setup, "training_steps", measure)


def measure(setup: Setup, kept: models.Kept, name: str, point: Point) -> Rows:
    """The ways of one model, in turn."""
    model = kept(name).requires_grad_(True)
    batch, count = packed(setup, model, point)
    chosen = ways.chosen(setup, "training_steps", *PEERS)
    made: dict[str, Make] = {
        way: partial(step, setup, model, how, batch) for way, how in chosen.items()
    }
    want = stock(made)

    def more(us: float, way: Way) -> Row:
        return {
            "tokens_s": round(point.batch * point.context / us * 1e6, 1),
            "layers": model.config.num_hidden_layers,
            "documents": count,
        }

    clock = partial(steps_us, rounds=5, cap_s=20.0, inner=1)
    rows = time_if_right(f"{name} {point}", made, want, SPREAD, clock, more=more, own=("attnops",))
    model.requires_grad_(False).zero_grad()
    return with_ratios(rows, *PEERS[:2])


def stock(ways: Mapping[str, Make]) -> Tensor:
    """The result of transformers' own attention. Raises LeftOut if none of it runs."""
    for way in (way for way in PEERS if way in ways):
        with suppress(Exception):  # the way's own row says why
            if (made := ways[way]()) is not None:
                found: Tensor = made.computed()
                return found
    raise LeftOut("no attention of transformers takes this step here")


def packed(setup: Setup, model: Any, point: Point) -> tuple[dict[str, Tensor], int]:
    """(the arguments of the model, the number of documents)."""
    tokens = point.batch * point.context
    lengths = documents(max(point.batch, tokens // DOCUMENT), tokens)
    ids = models.tokens(setup, model, 1, tokens)
    positions = torch.cat([torch.arange(n) for n in lengths])[None].to(setup.device)
    # The first token of a document would be predicted from another one.
    return {
        "input_ids": ids,
        "position_ids": positions,
        "labels": ids.masked_fill(positions == 0, -100),
    }, len(lengths)


def step(setup: Setup, model: Any, how: How, batch: dict[str, Tensor]) -> Way | None:
    """A training step without its optimizer. Its result: the loss and the logarithm of the
    gradient's norm. None where there is no SDPA."""
    if how.attention == "sdpa" and not model._supports_sdpa:
        return None
    one = models.twin(model).train()
    one.gradient_checkpointing_enable({"use_reentrant": False})
    if how.liger:
        from liger_kernel import transformers as liger

        # Its rotation would take the place of transformers' function, for every model.
        getattr(liger, f"apply_liger_kernel_to_{one.config.model_type}")(model=one, rope=False)
    if how.patch is None:
        one.set_attn_implementation(how.attention)
    else:
        attnops.hf.patch(one)
    called = one if how.compiled is None else torch.compile(one)
    found: Row = {}

    @torch.enable_grad()
    def run() -> Tensor:
        one.zero_grad(set_to_none=True)
        loss: Tensor = called(**batch, use_cache=False).loss
        loss.backward()
        return loss.detach()

    def result() -> Tensor:
        if setup.on_gpu:
            torch.cuda.reset_peak_memory_stats(setup.device)
        loss = run()
        norm = torch.stack(
            [p.grad.float().norm() for p in one.parameters() if p.grad is not None]
        ).norm()
        if setup.on_gpu:
            found["peak_gib"] = round(torch.cuda.max_memory_allocated(setup.device) / 2**30, 2)
        return torch.stack([loss.float(), norm.log()]).cpu()

    return Way(Timed(run), result, more=found)
