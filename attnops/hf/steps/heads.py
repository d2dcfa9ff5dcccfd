"""`HeadDrafts`: what a draft head does in the rounds of `generate()`, over pages of its own."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from attnops.cache.batch import PagedBatch
from attnops.cache.paged import ordinary
from attnops.core.problem import Problem
from attnops.graphs.kinds import Kinds
from attnops.graphs.per_layer import NotRegional
from attnops.hf.cache.described import described
from attnops.hf.cache.model_pages import ModelPages
from attnops.hf.cache.page_sizes import Sizes
from attnops.hf.steps.chunks import packed
from attnops.hf.steps.graphed_steps import Passes
from attnops.hf.steps.hidden import Read
from attnops.nn import Eagle3Head
from attnops.ops import token_rows
from attnops.ops.pages.plan import paged_layers


def states_of(head: Eagle3Head, layers: int) -> tuple[int, ...]:
    """The numbers of the `hidden_states` of a target of so many layers that a head reads."""
    return head.states or (2, layers // 2, layers - 3)


def modules_of(owner: Any, head: Eagle3Head) -> tuple[nn.Module, ...]:
    """The modules of a model that return the states which a head reads, in order."""
    layers = owner.get_decoder().layers
    numbers = states_of(head, len(layers))
    return tuple(layers[n - 1] if n else owner.get_input_embeddings() for n in numbers)


def addresses(head: Eagle3Head | None, owner: Any) -> tuple[int, ...]:
    """Where the tensors are that the graphs of a head read; () without one."""
    if head is None:
        return ()
    read = *head.parameters(), *head.buffers(), owner.get_input_embeddings().weight
    return tuple(t.data_ptr() for t in read)


def against(head: Eagle3Head, owner: Any) -> str:
    """Why a head cannot draft for a model; "" where it can."""
    embed = owner.get_input_embeddings().weight
    layers = owner.config.get_text_config().num_hidden_layers
    weight, width = head.fc.weight, embed.shape[1]
    model = type(owner).__name__
    if head.vocab_size != embed.shape[0]:
        return f"it has {head.vocab_size} words and {model} has {embed.shape[0]}; want as many"
    if head.target_hidden_size != width:
        got = f"it reads states of {head.target_hidden_size} numbers"
        return f"{got}, and those of {model} have {width}"
    if head.embed_tokens is None and head.hidden_size != width:
        want = f"{head.hidden_size} numbers"
        return f"it has no embeddings, and wants {want} of a token where {model} has {width}"
    if not isinstance(getattr(owner.get_decoder(), "layers", None), nn.ModuleList):
        return f"it reads states of decoder layers, and {model} has no list of them named layers"
    if (weight.device, weight.dtype) != (embed.device, embed.dtype):
        ours, theirs = (f"{t.dtype} on {t.device}" for t in (weight, embed))
        return f"it is {ours}, and {model} {theirs}; want the same"
    if not all(0 <= number < layers for number in states_of(head, layers)):
        return f"it reads the states {states_of(head, layers)}, and {model} has {layers} layers"
    return ""


def layer_of(head: Eagle3Head) -> Problem:
    """The attention of a head."""
    core, weight = head.midlayer.self_attn.attention, head.fc.weight
    return paged_layers(core.num_heads, core.num_kv_heads, core.head_dim, 0, weight.dtype)


class HeadDrafts:
    """Chains of greedy tokens of a head.

    The head reads a token and the target's states of the token before it, and its pages keep such
    pairs: the pair at position p has the token at p + 1 of the text, counted from `base`. It reads
    nothing in rounds that draft nothing: their states wait.

    Args:
        head: of the target.
        embed: the target's embeddings.
        passes: over its recorded layers.
        rows, room: of its pages; positions of a row.
        queries: tokens of a row that a round verifies at most.
        waiting: rounds of one token whose states may wait.

    Attributes:
        base: int64 `[B]`, the target's tokens before those that the head has read, which are those
            of one call.
    """

    def __init__(
        self,
        head: Eagle3Head,
        embed: nn.Module,
        passes: Passes,
        rows: int,
        room: int,
        queries: int,
        waiting: int,
    ) -> None:
        self.head, self._embed, self._layer = head, embed, layer_of(head)
        self._kinds: Kinds | None = Kinds(passes)
        device, self._waiting = head.fc.weight.device, waiting + queries
        sizes = Sizes(rows, room + self._waiting, (self._layer,), device, None, fixed=True)
        self.pages = ModelPages(sizes)

        def states(count: int) -> Tensor:
            return head.fc.weight.new_zeros(rows * count, head.fc.in_features)

        with ordinary():
            # Pairs in the pages, and the column of a text that has position 0.
            self.base, self._held, self._shift = (
                torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(3)
            )
            self._first = torch.arange(rows, device=device)[:, None]
            self._new, self._states = states(queries), states(self._waiting)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Its buffers, without its pages."""
        return self.base, self._held, self._shift, self._new, self._states

    def take(self, hidden: Tensor) -> None:
        """Take the states `[B, N, W]` of a step that has verified, before `propose` or `wait`."""
        self._new[: hidden.shape[0] * hidden.shape[1]].copy_(hidden.flatten(0, 1))

    def begin(self, read: list[Read], ids: Tensor, shift: Tensor, stored: Tensor) -> None:
        """Read a prompt, and take the states of its last tokens.

        read: all of it; nothing is left there, because states of long prompts are large. ids: int64
        `[B, L]`, the text. shift: int64 `[B]`, the column in `ids` of each row's first token in the
        target's pages. stored: int64 `[B]`, tokens of each row there.
        """
        self.pages.use()
        self.base.copy_(read[0].before.clamp(min=0))
        self._shift.copy_(shift + self.base)
        # The pair of the last token has a token that is not chosen yet.
        self._held.copy_(stored - self.base - 1)
        states = self._new.new_zeros(len(stored), self._new.shape[1])
        while read:
            counts, before, hidden = read.pop(0)
            total = hidden.shape[0]
            ends = hidden[(counts.cumsum(0) - 1).clamp(min=0)]
            states = torch.where((before + counts == stored)[:, None], ends, states)
            batch = packed(self.pages, counts, before - self.base, total)
            assert batch.positions is not None
            rows = token_rows(batch.cu_seqlens_q, total).clamp(max=ids.shape[0] - 1)
            at = batch.positions + 1 + self._shift[rows]
            tokens = ids[rows, at.clamp(0, ids.shape[1] - 1)]
            given = self._given(tokens), hidden.to(states.dtype)
            # Not recorded, as steps are: prompts are of all lengths.
            with self._uncast():
                self.head(*given, **self._where(batch, tokens.new_zeros(1)))
        self.take(states[:, None])

    def wait(self, queries: int, counts: Tensor, stored: Tensor) -> None:
        """Keep the states of a step of `queries` tokens a row, behind those that wait.

        counts, stored: int64 `[B]`, the tokens that each row has got, and those that the target's
        pages keep with them.
        """
        waited = stored - counts - self.base - self._held
        columns = torch.arange(queries, device=waited.device)
        place = (waited[:, None] + columns).clamp(max=self._waiting - 1)
        at = (self._first * self._waiting + place).flatten()
        self._states.index_copy_(0, at, self._new[: len(at)])

    def propose(
        self, texts: Tensor, counts: Tensor, stored: Tensor, queries: int, late: bool, drafts: int
    ) -> Tensor:
        """int64 `[B, drafts]`: what may follow the last token of each row.

        texts: int64 `[B, L]`. counts, stored: as in `wait`. queries: tokens of a row that the last
        step has verified. late: have states waited?
        """
        self.wait(queries, counts, stored)
        length = stored - self.base
        token, state = self._read(texts, length, self._waiting if late else queries)
        found = [token]
        for batch in self.pages.steps(length, drafts - 1) if drafts > 1 else ():
            token, state = self._step(token, state, batch)
            found.append(token)
        return torch.stack(found, 1)

    def _read(self, texts: Tensor, length: Tensor, new: int) -> tuple[Tensor, Tensor]:
        """As `_step`, behind the last pair of each row: read those that wait, `new` of each row at
        most. What is behind them is read as well, and later pairs replace it. length: int64 `[B]`,
        pairs of each row."""
        rows, columns = len(length), torch.arange(new, device=texts.device)
        at = (self._held + self._shift)[:, None] + columns + 1
        tokens = texts.gather(1, at.clamp(max=texts.shape[1] - 1))
        states = self._states.view(rows, self._waiting, -1)[:, :new].flatten(0, 1)
        last = self._first[:, 0] * new + (length - self._held - 1).clamp(0, new - 1)
        batch = described(self.pages, self._held, None, new, self._layer.q_heads)
        out = self._step(tokens.flatten(), states, batch, last)
        self._held.copy_(length)
        return out

    def _step(
        self, tokens: Tensor, hidden: Tensor, batch: PagedBatch, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(the likeliest words of the target, int64 `[R]`; the head's states `[R, E]`) behind the
        tokens int64 `[T]`, at `rows` int64 `[R]`; None: at all. Linears are fused where the head
        can be recorded."""
        given, where = (self._given(tokens), hidden), self._where(batch, rows)
        out: tuple[Tensor, Tensor] | None = None
        with self._uncast():
            if self._kinds is not None:
                self._kinds.begin()
                try:
                    out = self._kinds(self.head, 1, given, where)
                except NotRegional:
                    self._kinds = None
            logits, state = out or self.head(*given, **where)
        return self.head.to_target(logits.argmax(-1)), state

    def _uncast(self) -> AbstractContextManager[Any]:
        """The head computes in its own dtype, which its pages have, whatever autocast is on around
        the model."""
        return torch.autocast(self._new.device.type, enabled=False)

    def _given(self, tokens: Tensor) -> Tensor:
        """Ids for a head that has embeddings, else those of the target."""
        given: Tensor = tokens if self.head.embed_tokens is not None else self._embed(tokens)
        return given

    def _where(self, batch: PagedBatch, rows: Tensor | None) -> dict[str, Any]:
        keys, values = self.pages.layers[0]
        return {"rows": rows, "batch": batch, "k_pages": keys, "v_pages": values}
