from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from evaluation_samples import first_logits, make_case, own_logits, prefill
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import FalconConfig, Gemma3TextConfig, Qwen3Config
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.modeling_utils import AttentionInterface

from kvpacket_rag.attach import decoder_layers
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.errors import UnsupportedModelError
from kvpacket_rag.evaluation.methods import Bench, parse_method
from kvpacket_rag.evaluation.methods.a3 import attention_received
from kvpacket_rag.evaluation.methods.observe import observed
from kvpacket_rag.evaluation.methods.partial import PartialMethod, PartialStep

CLOSE = {"atol": 1e-4, "rtol": 1e-4}  # float32


@pytest.fixture(scope="module")
def bench(backbone: Backbone) -> Bench:
    return Bench(backbone)


@pytest.fixture
def chosen_by(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Tensor]]:
    """Runs a method and tells which tokens it said were left."""

    def run(name: str, bench: Bench, case: Any) -> list[Tensor]:
        found: list[Tensor] = []
        original = PartialStep.with_text

        def with_text(step: PartialStep, documents: Tensor) -> Tensor:
            found.append(documents.sort().values)
            return original(step, documents)

        monkeypatch.setattr(PartialStep, "with_text", with_text)
        prefill(name, bench, case)
        return found

    return run


def document_numbers(case: Any) -> Tensor:
    flags = [bool(part.packet_id) for part in case.parts for _ in range(part.num_tokens)]
    return torch.tensor(flags).nonzero()[:, 0]


def hooks_left(model: nn.Module) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


def test_epic_reads_the_first_tokens_of_every_chunk(bench: Bench, chosen_by: Callable[..., list[Tensor]]):
    case = make_case(bench.backbone)
    starts, done = [], 0
    for part in case.parts:
        starts += [done] if part.packet_id else []
        done += part.num_tokens
    (chosen,) = chosen_by("epic-3", bench, case)
    assert chosen.tolist() == [start + offset for start in starts for offset in range(3)]


def test_random_tokens_are_as_many_as_the_ratio_says(bench: Bench, chosen_by: Callable[..., list[Tensor]]):
    case = make_case(bench.backbone)
    (chosen,) = chosen_by("random-0.25", bench, case)
    assert len(chosen) == case.num_document_tokens // 4
    assert set(chosen.tolist()) <= set(document_numbers(case).tolist())


def test_a3_takes_what_the_question_attends_to_in_the_models_own_first_layer(
    bench: Bench, chosen_by: Callable[..., list[Tensor]], make_model: Callable[..., Any]
):
    case = make_case(bench.backbone)
    model = make_model(attn_implementation="eager")
    attention = model(torch.tensor([case.ids]), output_attentions=True).attentions[0][0]  # heads, tokens, tokens
    documents = document_numbers(case)
    to_chunks = attention[:, int(documents[-1]) + 1 :][..., documents]
    expected = (to_chunks / to_chunks.sum(-1, keepdim=True)).sum((0, 1)).topk(len(documents) // 5).indices
    (chosen,) = chosen_by("a3-0.2", bench, case)
    assert chosen.tolist() == sorted(documents[expected].tolist())


def test_cacheblend_takes_what_changes_most_in_the_models_own_second_layer(
    bench: Bench, chosen_by: Callable[..., list[Tensor]]
):
    case, model = make_case(bench.backbone), bench.backbone.model
    changes, done = [], 0
    together = model(torch.tensor([case.ids])).past_key_values.layers[1]
    for part in case.parts:
        place = slice(done, done + part.num_tokens)
        if part.packet_id:
            positions = torch.arange(place.start, place.stop)[None]
            alone = model(torch.tensor([part.ids]), position_ids=positions).past_key_values.layers[1]
            pairs = ((together.keys, alone.keys), (together.values, alone.values))
            changes.append(sum((new[0, :, place] - old[0]).square().sum((0, 2)) for new, old in pairs))
        done = place.stop
    expected = torch.cat(changes).topk(case.num_document_tokens // 5).indices
    (chosen,) = chosen_by("cacheblend-0.2", bench, case)
    assert chosen.tolist() == sorted(document_numbers(case)[expected].tolist())


def test_query_heads_look_at_the_key_value_heads_that_transformers_gives_them():
    torch.manual_seed(0)
    queries, keys = torch.randn(6, 5, 8), torch.randn(2, 7, 8)
    repeated = repeat_kv(keys[None], 3)[0]
    expected = torch.zeros(7)
    for head in range(6):
        for query in queries[head]:
            expected += torch.softmax(repeated[head] @ query * 0.3, 0)
    assert_close(attention_received(queries, keys, 0.3), expected)


@pytest.mark.parametrize("name", ["cacheblend-0.3", "a3-0.3"])
def test_narrowed_layers_are_those_of_a_forward_that_masks_instead(bench: Bench, name: str, chosen_by: Any):
    """What is left out above a layer keeps its cached keys and values there, and is read below."""
    case, model = make_case(bench.backbone), bench.backbone.model
    (chosen,) = chosen_by(name, bench, case)
    read = 1 if name.startswith("a3") else 2  # layers that read everything
    expected = reference(model, case, chosen, read)
    assert_close(first_logits(name, bench, case), expected, **CLOSE)


@torch.no_grad()
def reference(model: Any, case: Any, chosen: Tensor, read: int) -> Tensor:
    """(vocabulary,): a forward over all tokens in which the projections give what they gave for each chunk alone."""
    documents = document_numbers(case)
    kept = documents[~torch.isin(documents, chosen)]
    modules = [getattr(layer.self_attn, n) for layer in model.model.layers[read:] for n in ("k_proj", "v_proj")]
    alone = [block_outputs(model, case, module) for module in modules]
    hooks = [
        module.register_forward_hook(lambda module, args, output, old=old: output.index_copy(1, kept, old[:, kept]))
        for module, old in zip(modules, alone, strict=True)
    ]
    try:
        return own_logits(model, case.ids)[-1]
    finally:
        for hook in hooks:
            hook.remove()


def block_outputs(model: Any, case: Any, module: nn.Module) -> Tensor:
    """What a projection gives for every part read alone, side by side; it knows no positions."""
    found: list[Tensor] = []
    hook = module.register_forward_hook(lambda module, args, output: found.append(output))
    for part in case.parts:
        model(torch.tensor([part.ids]), use_cache=False)
    hook.remove()
    return torch.cat(found, 1)


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (Qwen3Config, {"head_dim": 16}),
        (Gemma3TextConfig, {"head_dim": 16, "sliding_window": 24, "num_hidden_layers": 6}),
    ],
)
@pytest.mark.parametrize("name", ["random-1", "cacheblend-1", "a3-1"])
def test_other_architectures_are_narrowed_as_well(
    make_model: Callable[..., Any], tokenizer: Any, config: type, settings: dict[str, Any], name: str
):
    backbone = Backbone(make_model(config, **settings), tokenizer)
    case = make_case(backbone)
    assert_close(first_logits(name, Bench(backbone), case), own_logits(backbone.model, case.ids)[-1], **CLOSE)


@pytest.mark.parametrize("name", ["a3-0.5", "sam-kv"])
def test_attention_outside_of_the_interface_is_refused_by_name(
    make_model: Callable[..., Any], tokenizer: Any, name: str
):
    backbone = Backbone(make_model(FalconConfig, new_decoder_architecture=True, num_kv_heads=2), tokenizer)
    with pytest.raises(UnsupportedModelError, match=r"Falcon.*A3 and SAM-KV"):
        prefill(name, Bench(backbone), make_case(backbone))
    assert not hooks_left(backbone.model)
    assert first_logits("cacheblend-0.5", Bench(backbone), make_case(backbone)).isfinite().all()


@pytest.mark.parametrize("name", ["cacheblend-0.3", "a3-0.3", "sam-kv"])
def test_hooks_are_gone_after_success_and_after_failure(bench: Bench, name: str, monkeypatch: pytest.MonkeyPatch):
    model, case = bench.backbone.model, make_case(bench.backbone)
    interface, before = AttentionInterface.get_interface, first_logits("full", bench, case)
    hooks = hooks_left(model)  # transformers leaves some of its own
    prefill(name, bench, case)
    with monkeypatch.context() as patch:
        patch.setattr(decoder_layers(model)[-1].mlp, "forward", lambda hidden: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            parse_method(name, bench).prefill(make_case(bench.backbone))
    assert hooks_left(model) == hooks
    assert AttentionInterface.get_interface is interface
    assert_close(first_logits("full", bench, case), before, atol=0, rtol=0)


def test_a_failed_prefill_gives_its_memory_back(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    given: list[Any] = []
    monkeypatch.setattr(bench.backbone.pool, "give_back", given.append)
    monkeypatch.setattr(PartialStep, "run", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prefill("epic-2", bench, make_case(bench.backbone))
    assert len(given) == 1 + 1  # the encoder's and the prefill's


def test_only_the_model_under_observation_is_watched(bench: Bench, make_model: Callable[..., Any]):
    other, seen = make_model(seed=1), []
    with observed(bench.backbone.model, [0, 2], lambda layer, *rest: seen.append(layer)):
        other(torch.tensor([[5, 6]]))
        bench.backbone.model(torch.tensor([[5, 6]]))
    assert seen == [0, 2]


def call_oddly(name: str, bench: Bench, patch: pytest.MonkeyPatch, change: Callable[[Tensor], tuple[Any, Any]]) -> None:
    """Prefill with decoder layers called with changed hidden states and one input more."""
    method, case = parse_method(name, bench), make_case(bench.backbone)
    method.prepare(case)
    layer_class = type(decoder_layers(bench.backbone.model)[0])
    original = layer_class.__call__

    def call(self: nn.Module, hidden: Tensor, **named: Any) -> Any:
        hidden, other = change(hidden)
        return original(self, hidden, **named, other=other)

    patch.setattr(layer_class, "__call__", call)
    method.prefill(case)


def test_layers_that_take_tokens_in_an_unknown_place_are_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    hooks = hooks_left(bench.backbone.model)
    with pytest.raises(UnsupportedModelError, match="unknown place; CacheBlend, A3 and SAM-KV"):
        call_oddly(
            "cacheblend-0.5", bench, monkeypatch, lambda hidden: (hidden, torch.zeros(hidden.shape[1], 3, 2, 2, 2))
        )
    assert hooks_left(bench.backbone.model) == hooks


def test_layers_without_hidden_states_of_the_common_shape_are_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UnsupportedModelError, match=r"layer 0 hidden states of \(1, [0-9]+, width\)"):
        call_oddly("a3-0.5", bench, monkeypatch, lambda hidden: (SimpleNamespace(hidden=hidden), None))


def test_layers_that_are_never_called_are_noticed(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    decoy = nn.ModuleList([nn.Identity() for _ in range(3)])
    monkeypatch.setattr("kvpacket_rag.evaluation.methods.narrow.decoder_layers", lambda model: decoy)
    with pytest.raises(UnsupportedModelError, match=r"never called layers \[2\]"):
        prefill("cacheblend-0.5", bench, make_case(bench.backbone))


def test_the_time_to_encode_is_not_part_of_the_time_to_first_token(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    clock = iter(range(100))
    monkeypatch.setattr("kvpacket_rag.evaluation.methods.partial.time.perf_counter", lambda: float(next(clock)))
    method, case = parse_method("epic-2", bench), make_case(bench.backbone)
    state = method.prefill(case)
    assert (state.load_seconds, state.assemble_seconds, state.prefill_seconds) == (1, 1, 1)
    assert issubclass(type(method), PartialMethod)
