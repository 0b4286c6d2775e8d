"""The two laws, serving against training, one pass against piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.assemble import Context
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.encode import PacketEncoder
from kvpacket_rag.errors import PacketError, PacketMismatchError
from kvpacket_rag.fingerprint import fingerprint_tokenizer, fingerprint_weights
from kvpacket_rag.packet import Packet

TEXTS = ["The door sensor of room nine", "was silent for ninety seconds.", "Refunds are paid in nine days."]


def packets_of(backbone: Backbone, adapter: Adapter, texts: list[str]) -> list[Packet]:
    encoder = PacketEncoder(backbone, adapter)
    by_id = {p.packet_id: p for p in encoder.encode([encoder.identify(t) for t in texts])}
    return [by_id[encoder.identify(t)[0]] for t in texts]


def serve(backbone: Backbone, row: list[Packet | list[int]]) -> tuple[Context, Tensor]:
    """Lay out packets and token lists in order; the logits of the last token."""
    context = backbone.pool.take(sum(p.span if isinstance(p, Packet) else len(p) for p in row) + 32)
    texts = []
    for piece in row:
        if isinstance(piece, Packet):
            context.place(piece)
        else:
            texts.append((context.reserve(len(piece)), piece))
    return context, backbone.prefill(backbone.bind(context), texts)


def training_forward(backbone: Backbone, adapter: Adapter, row: list[tuple[str, list[int]]]) -> Tensor:
    """One forward over the whole row: packets see only themselves, text sees all before it."""
    parts = [adapter.wrap(backbone.embed(ids)) if kind == "packet" else backbone.embed(ids) for kind, ids in row]
    block = torch.cat([torch.full((len(p),), number) for number, p in enumerate(parts)])
    is_text = torch.cat([torch.full((len(p),), kind == "text") for p, (kind, _) in zip(parts, row, strict=True)])
    order = torch.arange(len(block))
    mask = (order[:, None] >= order[None, :]) & ((block[:, None] == block[None, :]) | is_text[:, None])
    with backbone.reading(torch.cat(parts)[None], mask, order) as logits:
        return logits[0, -1]


def test_one_bare_packet_and_a_question_are_plain_prefill(backbone: Backbone):
    empty = Adapter.empty(backbone.hidden_size)
    (packet,) = packets_of(backbone, empty, TEXTS[:1])
    question = backbone.token_ids(TEXTS[1])
    _, served = serve(backbone, [packet, question])
    plain = backbone.model(torch.tensor([backbone.token_ids(TEXTS[0]) + question])).logits[:, -1]
    torch.testing.assert_close(served, plain, atol=2e-5, rtol=1e-4)  # float32


@pytest.mark.parametrize("soft", [False, True])
def test_served_logits_are_those_of_the_training_forward(backbone: Backbone, adapter: Adapter, soft: bool):
    used = adapter if soft else Adapter.empty(backbone.hidden_size)
    pre, a, between, b, question = (backbone.token_ids(t) for t in ["<|", TEXTS[0], " and\n", TEXTS[1], TEXTS[2]])
    first, second = packets_of(backbone, used, TEXTS[:2])
    _, served = serve(backbone, [pre, first, between, second, question])
    row = [("text", pre), ("packet", a), ("text", between), ("packet", b), ("text", question)]
    torch.testing.assert_close(served[0], training_forward(backbone, used, row), atol=2e-5, rtol=1e-4)  # float32


@pytest.mark.parametrize("soft", [False, True])
def test_a_sink_is_seen_by_its_chunk_and_by_nothing_else(backbone: Backbone, adapter: Adapter, soft: bool):
    used = adapter if soft else Adapter.empty(backbone.hidden_size)
    encoder = PacketEncoder(backbone, used, sink=2)
    name, ids = encoder.identify(TEXTS[0])
    (packet,) = encoder.encode([(name, ids)])
    question = backbone.token_ids(TEXTS[1])
    _, served = serve(backbone, [packet, question])
    assert packet.span == packet.tensors[0].shape[2] == len(ids) + used.num_tokens
    parts = [backbone.embed(encoder.sink_ids), used.wrap(backbone.embed(ids)), backbone.embed(question)]
    order = torch.arange(sum(map(len, parts)))
    mask = order[:, None] >= order[None, :]
    mask[-len(question) :, :2] = False
    with backbone.reading(torch.cat(parts)[None], mask, order) as logits:
        expected = logits[0, -1].detach()
    torch.testing.assert_close(served[0], expected, atol=5e-5, rtol=1e-4)  # float32
    assert encoder.signature != PacketEncoder(backbone, used).signature


def test_training_steps_move_the_adapter_alone_and_lower_the_loss(backbone: Backbone):
    adapter = Adapter.random(backbone.embed(range(500)), 3, 2, seed=4)
    before, weights = adapter.digest, fingerprint_weights(backbone.model)
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=0.05, weight_decay=0)
    row = [("packet", backbone.token_ids(TEXTS[0])), ("text", backbone.token_ids(TEXTS[1]))]
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = -training_forward(backbone, adapter, row).log_softmax(-1)[7]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and adapter.digest != before
    assert fingerprint_weights(backbone.model) == weights


def test_gradients_of_the_training_forward_reach_the_adapter_only(backbone: Backbone, adapter: Adapter):
    row = [("packet", backbone.token_ids(TEXTS[0])), ("text", backbone.token_ids(TEXTS[1]))]
    training_forward(backbone, adapter, row).sum().backward()
    assert float(adapter.header.grad.abs().sum()) > 0 and float(adapter.trailer.grad.abs().sum()) > 0
    assert all(p.grad is None for p in backbone.model.parameters())
    adapter.zero_grad()


def test_text_between_packets_in_one_pass_equals_piece_by_piece(backbone: Backbone, adapter: Adapter):
    first, second = packets_of(backbone, adapter, TEXTS[:2])
    row = [backbone.token_ids("Read: "), first, backbone.token_ids("Then: "), second, backbone.token_ids(TEXTS[2])]
    context, at_once = serve(backbone, row)
    slow = backbone.pool.take(context.num_slots)
    bound = backbone.bind(slow)
    for piece in row:
        if isinstance(piece, Packet):
            slow.place(piece)
        else:
            logits = backbone.prefill(bound, [(slow.reserve(len(piece)), piece)])
    torch.testing.assert_close(at_once, logits, atol=2e-5, rtol=1e-4)
    for fast_buffer, slow_buffer in zip(context.buffers, slow.buffers, strict=True):
        filled = slice(0, context.num_slots)
        torch.testing.assert_close(fast_buffer[..., filled, :], slow_buffer[..., filled, :], atol=2e-5, rtol=1e-4)


def test_assembling_twice_gives_the_same_bits_and_leaves_the_packets_alone(backbone: Backbone, adapter: Adapter):
    packets = packets_of(backbone, adapter, TEXTS)
    before = [t.clone() for p in packets for t in p.tensors]
    contexts = []
    for _ in range(2):
        context = backbone.pool.take(200)
        for packet in packets:
            context.place(packet)
        contexts.append([b[..., : context.num_slots, :].clone() for b in context.buffers])
    assert all(torch.equal(a, b) for a, b in zip(*contexts, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, (t for p in packets for t in p.tensors), strict=True))


@pytest.mark.parametrize("whole", [False, True])
def test_the_last_layer_is_left_once_its_keys_are_there_unless_somebody_watches(
    whole: bool, backbone: Backbone, monkeypatch: pytest.MonkeyPatch
):
    ran: list[str] = []
    layers = [(f"layer {n}", layer.mlp) for n, layer in enumerate(backbone.model.model.layers)]
    for name, module in [*layers, ("logits", backbone.model.lm_head)]:
        forward = module.forward
        monkeypatch.setattr(module, "forward", lambda *a, f=forward, n=name: (ran.append(n), f(*a))[1])
    found = backbone.encode([torch.tensor(backbone.token_ids(TEXTS[0]))], whole=whole)
    assert ran == ["layer 0", "layer 1"] + ["layer 2", "logits"] * whole
    monkeypatch.undo()
    assert all(map(torch.equal, found[0], backbone.encode([torch.tensor(backbone.token_ids(TEXTS[0]))])[0]))


def test_a_forward_after_one_that_ended_early_runs_to_its_end(backbone: Backbone):
    context = backbone.pool.take(40)
    bound, ids = backbone.bind(context), torch.tensor([backbone.token_ids(TEXTS[0])])
    count = torch.arange(ids.shape[1])[None]
    bound.fill(ids, slice(0, ids.shape[1]), count, ids.shape[1])
    logits = bound.run(ids, slice(0, ids.shape[1]), count, ids.shape[1])
    torch.testing.assert_close(logits, backbone.model(ids).logits[:, -1], atol=1e-5, rtol=1e-4)


def test_a_batch_of_unequal_rows_equals_each_row_alone(backbone: Backbone):
    rows = [torch.tensor(backbone.token_ids(t)) for t in (*TEXTS, "Yes", TEXTS[0] * 3)]
    for row, batched in zip(rows, backbone.encode(rows), strict=True):
        for found, expected in zip(batched, backbone.encode([row])[0], strict=True):
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)  # float32


def test_stored_tensors_do_not_share_memory_with_a_buffer_that_is_used_again(backbone: Backbone):
    row = torch.arange(3, 259)  # fills a buffer to its last slot
    (tensors,) = backbone.encode([row])
    before = [t.clone() for t in tensors]
    backbone.encode([row.flip(0)])
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))


def test_stored_tensors_hold_no_graph_and_the_callers_modes_are_untouched(backbone: Backbone):
    (tensors,) = backbone.encode([torch.arange(3, 9)])
    assert not any(t.requires_grad or t.grad_fn or t.is_inference() for t in tensors)
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def test_a_packet_of_other_shapes_is_refused_by_the_context(backbone: Backbone, make_model: Callable[..., Any]):
    (packet,) = packets_of(backbone, Adapter.empty(backbone.hidden_size), TEXTS[:1])
    other = Backbone(make_model(num_hidden_layers=2), backbone.tokenizer)
    with pytest.raises(PacketError, match="layers, heads, width"):
        other.pool.take(64).place(packet)


def test_the_weights_fingerprint_follows_content_not_name(make_model: Callable[..., Any]):
    model = make_model()
    before = fingerprint_weights(model)
    assert before == fingerprint_weights(make_model()) and before != fingerprint_weights(make_model(seed=1))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] += 1e-6
    assert fingerprint_weights(model) != before


def test_the_tokenizer_fingerprint_ignores_call_state_and_sees_an_added_token(tokenizer: Any):
    import copy

    before, changed = fingerprint_tokenizer(tokenizer), copy.deepcopy(tokenizer)
    changed(["a", "bb"], padding=True, truncation=True, max_length=5)
    assert fingerprint_tokenizer(changed) == before
    changed.add_tokens(["refund"])
    assert fingerprint_tokenizer(changed) != before


def test_weights_cast_or_edited_after_loading_are_noticed(make_model: Callable[..., Any], tokenizer: Any):
    cast = Backbone(make_model(), tokenizer)
    cast.model.to(torch.bfloat16)
    with pytest.raises(PacketMismatchError, match="bfloat16"):
        cast.check_unchanged()
    edited = Backbone(make_model(), tokenizer)
    with torch.no_grad():
        next(edited.model.parameters()).add_(1e-3)
    with pytest.raises(PacketMismatchError, match="edited"):
        edited.check_unchanged()


@pytest.mark.parametrize(
    "settings", [{"num_hidden_layers": 1}, {"num_hidden_layers": 30}, {"num_key_value_heads": 1}, {"head_dim": 80}]
)
def test_depth_heads_and_width_are_measured_not_assumed(
    make_model: Callable[..., Any], tokenizer: Any, settings: dict[str, int]
):
    odd = Backbone(make_model(**settings), tokenizer)
    keys = odd.plan.groups[0]
    assert len(keys.layers) == settings.get("num_hidden_layers", 3)
    assert keys.heads == settings.get("num_key_value_heads", 2) and keys.width == settings.get("head_dim", 16)


@pytest.mark.parametrize(
    "settings",
    [
        {"hidden_act": "gelu"},
        {"rms_norm_eps": 1e-2},
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.7, "rope_theta": 10000.0}},
    ],
)
def test_equal_weights_under_another_config_have_another_fingerprint(
    make_model: Callable[..., Any], settings: dict[str, Any]
):
    assert fingerprint_weights(make_model(**settings)) != fingerprint_weights(make_model())


def test_names_and_token_choices_do_not_change_the_fingerprint(make_model: Callable[..., Any]):
    renamed = make_model(eos_token_id=5)
    renamed.config._name_or_path = "elsewhere"
    assert fingerprint_weights(renamed) == fingerprint_weights(make_model())
