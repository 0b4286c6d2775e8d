"""Pieces of a prompt, tokenised apart, are the tokens of the prompt."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from kvpacket_rag.backbone import Backbone
from kvpacket_rag.chat import Message
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.reading import Reuse

CHUNK = "The ferry leaves Bergen at 07:15."
TEXT = f"Read this:\n{CHUNK}\n\nWhen does it leave?"


def spaced(kind: str) -> Any:
    """A tokenizer of single characters that puts a space before every text, as those of SentencePiece do."""
    letters = sorted({*TEXT, "▁", "a"})
    characters = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(letters)}, merges=[]))
    if kind == "metaspace":
        characters.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        characters.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    characters.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=characters, eos_token="</s>")


@pytest.mark.parametrize("kind", ["metaspace", "prepend"])
def test_no_space_comes_between_pieces(kind: str, make_model: Callable[..., Any]) -> None:
    tokenizer = spaced(kind)
    engine = KVPacketEngine(Backbone(make_model(vocab_size=len(tokenizer)), tokenizer, kind), min_match_tokens=4)
    engine.encode([CHUNK])
    parts, _ = engine._reader.read(TEXT, None, Reuse())
    assert [part.packet_id is not None for part in parts] == [False, True, False]
    pieces = [part.ids or engine.encoder.identify(part.text)[1] for part in parts]
    assert [token for ids in pieces for token in ids] == tokenizer(TEXT)["input_ids"]


def test_tokenizers_that_add_nothing_are_left_alone(backbone: Backbone) -> None:
    assert backbone.token_ids(CHUNK) == backbone.token_ids(CHUNK, starts=True)
    assert backbone.token_ids(CHUNK) == backbone.tokenizer(CHUNK, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    "template",
    ["{{ bos_token }}", "\n{{ bos_token }}", "  \n ", "Chat:\n"],
    ids=["first", "behind a line", "none", "text"],
)
def test_a_template_that_writes_the_beginning_of_sequence_behind_white_space_has_it_once(
    template: str, make_model: Callable[..., Any], tokenizer: Any
) -> None:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.bos_token = "<|endoftext|>"
    ends = [(tokenizer.bos_token, tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{tokenizer.bos_token} $A", special_tokens=ends
    )
    tokenizer.chat_template = template + "{% for m in messages %}{{ m.content }}{% endfor %}"
    engine = KVPacketEngine(Backbone(make_model(), tokenizer, "tiny"), min_match_tokens=4)
    engine.encode([CHUNK])
    for prompt in ([Message("user", f"{CHUNK} When?")], f" {tokenizer.bos_token}{CHUNK} When?", f"{CHUNK} When?"):
        parts, _ = engine._reader.read(prompt, None, Reuse())
        ids = [token for part in parts for token in part.ids or ()]
        assert ids.count(tokenizer.bos_token_id) == 1 and sum(part.packet_id is not None for part in parts) == 1
