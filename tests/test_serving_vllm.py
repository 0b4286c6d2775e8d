"""Prompts for vLLM and what they claim about their packets; nothing here needs vLLM."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from conftest import CHUNKS
from torch.testing import assert_close
from vllm_samples import messages

from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.errors import ContextTooLongError, PacketError, PacketMismatchError, PacketMissError, PromptError
from kvpacket_rag.packet import packet_id
from kvpacket_rag.reading import Reuse
from kvpacket_rag.serving.vllm_layout import Claim, Named, prove, read_claim
from kvpacket_rag.serving.vllm_prompt import VLLMPrompter

ID = "a" * 64


def test_a_prompt_is_preamble_chunks_in_their_soft_tokens_and_question(
    soft_engine: KVPacketEngine, soft_prompter: VLLMPrompter
):
    prompt = soft_prompter.prompt(messages(CHUNKS[:2]))
    ids = [soft_engine.token_ids(text) for text in CHUNKS[:2]]
    first, second = ([own[0]] * 3 + own + [own[-1]] * 2 for own in ids)
    head = soft_engine.backbone.token_ids("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n", plain=False)
    tail = "\n\nQuestion: Who signed it?<|im_end|>\n<|im_start|>assistant\n"
    assert list(prompt.token_ids) == head + first + second + soft_engine.backbone.token_ids(tail, plain=False)
    assert prompt.packet_tokens == len(head + first + second) and prompt.misses == ()


def test_every_packet_a_prompt_names_is_in_the_store_and_no_engine_looks_for_a_preamble(
    engine: KVPacketEngine, prompter: VLLMPrompter
):
    claim = prompter.prompt(messages(CHUNKS[:2])).claim
    assert claim and claim.preamble and claim.preamble.packet_id in engine.store
    assert [named.packet_id for named in claim.packets] == engine.encode(CHUNKS[:2])
    assert claim.preamble.packet_id not in {chunk.packet_id for chunk in engine.store.known(engine.signature)}


def test_a_packet_that_was_evicted_is_encoded_again(engine: KVPacketEngine, prompter: VLLMPrompter):
    (name,) = engine.encode(CHUNKS[:1])
    kept = engine.store.get(name, engine.signature)
    engine.store._packets.pop(name)  # type: ignore[attr-defined]  # as an eviction does
    prompter.prompt(messages(CHUNKS[:1]))
    assert_close(engine.store.get(name, engine.signature).tensors, kept.tensors, atol=0, rtol=0)


def test_chunks_behind_other_text_are_read_as_text_and_told_of(engine: KVPacketEngine, prompter: VLLMPrompter):
    prompt = prompter.prompt(messages(CHUNKS[:2], joint=" and also: "))
    assert prompt.claim and [n.packet_id for n in prompt.claim.packets] == engine.encode(CHUNKS[:1])
    assert [miss.packet_id for miss in prompt.misses] == engine.encode(CHUNKS[1:2])
    text = " and also: ", CHUNKS[1]
    assert engine.backbone.decode(list(prompt.token_ids[prompt.packet_tokens :])).startswith("".join(text))
    with pytest.raises(PacketMissError, match="behind text"):
        prompter.prompt(messages(CHUNKS[:2], joint=" and also: "), reuse=Reuse(on_miss="error"))


def test_a_chunk_at_the_very_end_is_read_as_text(engine: KVPacketEngine, prompter: VLLMPrompter):
    prompt = prompter.prompt(f"So: {CHUNKS[0]}\n{CHUNKS[1]}")
    assert prompt.claim and [n.packet_id for n in prompt.claim.packets] == engine.encode(CHUNKS[:1])
    (miss,) = prompt.misses
    assert miss.packet_id == engine.encode(CHUNKS[1:2])[0] and "ends with" in miss.reason


def test_a_prompt_without_chunks_names_no_packets_and_has_no_salt(engine: KVPacketEngine, prompter: VLLMPrompter):
    prompt = prompter.prompt("What is kept cold?")
    assert prompt.body() == {"prompt": engine.token_ids("What is kept cold?")}


def test_a_prompt_longer_than_the_window_is_refused(prompter: VLLMPrompter):
    with pytest.raises(ContextTooLongError, match="2048"):
        prompter.prompt(messages(CHUNKS, "why? " * 2000))


def test_a_claim_survives_json(prompter: VLLMPrompter):
    prompt = prompter.prompt(messages(CHUNKS[:3]))
    assert read_claim(json.loads(json.dumps(prompt.kv_transfer_params))) == prompt.claim


def test_equal_tokens_cut_otherwise_have_another_salt(engine: KVPacketEngine):
    ids = [engine.token_ids(text) for text in CHUNKS[:2]]
    first, second, both = (Named(packet_id(i, engine.signature), len(i)) for i in (*ids, ids[0] + ids[1]))
    cuts = [(both,), (first, second), (second, first), (first,)]
    salts = {Claim(engine.signature.digest, None, cut).salt for cut in cuts}
    salts |= {Claim("other", None, cuts[1]).salt, Claim(engine.signature.digest, first, (second,)).salt}
    assert len(salts) == 6


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"signature": "s", "packets": []},
        {"signature": "s", "preamble": None, "packets": []},
        {"signature": 1, "preamble": None, "packets": [[ID, 1]]},
        {"signature": "s", "preamble": None, "packets": ID},
        {"signature": "s", "preamble": None, "packets": [ID]},
        {"signature": "s", "preamble": None, "packets": [[ID, "1"]]},
        {"signature": "s", "preamble": None, "packets": [[ID, True]]},
        {"signature": "s", "preamble": None, "packets": [[ID, 0]]},
        {"signature": "s", "preamble": None, "packets": [[ID, -4]]},
        {"signature": "s", "preamble": None, "packets": [["../../etc/passwd", 4]]},
        {"signature": "s", "preamble": None, "packets": [[ID.upper(), 4]]},
        {"signature": "s", "preamble": None, "packets": [[["a"], 4]]},
        {"signature": "s", "preamble": [ID], "packets": [[ID, 4]]},
        {"signature": "s", "preamble": None, "packets": [[ID, 4]], "more": 1},
    ],
)
def test_malformed_params_are_refused(value: Any):
    with pytest.raises((PromptError, PacketError)):
        read_claim({"kvpacket": value})


def test_params_of_another_connector_are_no_claim_and_may_not_stand_beside_ours():
    assert read_claim(None) is None and read_claim({"do_remote_prefill": True}) is None
    with pytest.raises(PromptError, match="do_remote_prefill"):
        read_claim({"kvpacket": {}, "do_remote_prefill": True})


def test_a_prompt_that_does_not_hold_the_packets_tokens_is_refused(soft_prompter: VLLMPrompter):
    prompt = soft_prompter.prompt(messages(CHUNKS[:2]))
    assert prompt.claim and prompt.claim.preamble
    ids, head = list(prompt.token_ids), prompt.claim.preamble.num_tokens
    one_more = replace(prompt.claim.packets[0], num_tokens=prompt.claim.packets[0].num_tokens + 1)
    wrong = [
        (prompt.claim, [*ids[: head + 5], ids[head + 5] + 1, *ids[head + 6 :]]),
        (prompt.claim, [ids[0] + 1, *ids[1:]]),
        (prompt.claim, ids[: prompt.packet_tokens]),
        (prompt.claim, ids[:4]),
        (replace(prompt.claim, packets=prompt.claim.packets[::-1]), ids),
        (replace(prompt.claim, packets=(one_more, *prompt.claim.packets[1:])), ids),
        (replace(prompt.claim, preamble=None), ids),
    ]
    for claim, tokens in wrong:
        with pytest.raises(PromptError):
            prove(claim, soft_prompter.card, tokens, claim.salt)


def test_packets_of_another_adapter_and_foreign_salts_are_refused(prompter: VLLMPrompter, soft_prompter: VLLMPrompter):
    prompt = prompter.prompt(messages(CHUNKS[:2]))
    assert prompt.claim
    with pytest.raises(PacketMismatchError, match="adapter"):
        prove(prompt.claim, soft_prompter.card, prompt.token_ids, prompt.cache_salt)
    for salt in (None, "mine", prompter.prompt(messages(CHUNKS[:1])).cache_salt):
        with pytest.raises(PromptError, match="cache_salt"):
            prove(prompt.claim, prompter.card, prompt.token_ids, salt)
