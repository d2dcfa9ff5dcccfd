"""What the tests of drafts share: calls, and models that are patched with them."""

import copy

import torch

import attnops
from attnops.hf import tiny
from attnops.hf.cache.names import cache_of, named
from attnops.hf.steps.round_graph import Round
from attnops.nn import Eagle3Head, Proposal
from tests.hf.decoding import auto


def asked(rows, length=9):
    torch.manual_seed(rows)
    ids = torch.randint(3, tiny.VOCAB, (rows, length))
    mask = torch.ones_like(ids)
    mask[1::2, :3] = 0
    return {"input_ids": ids * mask, "attention_mask": mask, "do_sample": False}


def patched(model, speculate):
    ours = copy.deepcopy(model)
    return ours, attnops.patch(ours, decode=auto(compile_after=None), speculate=speculate)


def worth(handle):
    """Tokens of a row a round."""
    assert handle.took.rounds.startswith(f"{handle.took.tokens_a_round:.2f} tokens")
    return handle.took.tokens_a_round


def next_turn(model, speculate, proposed):
    """(The second call of a chat, the text that a head gave it, how many of its tokens the head has
    not read): it reads the tokens of a call, from wherever the cache of the caller ends, which
    lacks the last token of a turn."""
    ours, how = copy.deepcopy(model), auto(compile_after=None)
    handle = attnops.patch(ours, cache="paged", decode=how, speculate=speculate)
    given = {**asked(1), "max_new_tokens": 8, "return_dict_in_generate": True}
    want, got = model.generate(**given), ours.generate(**given, **named(handle.new_cache(1, 64)))
    turn = torch.cat([want.sequences, torch.tensor([[7, 8, 9]])], 1)
    more = {**given, "input_ids": turn, "attention_mask": torch.ones_like(turn)}
    again = model.generate(**more, **named(cache_of(want))).sequences
    proposed.clear()
    assert torch.equal(ours.generate(**more, **named(cache_of(got))).sequences, again)
    assert worth(handle) >= 1
    return more, again, want.sequences.shape[1] - 1


class Verified:
    """The logits that rounds choose their tokens from."""

    def __init__(self, monkeypatch):
        self.steps, choose = [], Round.choose

        def noted(made, out, drafts=True):
            logits = out.logits.clone()
            choose(made, out, drafts)
            self.steps.append((logits, made._path(logits.shape[1]).clone()))

        monkeypatch.setattr(Round, "choose", noted)

    def logits(self):
        """Of each row, those of its tokens, in order."""
        rows = [[] for _ in self.steps[0][1]]
        for logits, path in self.steps:
            for row, own, kept in zip(rows, logits, path, strict=True):
                row += own[kept[kept >= 0].long()]
        self.steps.clear()
        return rows


def assistant(mode="auto"):
    """A model that drafts, and its handle."""
    other = tiny.model("llama", seed=3)
    return other, attnops.patch(other, decode=auto(mode, compile_after=None))


class Oracle:
    """Drafts the next tokens of known texts, of which a part is wrong, and some are none."""

    def __init__(self, drafts=5, wrong=0.25):
        self.num_drafts, self.wrong, self.texts = drafts, wrong, None
        self.numbers = torch.Generator().manual_seed(1)

    def propose(self, state):
        depths = torch.arange(self.num_drafts, device=state.tokens.device)
        return Proposal(self.after(state, depths))

    def after(self, state, depths):
        """The tokens at so many places behind the next one. depths: `[K]` or `[B, K]`."""
        at = state.seq_lens[:, None] + depths
        found = self.texts.gather(1, at.clamp(max=self.texts.shape[1] - 1).long())
        odds = torch.rand(found.shape, generator=self.numbers).to(found.device)
        found = torch.where(odds < self.wrong, (found + 1) % tiny.VOCAB, found)
        return torch.where(odds < self.wrong / 5, -1, found)


class Branches(Oracle):
    """Trees of any shape, another for each row and round: often, a child that is not the first of
    its parent is right."""

    def propose(self, state):
        rows, drafts = state.tokens.shape[0], self.num_drafts
        share = torch.rand(rows, drafts, generator=self.numbers) ** 0.5
        parents = (share * torch.arange(1, drafts + 1)).long() - 1
        depths = torch.zeros_like(parents)
        for node in range(drafts):
            before = parents[:, node : node + 1]
            deeper = depths.gather(1, before.clamp(min=0)) + 1
            depths[:, node] = torch.where(before >= 0, deeper, 0)[:, 0]
        device = state.tokens.device
        return Proposal(self.after(state, depths.to(device)), parents.to(device, torch.int32))


def right(drafts_of, given, want, proposed):
    """What was proposed in a call is what `drafts_of` says after the whole text, for so many
    tokens. want: the texts of the call."""
    proposed = [(stored, tokens) for stored, tokens in proposed if (tokens >= 0).any()]
    assert len(proposed) > 3
    pad = (given["attention_mask"] == 0).sum(1)
    for stored, tokens in proposed:
        for row, length in enumerate(pad + stored + 1):
            if length < want.shape[1]:
                found = drafts_of(want[row, pad[row] : length], tokens.shape[1])
                assert torch.equal(tokens[row], found)


STATES = (1, 2, 0)
"""That a head reads."""


def words_of(model, **more):
    """The config of a head."""
    config = model.config.get_text_config()
    width = config.hidden_size
    return {
        "hidden_size": width,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 2 * width,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.vocab_size // 2,
        "eagle_aux_hidden_state_layer_ids": STATES,
        **more,
    }


def head_of(model, seed=5, **more):
    """A head with random weights."""
    torch.manual_seed(seed)
    head = Eagle3Head(words_of(model, **more))
    if head.draft_vocab_size < head.vocab_size:
        head.d2t.copy_(torch.arange(head.draft_vocab_size))  # every second word
    return head
