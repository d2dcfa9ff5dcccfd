"""Suite `speculate`: `generate()` with drafts beside plain decoding.

The models have random weights but for their embeddings, which are so large, and rows of the last
linear so chosen, that the next token is a known function of the last one. Drafts that know it are
right with a set probability. All weights are read as ever, so that times are true. A way that
writes another text has no time; of attention the text says nothing, and the suites of models do.

`attnops`: `attnops.patch(model)`, no more: a step for each token. `attnops_lookup_1`, `_3`, `_4`
and `_7`: as many tokens are looked up in the text. It repeats after 64 tokens, so that all are
right after a prompt that is as long. `attnops_lookup_7` is `speculate="lookup"`.
`attnops_right_0`, `_80`, `_100`: an object drafts seven tokens. Each is right with this
probability, in percent. `attnops_eagle3_0`, `_80`, `_100`: an EAGLE-3 head of the model's shape
drafts five, with all of its launches and bytes. The logit of a word that is so often right is
raised. `attnops_head_tree_0`, `_80`, `_100`: such a head drafts trees of 32 nodes, the root
included, and six levels. So often its likeliest word is right; else no word of it is.
`attnops_mtp1_0`, `attnops_mtp3_80`, ...: an MTP layer of the model's own class drafts one token, or
three, likewise. It knows the text as the model does, and an embedding of the other sign makes a
wrong word. `attnops_dflash_0`, `_80`, `_100`: a DFlash draft of the model's shape, of five layers,
drafts a block of 15. `attnops_tree_8`, `_16`, `_32`, `_64`: an object drafts a tree of so many
nodes, the root included. One branch is right, seven tokens deep, and its tokens come after their
wrong siblings.
`hf`, `hf_lookup`: transformers, which looks up for one row alone; they run only if `--ways`
names them.

Times are those of a token, from calls in turns, each less the time of a call for one token.
`tokens_a_round`: tokens of a row. `round_us`: of a round, and `of_step` that over a step of
`attnops`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attnops.bench import Point, Setup, generate, models, ways
from attnops.bench.rows import Case, Row, Rows, Way, Ways, time_if_right, with_ratios
from attnops.nn import DFlashHead, DraftState, DraftTree, Eagle3Head, MTPLayer, Proposal
from attnops.tune.clock import Timed, Times, steps_us

SUITE, PLAIN = "speculate", "attnops"
NEW = {"toy": 17, "small": 41, "quick": 81, "full": 241}
"""The first of them is the prompt's. The others fill whole rounds of 2, 4, 5 and 8 tokens."""
RIGHT = {f"attnops_right_{often}": often / 100 for often in ways.OFTEN}
"""Ways whose object is right with this probability."""
HEADS = {
    f"attnops_{kind}_{often}": often / 100
    for kind in ("eagle3", "head_tree", "dflash", *ways.MTPS)
    for often in ways.OFTEN
}
"""Ways whose head or layer is."""
TREES = {f"attnops_tree_{nodes}": nodes for nodes in ways.NODES}
"""Ways that draft trees of so many nodes."""
WORDS = 32_000
"""Draft words of a head, at most."""
NUMBERS, STRIDE = 4096, 7919
"""Random numbers of a head, and the distance between those of a position and the next."""
DRAFTS = 7
BLOCK_LAYERS = 5
"""Of a DFlash draft."""
CYCLE = 64
"""Tokens after which a text repeats."""
LIFT = 1e4
"""Of the logit of a word that a head takes, above all others. It is finite, because trees sum up
logarithms of probabilities."""
LOUD = 100.0
"""Standard deviation of the embeddings. What 32 layers add to them is about a tenth of it."""


def cases(setup: Setup) -> dict[str, Case]:
    """Every model at its prompts. Raises InvalidInput for a way that this device does not have."""
    ways.check(setup, SUITE)
    return models.over(setup, SUITE, measure)


def text_from(first: Tensor, length: int, vocab: int) -> Tensor:
    """int64 `[..., length]`: the text that begins with the token `first` `[..., 1]`."""
    start = first // CYCLE * CYCLE
    count = (vocab - start).clamp(max=CYCLE)
    return start + (first - start + torch.arange(length, device=first.device)) % count


def teach(model: Any) -> Tensor:
    """Make the model write `text_from`. Returns int64 `[V, 1 + DRAFTS]`: for each token the text
    that begins with it."""
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    if head.weight is embeddings:
        head.weight = nn.Parameter(torch.empty_like(embeddings), requires_grad=False)
    vocab, device = len(embeddings), embeddings.device
    embeddings.normal_(0.0, LOUD, generator=torch.Generator(device).manual_seed(0))
    words = torch.arange(vocab, device=device)[:, None]
    known = text_from(words, 1 + DRAFTS, vocab)
    head.weight[known[:, 1]] = embeddings * (0.02 / LOUD)
    return known


class Guesses:
    """A draft that knows the text. right: the probability of each of its tokens to be."""

    def __init__(self, known: Tensor) -> None:
        self.right, self._known = 1.0, known[:, 1:]
        self._numbers = torch.Generator(known.device).manual_seed(0)

    def propose(self, state: DraftState) -> Proposal:
        """A wrong token is the last one again, which never follows within a cycle."""
        last = state.tokens.gather(1, state.position[:, None].long())
        known = self._known[last[:, 0]]
        odds = torch.rand(known.shape, generator=self._numbers, device=known.device)
        return Proposal(torch.where(odds < self.right, known, last))


class KnownTree(Guesses):
    """A tree of so many nodes, with one right branch."""

    def __init__(self, known: Tensor, nodes: int) -> None:
        super().__init__(known)
        self.num_drafts = nodes - 1
        at = torch.arange(self.num_drafts, device=known.device)
        self._depths = at * DRAFTS // self.num_drafts
        first = torch.searchsorted(self._depths, self._depths)
        self._is_right = at == torch.searchsorted(self._depths, self._depths, right=True) - 1
        self._parents = (first - 1).to(torch.int32)

    def propose(self, state: DraftState) -> Proposal:
        """As of a chain."""
        last = state.tokens.gather(1, state.position[:, None].long())
        right = self._known[last[:, 0]][:, self._depths]
        parents = self._parents.expand(len(last), -1)
        return Proposal(torch.where(self._is_right, right, last), parents)


def head_config(model: Any) -> dict[str, Any]:
    """The config.json of a head of this model, also of one with few layers."""
    config = model.config.get_text_config()
    layers = config.num_hidden_layers
    states = min(2, layers - 1), layers // 2, max(layers - 3, 0)
    return {
        **_sizes(config),
        "draft_vocab_size": min(WORDS, config.vocab_size),
        "eagle_aux_hidden_state_layer_ids": states,
    }


def block_config(model: Any) -> dict[str, Any]:
    """The config.json of a DFlash draft of this model, likewise."""
    config = model.config.get_text_config()
    last = max(config.num_hidden_layers - 3, 0)
    ids = [last * number // (BLOCK_LAYERS - 1) for number in range(BLOCK_LAYERS)]
    return {
        **_sizes(config),
        "num_hidden_layers": BLOCK_LAYERS,
        "dflash_config": {"mask_token_id": 0, "target_layer_ids": ids},
    }


def _sizes(config: Any) -> dict[str, int]:
    names = "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size"
    return {name: getattr(config, name) for name in (*names, "vocab_size")}


def _odds(device: torch.device) -> Tensor:
    """float32 `[NUMBERS]`, of 0 to 1."""
    numbers = torch.Generator(device).manual_seed(0)
    return torch.rand(NUMBERS, generator=numbers, device=device)


class KnownHead(Eagle3Head):
    """A head with random weights, which knows the text. right: `[]`, the probability of each of its
    words to be.

    known: of `teach`. text: int64 `[N]`, tokens that are words of the head.
    """

    def __init__(self, model: Any, known: Tensor, text: Tensor) -> None:
        embeddings, device = model.get_input_embeddings(), known.device
        super().__init__(head_config(model), device=device, dtype=embeddings.weight.dtype)
        self.requires_grad_(False)
        self.embed_tokens = embeddings
        count = self.draft_vocab_size
        ids = torch.arange(len(known), device=device)
        # Words of the text, and of the others as many as there is room for.
        in_text = torch.isin(ids, text)
        kept = torch.cat([ids[in_text], ids[~in_text]])[:count].sort().values
        self.d2t.copy_(kept - ids[:count])
        self._words = torch.zeros_like(ids)
        self._words[kept] = ids[:count]
        self._known, self.right = known[:, 1], torch.ones((), device=device)
        self._odds = _odds(device)

    def forward(
        self, tokens: Tensor, hidden: Tensor, *, rows: Tensor | None = None, **where: Any
    ) -> tuple[Tensor, Tensor]:
        """As of any head. A wrong word is the last token again, and then no other is right."""
        logits, hidden = super().forward(tokens, hidden, rows=rows, **where)
        last, at = tokens, where["batch"].positions
        if rows is not None:
            last, at = last[rows], at[rows]
        odds = self._odds[(at * STRIDE + last) % NUMBERS]
        right = self._known[last]
        found = torch.where(odds < self.right, right, last)
        for words, lift in ((right, -LIFT), (found, LIFT)):
            logits.scatter_(-1, self._words[words][:, None], lift)
        return logits, hidden


class KnownLayer(MTPLayer):
    """An MTP layer with random weights, which knows the text by the embedding that it reads. right:
    as of `KnownHead`. drafts: tokens of a round."""

    def __init__(self, model: Any, drafts: int) -> None:
        decoder, head = model.get_decoder(), model.get_output_embeddings()
        like, device, dtype = decoder.layers[-1].self_attn, head.weight.device, head.weight.dtype
        with torch.device(device):
            layer = type(decoder.layers[-1])(like.config, like.layer_idx)
            super().__init__(like.config.to_dict(), layer, norm=type(decoder.norm))
        self.to(dtype=dtype).requires_grad_(False).eval()
        numbers = torch.Generator(device).manual_seed(0)
        for each in (each for each in self.parameters() if each.dim() > 1):
            each.normal_(0.0, 0.02, generator=numbers)
        # What the layer adds to that is small.
        self.eh_proj.weight[:, : self.hidden_size].diagonal().add_(LOUD)
        self.shared_head["head"], self.num_drafts = head, drafts
        self.right, self._odds = torch.ones((), device=device), _odds(device)

    def forward(
        self, tokens: Tensor, hidden: Tensor, *, rows: Tensor | None = None, **where: Any
    ) -> tuple[Tensor, Tensor]:
        """As of any layer. tokens: embeddings."""
        at = where["position_ids"] * STRIDE + tokens[..., 0].long()
        sign = torch.where(self._odds[at % NUMBERS] < self.right, 1.0, -1.0).to(tokens.dtype)
        return super().forward(tokens * sign[..., None], hidden, rows=rows, **where)


class KnownBlocks(DFlashHead):
    """A DFlash draft with random weights, which knows the text. right: as in `KnownHead`."""

    def __init__(self, model: Any) -> None:
        weight = model.get_input_embeddings().weight
        super().__init__(block_config(model), device=weight.device, dtype=weight.dtype)
        self.requires_grad_(False)
        if model.config.get_text_config().num_hidden_layers == 1:
            self.states = (0,) * BLOCK_LAYERS  # of one layer only the embeddings are read
        self.right, self._odds = torch.ones((), device=weight.device), _odds(weight.device)

    def forward(self, last: Tensor, states: Tensor, **where: Any) -> Tensor:
        """As of any draft. The last linear chooses what follows the token whose embedding it is
        given. A wrong word is the one behind the right one."""
        hidden, embeddings = super().forward(last, states, **where), where["embeddings"]
        text = text_from(last[:, None], self.block_size, self.vocab_size)
        at = where["batch"].positions.view(len(last), -1)[:, 1:]
        odds = self._odds[(at * STRIDE + last[:, None]) % NUMBERS]
        follows = torch.where(odds < self.right, text[:, :-1], text[:, 1:])
        known: Tensor = embeddings[follows]
        return hidden + known


class Calls:
    """Calls of `generate()` at one point, whose text is `want`."""

    def __init__(self, setup: Setup, model: Any, point: Point, known: Tensor) -> None:
        self._model, self.new = model, NEW[setup.size]
        first = models.tokens(setup, model, point.batch, 1)
        self.want = text_from(first, point.context + self.new, len(known))
        given = generate.arguments(setup, model, point, self.new)
        self._given = {**given, "inputs": self.want[:, : point.context]}
        self._draft, self._known = Guesses(known), known
        self._heads: list[KnownHead | KnownLayer | KnownBlocks] = []
        self._made: dict[str, tuple[Any, Any]] = {}

    def way(self, name: str, how: ways.How) -> Way:
        """One of the suite. It raises RuntimeError if nothing was drafted where something should
        be, or if a call that is timed writes another text."""
        one, handle = self._patched(name, how)
        given, found = {**self._given, **how.given}, Row()
        drafts = kind_of(name) != PLAIN

        def text() -> Tensor:
            self._draft.right = RIGHT.get(name, 1.0)
            for head in self._heads:
                head.right.fill_(HEADS.get(name, 1.0))
            written: Tensor = one.generate(**given)
            took = None if handle is None else handle.took
            if took is not None:
                found["decode"] = took.decode
            if took is not None and drafts:
                if not took.tokens_a_round:
                    raise RuntimeError(took.rounds)
                found["tokens_a_round"] = round(took.tokens_a_round, 2)
            return written

        def warm() -> Tensor:
            for _ in range(generate.WARM):
                text()
                generate.wait_for_kernels()
            return text()

        def timed() -> None:
            if not torch.equal(text(), self.want):
                raise RuntimeError(f"{name}: a call that was timed wrote another text")

        return Way(Timed(timed), warm, more=found)

    def _patched(self, name: str, how: ways.How) -> tuple[Any, Any]:
        """Of `models.patched`. Ways of a kind share a model. They are of so few kinds, and yet of
        several: a model keeps few large graphs of rounds."""
        kind = kind_of(name)
        if kind in self._made:
            return self._made[kind]
        draft: Any = None
        if name in RIGHT:
            draft = self._draft
        elif name in TREES:
            draft = KnownTree(self._known, TREES[name])
        elif name in HEADS:
            head: Any = self._head(kind.removeprefix("attnops_"))
            self._heads.append(head)
            draft = DraftTree(head) if kind == "attnops_head_tree" else head
        if draft is not None:
            how = replace(how, patch={**(how.patch or {}), "speculate": draft})
        self._made[kind] = models.patched(self._model, how)
        return self._made[kind]

    def _head(self, kind: str) -> KnownHead | KnownLayer | KnownBlocks:
        if kind in ways.MTPS:
            return KnownLayer(self._model, ways.MTPS[kind])
        if kind == "dflash":
            return KnownBlocks(self._model)
        return KnownHead(self._model, self._known, self.want.flatten())

    def clock(self, steps: Mapping[str, Timed]) -> Times:
        """The time of a token after the first one."""
        one = {**self._given, "max_new_tokens": 1}
        prompts = {
            f"{kind}, prompt": Timed(partial(model.generate, **one))
            for kind, (model, _) in self._made.items()
        }
        us = steps_us({**steps, **prompts}, rounds=generate.ROUNDS, cap_s=40.0)

        def token(name: str) -> dict[str, float]:
            whole, prompt = us[name], us[f"{kind_of(name)}, prompt"]
            found = {
                "median_us": whole["median_us"] - prompt["median_us"],
                "spread_us": whole["spread_us"] + prompt["spread_us"],
            }
            return {name: round(spent / (self.new - 1), 2) for name, spent in found.items()}

        return {name: token(name) for name in steps}


def kind_of(name: str) -> str:
    """Of a way, without the number at the end of its name. Trees of other sizes have graphs of
    their own."""
    return name if name in TREES else re.sub(r"_\d+$", "", name)


@torch.no_grad()
def measure(setup: Setup, kept: models.Kept, name: str, point: Point) -> Rows:
    """The ways of one model at one prompt, in turns. Raises RuntimeError if transformers' own model
    writes another text."""
    model = kept(name)
    calls = Calls(setup, model, point, teach(model))
    some, new = calls.want[: models.EXACT], calls.new
    follows = model(some[:, :-1], logits_to_keep=new).logits.argmax(-1)
    if not torch.equal(follows, some[:, -new:]):
        raise RuntimeError(f"{name} does not write the text that its embeddings are made for")

    def figures(us: float, way: Way) -> Row:
        found = {
            "tokens_s": round(point.batch / us * 1e6, 1),
            "layers": model.config.num_hidden_layers,
            "new_tokens": new,
        }
        if each := way.more.get("tokens_a_round"):
            rounds = round((new - 1) / each)  # not the one too many, whose step runs all the same
            found |= {"tokens_a_round": each, "round_us": round(us * (new - 1) / rounds, 2)}
        return found

    made: Ways = {
        way: partial(calls.way, way, how) for way, how in ways.chosen(setup, SUITE, PLAIN).items()
    }
    rows = time_if_right(
        f"{name} {point}", made, calls.want, 0.0, calls.clock, more=figures, own=(PLAIN,)
    )
    step_us = next((row.get("median_us") for row in rows if row["way"] == PLAIN), None)
    for row in rows:
        if step_us and "round_us" in row:
            row["of_step"] = round(row["round_us"] / step_us, 4)
    return with_ratios(rows, PLAIN, "hf", "hf_lookup")
