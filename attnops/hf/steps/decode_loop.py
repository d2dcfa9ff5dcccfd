"""`Loop`: in place of `_sample`, the loop of transformers' `generate()`, where a call is plain.

A token costs two replays, of the step and of the tail. The tail writes the next step's input, and
the host enqueues that step before it reads whether every row was finished: the device does not wait
for the host. Of the one step too many the cache forgets its tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.modeling_outputs import CausalLMOutputWithPast

from attnops.graphs.cuda_graphs import CudaGraphs, Device
from attnops.hf import not_fast
from attnops.hf.cache.names import cache_in, named
from attnops.hf.generation import Generation, running_generation
from attnops.hf.private import changed
from attnops.hf.steps.around import flags
from attnops.hf.steps.calls import StepInputs
from attnops.hf.steps.decode import Decoder
from attnops.hf.steps.eligibility import FOLLOWED, Asked, fields, why_not_plain, why_not_sampled
from attnops.hf.steps.graphed_steps import passes_of
from attnops.hf.steps.heads import Head, addresses
from attnops.hf.steps.hidden import Modules, Read
from attnops.hf.steps.round_graph import Round
from attnops.hf.steps.round_kinds import Form
from attnops.hf.steps.rounds import Rounds, why_no_rounds
from attnops.hf.steps.sampler_graph import Choice, Tail
from attnops.hf.steps.speculate import Plan, drafting, plan_of
from attnops.nn import Packed, pack_linears

# Idle tails that are kept, the last used ones: several of one choice, where threads used them at
# once. More, up to _MOST_SMALL, are kept while all of them hold no more than so many bytes.
_MOST = 4
_MOST_BYTES = 2**28
_MOST_SMALL = 64

_HEADS = threading.Lock()
"""For the heads and the calls of loops."""


class Loop:
    """The loop of one model.

    speculate: what drafts, where a call does not say, see `patch`. pack: of a head, as `Decode` has
    it.

    head: the draft head to which graphs of the model return its states; None: they return none.
    """

    def __init__(self, speculate: Any = None, pack: bool = True) -> None:
        self._drafts, self._pack = plan_of(speculate), pack
        self._packed: dict[nn.Module, Packed] = {}
        self.head: Head | None = None if self._drafts is None else self._drafts.form.head
        self._pack_head()
        self._calls = set[Generation]()  # that run
        self._idle: list[Tail | Round] = []  # the last used one last
        self._begun: Round | None = None  # its kernels are being compiled
        self._forms = set[Form]()  # of rounds that were begun
        self._device: Device | None = None
        self._place: torch.device | None = None  # of the tails

    def reads(self, owner: Any) -> Modules | None:
        """The modules of the model whose outputs the head reads."""
        return None if self.head is None else partial(self.head.sources, owner)

    def __getstate__(self) -> dict[str, Any]:
        lost: dict[str, Any] = {"_calls": set(), "_idle": [], "_begun": None, "_forms": set()}
        return {**self.__dict__, **lost, "_device": None}

    @property
    def nbytes(self) -> int:
        """Bytes of the graphs and their buffers."""
        return sum(tail.nbytes for tail in tuple(self._idle))

    def free(self) -> None:
        """Free the graphs, and the memory of their pool."""
        self._begun = None
        while self._idle:
            self._idle.pop().graphs.reset()
        if self._device is not None:
            self._device.release()

    def undo(self) -> None:
        """Give the weights of heads memory of their own again."""
        for packed in self._packed.values():
            packed.undo()
        self._packed.clear()

    def _pack_head(self) -> None:
        if self.head is not None and self._pack:
            module = self.head.module
            self._packed[module] = self._packed.get(module) or pack_linears(module)

    def _let_read(self, head: Head | None, anew: Callable[[], None]) -> bool:
        """Let a head read the states of the model, which graphs return for one head at a time.
        anew: as of `kwargs`. False: another call runs, which has the present graphs."""
        with _HEADS:
            if head is None or head == self.head:
                return True
            if len(self._calls) > 1:
                return False
            self.head = head
            self._pack_head()
            anew()
            return True

    def kwargs(
        self,
        decoder: Callable[[], Decoder],
        anew: Callable[[], None],
        owner: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> dict[str, Any]:
        """The arguments with which `generate()` of the model runs in this loop, where it may.

        decoder: returns the graphs of the model's steps. anew: forgets them, as they return the
        states that one head reads. `end` follows the call.
        """
        if (running := running_generation()) is not None:
            with _HEADS:
                self._calls.add(running)
        if why := changed(*FOLLOWED):
            not_fast.warn(owner, not_fast.CHOICE, why)
        drafted = drafting(owner, args, kwargs, self._drafts)
        plan = drafted.plan
        _note_rounds(drafted.why)
        if why := why or next(why_not_sampled(owner, args, drafted.kwargs), ""):
            _note(why)
            if plan is not None:
                _note_rounds(f"attnops drafted nothing: {why}")
            return kwargs
        if plan is not None and not self._let_read(plan.form.head, anew):
            plan = None
            _note_rounds("nothing was drafted: the steps of another call have no states for it")
        sample, streamer = self._sample, kwargs.get("streamer")
        if plan is not None and running is not None:
            running.drafts = plan.form.depths[-1]

        # transformers looks `_sample` up on the class, where a method of one model has no place. It
        # hands its own no streamer.
        def decode(
            self: Any,
            input_ids: Tensor,
            logits_processor: Any,
            stopping_criteria: Any,
            generation_config: Any,
            **model_kwargs: Any,
        ) -> Any:
            asked = Asked(
                self,
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                streamer,
                model_kwargs,
            )
            return sample(asked, decoder(), plan)

        return {**drafted.arguments(), "custom_generate": decode}

    def end(self, generation: Generation) -> None:
        """After a call."""
        with _HEADS:
            self._calls.discard(generation)

    def _sample(self, asked: Asked, decoder: Decoder, plan: Plan | None) -> Any:
        if not (why := next(why_not_plain(asked, decoder), "")):
            return self._run(asked, decoder, plan)
        _note(why)
        if plan is not None:
            _note_rounds(f"nothing was drafted: {why}")
        owner, ids, processors, criteria, config, streamer, given = asked
        return type(owner)._sample(
            owner,
            ids,
            logits_processor=processors,
            stopping_criteria=criteria,
            generation_config=config,
            streamer=streamer,
            **given,
        )

    def _run(self, asked: Asked, decoder: Decoder, plan: Plan | None) -> Any:
        owner, config, given = asked.owner, asked.config, asked.given
        read = list[Read]()
        if plan is not None:
            with decoder.turn:
                self._begin(asked, decoder, plan)
        with _read_by(plan, read):
            out = owner._prefill(asked.input_ids, config, given, is_first_iteration=True)
        # A copy of the last logits, so that a long prompt's others are freed.
        logits = out.logits[:, -1:].clone()
        del out
        kept = plan is not None and _is_kept(cache_in(given), asked)
        if plan is not None and (why := next(why_no_rounds(asked, decoder, plan, kept, read), "")):
            plan = None
            read.clear()
            _note_rounds(f"nothing was drafted: {why}")
        with decoder.turn:
            tail = self._taken(_choice(asked, plan, logits.shape[-1]), asked, decoder)
        try:
            _note(tail.graphs.reason)
            with owner._optimize_model_for_decode():
                if isinstance(tail, Tail):
                    return _decoded(asked, decoder, tail, logits)
                assert plan is not None
                cost = plan.cost(owner)
                rounds = Rounds(asked, decoder, tail, kept, read, cost)
                return _drafted(rounds, asked, logits, plan)
        finally:
            with decoder.turn:
                self._put_back(tail)

    def _begin(self, asked: Asked, decoder: Decoder, plan: Plan) -> None:
        """Have the kernels of the first rounds begin to be compiled before the prompt runs. Once a
        form: a call may have a reason to draft nothing, and so may those after it."""
        if plan.form in self._forms:
            return
        self._forms.add(plan.form)
        cache, embed = cache_in(asked.given), asked.owner.get_input_embeddings()
        with suppress(Exception):  # the rounds raise it
            made = _round(_choice(asked, plan, embed.weight.shape[0]), asked, decoder)
            made.begin_kernels()
            self._begun = made
            # Not of layers with states, which get room for what is kept behind the prompt.
            for queries in () if cache.states else plan.form.verified:
                decoder.begin(cache.state, asked.input_ids.shape[0], queries)

    def _taken(self, choice: Choice, asked: Asked, decoder: Decoder) -> Tail | Round:
        """A tail of this choice, which no other call has meanwhile.

        A model that has moved has left those on its old device.
        """
        begun, self._begun = self._begun, None
        if choice.device != self._place:
            self.free()
            self._place, self._device = choice.device, None
        tail = next((tail for tail in reversed(self._idle) if tail.choice == choice), None)
        if tail is not None:
            self._idle.remove(tail)
            if not tail.graphs.failures.passing:
                return tail
        # What was not the choice's own fault is tried again.
        if tail is None and choice.drafts is None:
            tail = Tail(choice, asked.processors)
        elif tail is None:
            if begun is None or begun.choice != choice:
                begun = _round(choice, asked, decoder)
            tail = begun
        self._device = self._device or decoder.how.graphs or CudaGraphs(choice.device)
        tail.capture(self._device)
        if why := tail.graphs.reason:
            passing = bool(tail.graphs.failures.passing)
            not_fast.warn(asked.owner, not_fast.CHOICE, why, passing=passing)
        return tail

    def _put_back(self, tail: Tail | Round) -> None:
        """Keep a tail for later calls, and free those that were not used for long."""
        if tail.choice.device != self._place:  # the model has moved meanwhile
            tail.graphs.reset()
            return
        self._idle.append(tail)
        while len(self._idle) > _MOST_SMALL or (
            len(self._idle) > _MOST and self.nbytes > _MOST_BYTES
        ):
            self._idle.pop(0).graphs.reset()


def _choice(asked: Asked, plan: Plan | None, vocab: int) -> Choice:
    """vocab: the logits of a token."""
    device = asked.input_ids.device
    return Choice(
        device,
        rows=asked.input_ids.shape[0],
        # Rounded up, so that caches of like lengths share a graph.
        room=1 << cache_in(asked.given).max_length.bit_length(),
        vocab=vocab,
        ends=sum(tokens.numel() for tokens in asked.eos),
        sampled=bool(asked.config.do_sample),
        processors=fields(asked.processors, device),
        flags=(*flags(), *addresses(None if plan is None else plan.form.head, asked.owner)),
        drafts=None if plan is None else plan.form,
    )


def _round(choice: Choice, asked: Asked, decoder: Decoder) -> Round:
    return Round(choice, asked.processors, asked.owner, passes_of(decoder.how, {}))


def _decoded(asked: Asked, decoder: Decoder, tail: Tail, logits: Tensor) -> Any:
    """What transformers' `_sample` does and returns after the prompt. logits: `[B, 1, V]`, the
    prompt's last."""
    streamer, cache, most = asked.streamer, cache_in(asked.given), asked.max_length
    heard = bool(asked.eos) or streamer is not None
    # A step that was one too many is taken back, but for states, which cannot go back.
    waits = heard and bool(cache.states) and _is_kept(cache, asked)
    tail.begin(asked, heard)
    steps = _Steps(asked.owner, decoder, tail, asked.given)
    length = asked.input_ids.shape[1] + 1
    ahead = False
    try:
        with decoder.turn:
            tail.choose(logits)
        while length < most:
            if waits and _told(tail, streamer):
                break
            logits = steps.next(length)
            ahead = not cache.states
            if heard and not waits and _told(tail, streamer):
                break
            ahead = False
            with decoder.turn:
                tail.choose(logits)
            length += 1
        else:
            if streamer is not None:
                _told(tail, streamer)
    finally:
        if ahead:
            cache.crop(-1)
    if streamer is not None:
        streamer.end()
    sequences: Any = tail.tokens[:, :length].clone()
    return (
        GenerateDecoderOnlyOutput(sequences=sequences, **named(cache))
        if asked.config.return_dict_in_generate
        else sequences
    )


def _drafted(rounds: Rounds, asked: Asked, logits: Tensor, plan: Plan) -> Any:
    """As `_decoded`, in rounds."""
    try:
        with plan.drafts(asked) as draft:
            return rounds.run(logits, draft)
    finally:
        _note_rounds(str(rounds), rounds.tokens_a_round)


def _is_kept(cache: Any, asked: Asked) -> bool:
    """Does the caller have the cache after the call?"""
    running = running_generation()
    lent = running is not None and any(each is cache for each in running.lent)
    return bool(asked.config.return_dict_in_generate) or not lent


class _Steps:
    """The steps of one call after its prompt, for the token in the tail: from graphs, or as
    transformers' loop runs them.

    given: the arguments of the model's first call.
    """

    def __init__(self, owner: Any, decoder: Decoder, tail: Tail, given: dict[str, Any]) -> None:
        self._owner = owner
        self._decoder = decoder
        self._tail = tail
        self._given = given
        self._cache = cache_in(given)
        self._running, state = running_generation(), self._cache.state
        # As for transformers' loop: the prompt's mask was checked, and only grows.
        checked = self._running is not None and self._running.checked is state.pages.pad
        self._served = checked and state.whole
        self._untold = 0  # tokens that `given` does not count

    def next(self, length: int) -> Tensor:
        """Logits `[B, 1, V]` after a text of this length."""
        self._untold += 1
        asks = StepInputs(self._tail.token, self._tail.position)
        out = self._decoder.try_step(asks, self._cache) if self._served else None
        if out is None:
            return self._plain(length)
        if self._running is not None:
            self._running.graphs = self._decoder.last_mode
        return out.logits

    def _plain(self, length: int) -> Tensor:
        owner, seen = self._owner, CausalLMOutputWithPast(**named(self._cache))
        self._given = given = owner._update_model_kwargs_for_generation(
            seen, self._given, num_new_tokens=self._untold
        )
        self._untold = 0
        inputs = owner.prepare_inputs_for_generation(
            self._tail.tokens[:, :length], next_sequence_length=1, **given
        )
        logits: Tensor = owner(**inputs, return_dict=True).logits
        return logits


def _told(tail: Tail, streamer: Any) -> bool:
    """Hand the last chosen tokens on. Returns whether every row is finished."""
    tokens, finished = tail.news()
    if streamer is not None:
        streamer.put(tokens)
    return finished


@contextmanager
def _read_by(plan: Plan | None, read: list[Read]) -> Iterator[None]:
    """Within the block of a prompt `read` gets its hidden states, where a head wants them."""
    running = running_generation()
    if running is None or plan is None or plan.form.head is None:
        yield
        return
    running.hidden = read
    try:
        yield
    finally:
        running.hidden = None


def _note(why: str) -> None:
    """For `Patched.took`."""
    if (running := running_generation()) is not None:
        running.loop = why


def _note_rounds(told: str, tokens_a_round: float = 0.0) -> None:
    """For `Patched.took`: what drafts were worth, or why there were none."""
    if (running := running_generation()) is not None:
        running.rounds, running.tokens_a_round = told, tokens_a_round
