"""`ChunkStep`: the model's forward over one chunk of a prompt."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from attnops.graphs import Buckets, Graphed, breakable
from attnops.graphs.as_it_runs import AsItRuns
from attnops.graphs.kinds import Kinds, OneSize
from attnops.graphs.per_layer import Regions, Twin
from attnops.hf.attention.descriptor import Pattern, build
from attnops.hf.cache.names import argument
from attnops.hf.cache.paged_cache import PagedModelCache, Step
from attnops.hf.steps.chunks import packed, windows_behind
from attnops.hf.steps.compiled_layers import Here, modules_of
from attnops.hf.steps.hidden import Outputs, outputs_of
from attnops.nn.latent import is_viewed


class ChunkStep:
    """Runs chunks through layers that are compiled or recorded. It keeps what it finds in the
    model: after a change of the model there is a new one.

    forward: the model's own.
    """

    def __init__(self, model: nn.Module, forward: Callable[..., Any]) -> None:
        self._model, self._forward = model, forward
        self._layers: dict[nn.Module, int] = {}
        self._twins: dict[nn.Module, Twin] = {}
        self._unfolding: list[nn.Module] | None = None

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        counts: Tensor,
        before: Tensor,
        last: Tensor,
        fresh: bool,
        cache: PagedModelCache,
        regions: Regions,
    ) -> Outputs:
        """Logits `[N, 1, V]` after a chunk, of its tokens at `last` `[N]`, and the hidden states
        `[1, T, W]` of all. The cache does not count the tokens as seen.

        tokens, positions: int64 `[T]`. counts, before: int64 `[B]`, the tokens of each request, and
        those before them. fresh: are they the first of their requests? regions: run the layers.
        """
        state, total = cache.state, tokens.shape[0]
        self._layers = self._layers or modules_of(self._model, cache)[0]
        here = Here(regions, cache, total, threading.get_ident(), packed=True, twins=self._twins)
        regions.begin()
        try:
            state.start = counts.new_zeros(1)
            past = () if fresh else windows_behind(state.pages, counts, before, total)
            state.step = Step(packed(state.pages, counts, before, total), past, fresh)
            with here.calls(self._layers, ()):
                out = self._forward(
                    input_ids=tokens[None],
                    position_ids=positions[None],
                    attention_mask=_mask(tokens, cache),
                    **argument(self._model, cache),
                    use_cache=True,
                    return_dict=True,
                    logits_to_keep=last,
                )
            logits, hidden = outputs_of(out)
            return Outputs(logits[0][:, None], hidden)
        finally:
            state.end_step()

    @property
    def unfolds_plainly(self) -> bool:
        """Are all modules that unfold latents views of their weights, as torch's linear is?"""
        if self._unfolding is None:
            found = (getattr(module, "kv_b_proj", None) for module in self._model.modules())
            self._unfolding = [each for each in found if isinstance(each, nn.Module)]
        return all(map(is_viewed, self._unfolding))


def chunk_graphs(
    step: Callable[..., Outputs],
    sizes: tuple[int, ...],
    requests: int,
    fresh: bool,
    kinds: Kinds | None,
    options: dict[str, Any],
) -> Graphed:
    """Graphs of `step`, of chunks of these sizes in tokens. requests: at most. The others: see
    `Prompts.graphed`."""
    return breakable(
        step,
        Buckets(tokens=sizes, requests=requests, over="eager"),
        tokens=("tokens", "positions"),
        requests=("counts",) if fresh else ("counts", "before"),
        over_budget="drop",
        runner=AsItRuns() if kinds is None else OneSize(kinds),
        **options,
    )


def _mask(tokens: Tensor, cache: PagedModelCache) -> Tensor:
    """Of tokens without padding. transformers reads the numbers of a mask `[B, S]` for the states
    of linear attention, which no capture may do, and hands one that is made on."""
    if not cache.states or any(cache.state.pages.windows):
        return torch.ones_like(tokens[None])
    return build(Pattern(True, 0), 1, 0, len(tokens), 0, 0, tokens.device)
