"""What training computes is what serving computes."""

from __future__ import annotations

import pytest
import torch
from conftest import CHUNKS
from torch.testing import assert_close
from training_samples import SMALL, VARIANTS, chat, row, touched

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.training.recipe import Recipe
from kvpacket_rag.training.row import make_row
from kvpacket_rag.training.student import student_logits

QUESTION = "Who signed the lease?"


@pytest.mark.parametrize("name", VARIANTS)
def test_training_logits_are_the_served_logits(name: str, backbone: Backbone) -> None:
    adapter = touched(Recipe(**(SMALL | VARIANTS[name])), backbone)
    engine = KVPacketEngine(backbone, adapter=adapter, min_match_tokens=4)
    engine.encode(CHUNKS[:3])
    served = engine.stream(chat(QUESTION, CHUNKS[:3]))
    answer = list(served.read_all().token_ids)
    lone = make_row(engine.encoder, [chat(QUESTION, CHUNKS[:3])], CHUNKS[:3])
    with torch.no_grad(), student_logits(backbone, adapter, [lone], [[answer]]) as (logits, _):
        assert logits.argmax(-1).tolist() == answer


@pytest.mark.parametrize("name", VARIANTS)
def test_training_logits_are_those_of_the_assembled_context(name: str, backbone: Backbone) -> None:
    adapter = touched(Recipe(**(SMALL | VARIANTS[name])), backbone)
    engine = KVPacketEngine(backbone, adapter=adapter, min_match_tokens=4)
    engine.encode(CHUNKS[:3])
    parts, _ = engine._reader.read(chat(QUESTION, CHUNKS[:3]), None)
    served = engine._prefiller.run(parts, 1).logits[0]
    lone = make_row(engine.encoder, [chat(QUESTION, CHUNKS[:3])], CHUNKS[:3])
    with torch.no_grad(), student_logits(backbone, adapter, [lone], [[[5]]]) as (logits, _):
        assert_close(logits[0], served, atol=1e-3, rtol=1e-4)  # float32, logits of the order of 100


def test_rows_and_questions_in_one_forward_do_not_see_each_other(backbone: Backbone) -> None:
    adapter = touched(Recipe(**SMALL), backbone)
    rows = [row(backbone, 0), row(backbone, 1)]
    answers = [[[5, 6, 7], [8, 9]], [[10], [11, 12]]]
    with torch.no_grad(), student_logits(backbone, adapter, rows, answers) as (together, _):
        pass
    apart = []
    for single, texts in zip(rows, answers, strict=True):
        for number, suffix in enumerate(single.suffixes):
            lone = type(single)(single.context, (suffix,))
            with torch.no_grad(), student_logits(backbone, adapter, [lone], [[texts[number]]]) as (logits, _):
                apart.append(logits)
    assert_close(together, torch.cat(apart), atol=1e-3, rtol=1e-4)


def test_without_packets_the_student_reads_like_the_model_itself(backbone: Backbone) -> None:
    lone = row(backbone, 0, ("What is E41?",))
    text = type(lone)(tuple(type(p)(p.text, p.num_tokens, ids=p.ids) for p in lone.context), lone.suffixes)
    answer = [5, 6, 7]
    with torch.no_grad(), student_logits(backbone, Adapter.empty(64), [text], [[answer]]) as (logits, places):
        expected = backbone.model(torch.tensor([[*text.context_ids, *text.suffixes[0], *answer]])).logits[0]
    assert_close(logits, expected[places], atol=1e-3, rtol=1e-4)


def test_the_adapter_is_off_the_model_after_an_error(backbone: Backbone) -> None:
    adapter = touched(Recipe(**(SMALL | VARIANTS["all"])), backbone)
    before = _hooks(backbone)
    with pytest.raises(ZeroDivisionError), student_logits(backbone, adapter, [row(backbone)], [[[5], [6]]]):
        raise ZeroDivisionError
    assert _hooks(backbone) == before


def _hooks(backbone: Backbone) -> int:
    """How many there are; transformers leaves some of its own."""
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in backbone.model.modules())
