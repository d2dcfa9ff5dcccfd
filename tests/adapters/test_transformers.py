"""What stands around transformers models works with a patched one as it is: pipelines, and Trainer."""

import pytest
import torch

pytest.importorskip("accelerate", reason="accelerate (extra dev) is not installed; Trainer needs it")

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import attnops
from attnops.hf import tiny
from tests.adapters.helpers import Calls, block

WORDS = ["[PAD]", "[UNK]", "[EOS]", "[MASK]", *(f"w{i}" for i in range(100))]
PROMPTS = ["w1 w2 w3 w4 w5", "w6", "w7 w8 w9"]


@pytest.fixture(scope="module")
def tokenizer():
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    names = dict(zip(("pad_token", "unk_token", "eos_token", "mask_token"), WORDS, strict=False))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, padding_side="left", **names)


def ops(function):
    with Calls() as calls:
        result = function()
    return result, {name for name in calls.names if name.startswith("attnops::")}


MASKED = ["w1 [MASK] w2", "w3 w4 w5 [MASK] w6"]
PIPELINES = {
    "text-generation": ("llama", PROMPTS, {"max_new_tokens": 6, "do_sample": False, "batch_size": 1}),
    "text-generation of a batch": ("llama", PROMPTS, {"max_new_tokens": 6, "do_sample": False, "batch_size": 3}),
    "fill-mask": ("bert", MASKED, {"batch_size": 2, "top_k": 3}),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines(tokenizer, name):
    family, texts, options = PIPELINES[name]
    model = tiny.model(family)

    def answers():
        pipe = transformers.pipeline(name.partition(" ")[0], model=model, tokenizer=tokenizer, device="cpu")
        return [dict(answer) for found in pipe(texts, **options) for answer in found]

    want = answers()
    with attnops.patch(model):
        got, called = ops(answers)
    assert called == {"attnops::attention"}
    assert got == [{**answer, "score": pytest.approx(answer["score"], rel=1e-4)} if "score" in answer else answer for answer in want]


def texts():
    """Twelve texts of different lengths, padded on the right."""
    for i in range(12):
        ids = torch.randint(4, 100, (10,), generator=torch.Generator().manual_seed(i))
        mask = (torch.arange(10) < 4 + i % 7).long()
        yield {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.where(mask.bool(), ids, -100)}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_trainer(tmp_path, checkpointing):
    """Three steps of two batches each."""

    def train(model):
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-2, use_cpu=True,
            logging_steps=1, save_strategy="no", report_to=[], seed=0, disable_tqdm=True, gradient_checkpointing=checkpointing,
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=[*texts()])
        trainer.train()
        return [line["loss"] for line in trainer.state.log_history if "loss" in line]

    theirs, ours = tiny.model("llama", attn_implementation="sdpa"), tiny.model("llama", attn_implementation="sdpa")
    want = train(theirs)
    with attnops.patch(ours):
        got, called = ops(lambda: train(ours))
    assert len(want) == 3 and got == pytest.approx(want, rel=1e-4)
    assert called == {"attnops::attention", "attnops::attention_backward"}
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_the_page(tokenizer):
    exec(block("transformers.pipeline"), {"model": tiny.model("llama"), "tokenizer": tokenizer})
