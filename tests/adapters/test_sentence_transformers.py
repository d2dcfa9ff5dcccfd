"""sentence-transformers: embeddings of packed texts are those of padded ones with the model's own
attention."""

import re

import pytest
import torch

pytest.importorskip(
    "sentence_transformers", reason="sentence-transformers (extra dev) is not installed"
)

import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Dense
from sentence_transformers.base.modules.transformer import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.sparse_encoder.modules import SpladePooling
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import attnops
from attnops.core.errors import PatchError
from tests.adapters.helpers import Calls, block, grads, same_grads

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "one",
    "two",
    "words",
    "some",
    "more",
    "a",
    "b",
    "c",
    "d",
    "e",
    "f",
    "g",
]
TEXTS = ["one two words", "a b c d e f g", "some", "more words a b " * 6]
PAIRS = list(zip(TEXTS, TEXTS[::-1], strict=True))
SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "pad_token_id": 0,
    "max_position_embeddings": 64,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
WINDOWS = {
    "local_attention": 8,
    "global_attn_every_n_layers": 2,
    "cls_token_id": 2,
    "sep_token_id": 3,
}
CONFIGS = {
    "bert": {},
    "xlm-roberta": {},
    "modernbert": WINDOWS,
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "llama": {},
}
PACKED = {"varlen_attention"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder with weights and a tokenizer for each kind of model."""
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=ends
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), WORDS, strict=False))
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=60, **names
    )
    found = {}
    for kind, more in CONFIGS.items():
        torch.manual_seed(0)
        model = transformers.AutoModel.from_config(
            transformers.CONFIG_MAPPING[kind](**SIZES, **more)
        )
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
        found[kind] = str(tmp_path_factory.mktemp(kind))
        model.save_pretrained(found[kind])
        fast.save_pretrained(found[kind])
    return found


def embedder(folders, kind, pooling="mean", **options):
    return SentenceTransformer(
        modules=[Transformer(folders[kind], **options), Pooling(32, pooling_mode=pooling)],
        device="cpu",
    )


def embed(model):
    return model.encode(TEXTS, convert_to_tensor=True)


def run(model):
    """(embeddings, the attnops ops that ran, shape of the tokens)."""
    with Calls() as calls:
        got = embed(model)
    ops = {name.removeprefix("attnops::") for name in calls.names}
    return got, ops, tuple(model.preprocess(TEXTS)["input_ids"].shape)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if kind != "llama"])
def test_packed_texts(folders, kind, pooling):
    """Bidirectional, with positions from the padding's on, with windows, and causal."""
    model = embedder(folders, kind, pooling)
    want, shape = embed(model), tuple(model.preprocess(TEXTS)["input_ids"].shape)
    state = list(model.state_dict())
    with attnops.patch(model) as handle:
        assert (
            "texts are packed" in str(handle.report())
            and handle.report().patched
            and list(model.state_dict()) == state
        )
        got, ops, packed = run(model)
        assert ops == PACKED and packed[0] == 1 and packed[1] < shape[0] * shape[1]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        assert handle.verify(TEXTS).passed and handle.active and attnops.patch(model) is handle
    assert (
        tuple(model.preprocess(TEXTS)["input_ids"].shape) == shape and type(model[0]) is Transformer
    )
    assert torch.equal(embed(model), want)


@pytest.mark.parametrize("output_value", ["token_embeddings", None])
@pytest.mark.parametrize("kind", ["bert", "qwen3"])
def test_outputs_of_each_text(folders, kind, output_value):
    """Tokens and raw outputs are cut from padded rows, in the batches of the model itself."""
    model = embedder(folders, kind)
    own = model.encode(TEXTS, output_value=output_value, batch_size=2)
    with attnops.patch(model):
        got = model.encode(TEXTS, output_value=output_value, batch_size=2)
        assert run(model)[1] == PACKED
    for ours, theirs in zip(got, own, strict=True):
        tensors = [
            {k: v for k, v in x.items() if torch.is_tensor(v)} if isinstance(x, dict) else x
            for x in (ours, theirs)
        ]
        torch.testing.assert_close(*tensors, rtol=1e-4, atol=1e-5)


def sparse(folder):
    return SparseEncoder(
        modules=[Transformer(folder, transformer_task="fill-mask"), SpladePooling()], device="cpu"
    )


def cross(folder):
    scores = Dense(32, 1, module_input_name="sentence_embedding", module_output_name="scores")
    return CrossEncoder(modules=[Transformer(folder), Pooling(32), scores], device="cpu")


@pytest.mark.parametrize(
    ("make", "inputs", "status"),
    [
        (sparse, TEXTS, "0: texts are packed"),
        (cross, PAIRS, "0: texts are packed"),
        (
            lambda folder: CrossEncoder(folder, device="cpu"),
            PAIRS,
            "it is for sequence-classification",
        ),
        (
            Transformer,
            None,
            "Transformer: skipped: texts stay padded, PatchError: verify: got a model without "
            "encode",
        ),
    ],
)
def test_other_models(folders, make, inputs, status):
    model = make(folders["xlm-roberta"])
    with attnops.patch(model) as handle:
        assert status in str(handle.report())
        if inputs is not None:
            assert handle.verify(inputs, show_progress_bar=True).passed


PADDED = {
    "causal": "its masks for causal layers are of one type",
    "asked for": "unpad_inputs is False",
    "a trial that fails": "PatchError: verify FAILED: output 0",
    "an older version": "sentence-transformers is older than 6.0",
}


@pytest.mark.parametrize("case", PADDED)
def test_padded_texts(folders, case, monkeypatch):
    model = embedder(
        folders,
        "llama" if case == "causal" else "bert",
        **({"unpad_inputs": False} if case == "asked for" else {}),
    )
    want = embed(model)
    if case == "a trial that fails":
        monkeypatch.setattr(Transformer, "_infer_flatten_position_offset", lambda self: 1)
    if case == "an older version":
        monkeypatch.delattr(Transformer, "_should_flatten_inputs")
    with attnops.patch(model) as handle:
        assert f"texts stay padded, {PADDED[case]}" in str(handle.report())
        if case != "an older version":  # which this one is not
            got, ops, shape = run(model)
            assert ops == {"attention"} and shape[0] == len(TEXTS)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_training_with_dropout_is_padded(folders):
    model, theirs = embedder(folders, "bert"), embedder(folders, "bert").eval()
    with attnops.patch(model, kernel="sdpa"):
        assert model.eval().preprocess(TEXTS)["input_ids"].shape[0] == 1
        with pytest.raises(
            PatchError, match="got kernel=None for a model that is patched with kernel='sdpa'"
        ):
            attnops.patch(model)
        features = model.train().preprocess(TEXTS)
        assert features["input_ids"].shape[0] == len(TEXTS)
        model(features)["sentence_embedding"].sum().backward()
    model[0].model.config.attention_probs_dropout_prob = 0.0
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    with attnops.patch(model):
        features = model.train().preprocess(TEXTS)
        assert features["input_ids"].shape[0] == 1
        ours = grads(model, model(features)["sentence_embedding"].square().sum())
    same_grads(
        ours, grads(theirs, theirs(theirs.preprocess(TEXTS))["sentence_embedding"].square().sum())
    )


def files(model, folder):
    model.save_pretrained(str(folder), create_model_card=False)
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.*"))
    }


def test_a_patched_model_is_saved_as_the_model(folders, tmp_path):
    """SentenceTransformerTrainer does so in the middle of a run. The classes that are named are
    those of sentence-transformers."""
    model = embedder(folders, "bert")
    want = embed(model)
    own = files(model, tmp_path / "own")
    with attnops.patch(model) as handle:
        assert "texts are packed" in str(handle.report())
        assert files(model, tmp_path / "patched") == own
    torch.testing.assert_close(
        embed(SentenceTransformer(str(tmp_path / "patched"), device="cpu")), want
    )


def test_the_page(folders):
    exec(
        re.sub(r'SentenceTransformer\(".*?"\)', "made", block("sentence_transformers")),
        {"made": embedder(folders, "bert")},
    )
