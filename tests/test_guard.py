"""A model that became another function meets no packet of the old one, while it runs and after a restart."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CHUNKS
from reference import Piece, own_logits
from torch import Tensor, nn

from kvpacket_rag.backbone import Backbone
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.errors import KVPacketError, PacketMismatchError, UnsupportedModelError
from kvpacket_rag.guard import ModelGuard
from kvpacket_rag.store import DiskStore

PROMPT = f"Read this first. {CHUNKS[0]}\n\nWhat is kept cold?"
Make = Callable[..., Any]


class LowRankUpdates(nn.Module):
    """A layer with two low-rank updates beside it, of which one is active, switched by the attributes of PEFT's."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        wide, high = base_layer.in_features, base_layer.out_features
        self.updates = nn.ParameterDict({name: torch.randn(high, wide) / 8 for name in ("first", "second")})
        self._active_adapter = ["first"]
        self._disable_adapters = False
        self.merged_adapters: list[str] = []
        self.scaling = {"first": 1.0, "second": 1.0}

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.base_layer(inputs)
        if not self._disable_adapters:
            for name in self._active_adapter:
                found = found + self.scaling[name] * inputs @ self.updates[name].T
        return found


def with_updates(make: Make) -> Any:
    model = make()
    torch.manual_seed(5)
    for layer in model.model.layers:
        layer.self_attn.k_proj = LowRankUpdates(layer.self_attn.k_proj)
        layer.self_attn.v_proj = LowRankUpdates(layer.self_attn.v_proj)
    return model


def set_all(model: Any, **attributes: Any) -> None:
    for module in model.modules():
        if isinstance(module, LowRankUpdates):
            vars(module).update(attributes)


SWITCHES: dict[str, dict[str, Any]] = {
    "another adapter": {"_active_adapter": ["second"]},
    "both": {"_active_adapter": ["first", "second"]},
    "none": {"_disable_adapters": True},
    "another scale": {"scaling": {"first": 0.5, "second": 1.0}},
}
BACK = {"_active_adapter": ["first"], "_disable_adapters": False, "scaling": {"first": 1.0, "second": 1.0}}


def engine_of(model: Any, tokenizer: Any, folder: Path) -> KVPacketEngine:
    return KVPacketEngine(Backbone(model, tokenizer, "tiny"), DiskStore(folder), min_match_tokens=4)


def assert_refused(engine: KVPacketEngine, match: str, error: type[KVPacketError] = PacketMismatchError) -> None:
    """By every way to an answer or a packet."""
    for ask in (
        lambda: engine.generate(PROMPT),
        lambda: engine.generate(PROMPT, policy="prefill"),
        lambda: engine.generate_batch([PROMPT, CHUNKS[1]]),
        lambda: engine.encode(CHUNKS[2:3]),
    ):
        with pytest.raises(error, match=match):
            ask()


@pytest.mark.parametrize("switch", SWITCHES)
def test_switched_adapters_are_refused_until_they_are_switched_back(
    make_model: Make, tokenizer: Any, tmp_path: Path, switch: str
) -> None:
    model = with_updates(make_model)
    engine = engine_of(model, tokenizer, tmp_path)
    engine.encode(CHUNKS[:1])
    before, begun = engine.generate(PROMPT), engine.stream(PROMPT)
    assert before.usage.chunks_reused == 1
    set_all(model, **SWITCHES[switch])
    assert_refused(engine, "adapters of tiny")
    with pytest.raises(PacketMismatchError, match="adapters of tiny"):
        next(begun)
    set_all(model, **BACK)
    assert engine.generate(PROMPT).token_ids == before.token_ids and len(engine.store) == 1


@pytest.mark.parametrize("switch", SWITCHES)
def test_packets_under_other_switches_are_of_another_identity(
    make_model: Make, tokenizer: Any, tmp_path: Path, switch: str
) -> None:
    first = engine_of(with_updates(make_model), tokenizer, tmp_path)
    first.encode(CHUNKS[:1])
    again = engine_of(with_updates(make_model), tokenizer, tmp_path)
    assert again.signature == first.signature and again.generate(PROMPT).usage.chunks_reused == 1
    model = with_updates(make_model)
    set_all(model, **SWITCHES[switch])
    other = engine_of(model, tokenizer, tmp_path)
    assert other.signature != first.signature and other.generate(PROMPT).usage.chunks_reused == 0
    assert other.backbone.values_fingerprint != first.backbone.values_fingerprint


def test_engines_of_two_adapters_in_one_model_take_turns(make_model: Make, tokenizer: Any, tmp_path: Path) -> None:
    model = with_updates(make_model)
    engines = {}
    for name in ("first", "second"):
        set_all(model, _active_adapter=[name])
        engines[name] = engine_of(model, tokenizer, tmp_path)
        engines[name].encode(CHUNKS[:1])
    for name in ("first", "second", "first"):
        set_all(model, _active_adapter=[name])
        task = engines[name]._tasks.read(PROMPT, None, None, 0, None)
        pieces: list[Piece] = [
            ("packet" if p.packet_id else "text", p.ids or tokenizer.encode(p.text)) for p in task.parts
        ]
        filled = engines[name]._prefiller.run(task.parts, 4)
        assert len(filled.reused) == 1
        with torch.no_grad():
            torch.testing.assert_close(filled.logits[0], own_logits(model, pieces), atol=1e-4, rtol=1e-4)  # float32
        engines[name].backbone.pool.give_back(filled.context)


@pytest.mark.parametrize("whole", [True, False])
def test_training_mode_is_refused_until_it_is_left(
    make_model: Make, tokenizer: Any, tmp_path: Path, whole: bool
) -> None:
    model = make_model(attention_dropout=0.5)
    engine = engine_of(model, tokenizer, tmp_path)
    trained = model if whole else model.model.layers[1].self_attn
    trained.train()
    assert_refused(engine, r"training mode.*model\.eval\(\)")
    assert trained.training  # a training loop of the user's goes on as it was
    model.eval()
    engine.encode(CHUNKS[:1])
    assert engine.generate(PROMPT).usage.chunks_reused == 1


def merge(weight: Tensor) -> None:
    torch.manual_seed(6)
    weight.data += torch.randn(weight.shape[0], 2) @ torch.randn(2, weight.shape[1]) / 16


def replace(weight: Tensor) -> None:
    weight.data = weight.data * 1.01


def transpose(weight: Tensor) -> None:
    weight.data = weight.data.T.contiguous().T


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("edit", [merge, replace])
def test_an_edit_that_torch_does_not_count_is_found_before_an_answer(
    make_model: Make, tokenizer: Any, tmp_path: Path, edit: Callable[[Tensor], None], dtype: torch.dtype
) -> None:
    model = make_model(dtype=dtype)
    weight = model.model.layers[0].self_attn.k_proj.weight
    transpose(weight)
    engine = engine_of(model, tokenizer, tmp_path)
    engine.encode(CHUNKS[:1])
    assert engine.generate(PROMPT).usage.chunks_reused == 1
    counted = weight._version
    edit(weight)
    assert weight._version == counted
    assert_refused(engine, "edited")


def test_a_weight_that_is_no_number_is_no_edit(make_model: Make) -> None:
    model = make_model()
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.data[0, 0] = float("nan")
    guard = ModelGuard(model, "tiny")
    guard.check()
    weight.data[0, 0] = 0.0
    with pytest.raises(PacketMismatchError, match="edited"):
        guard.check()


def test_hooks_of_others_are_refused_at_any_time_and_those_of_transformers_never(
    make_model: Make, tokenizer: Any, tmp_path: Path
) -> None:
    model = make_model()
    engine = engine_of(model, tokenizer, tmp_path)
    layer = model.model.layers[1]
    for register in (layer.register_forward_hook, layer.register_forward_pre_hook):
        hook = register(lambda *_: None)
        assert_refused(engine, "hook on a LlamaDecoderLayer", UnsupportedModelError)
        with pytest.raises(UnsupportedModelError, match="remove it"):
            Backbone(model, tokenizer)
        hook.remove()
    model(torch.tensor([[1, 2, 3]]), output_hidden_states=True, output_attentions=True)
    model.enable_input_require_grads()
    assert any(module._forward_hooks for module in model.modules())
    engine.encode(CHUNKS[:1])
    assert engine.generate(PROMPT).usage.chunks_reused == 1
    model.disable_input_require_grads()


def _two_loras(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    settings = peft.LoraConfig(r=4, target_modules=["k_proj", "v_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(model, settings, adapter_name="first")
    wrapped.add_adapter("second", settings)
    for name, parameter in wrapped.named_parameters():
        if "lora" in name:
            parameter.data.mul_(3)
    return wrapped.eval()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, at what PEFT asks it
def test_peft_switches_are_part_of_the_identity(make_model: Make, tokenizer: Any, tmp_path: Path) -> None:
    model = _two_loras(make_model())
    engine = engine_of(model, tokenizer, tmp_path)
    engine.encode(CHUNKS[:1])
    before = engine.generate(PROMPT)
    assert before.usage.chunks_reused == 1
    again = engine_of(_two_loras(make_model()), tokenizer, tmp_path)
    assert again.signature == engine.signature
    model.set_adapter("second")
    assert_refused(engine, "adapters of tiny")
    second = engine_of(model, tokenizer, tmp_path)
    assert second.signature != engine.signature and second.generate(PROMPT).usage.chunks_reused == 0
    model.set_adapter("first")
    with model.disable_adapter():
        assert_refused(engine, "adapters of tiny")
    assert engine.generate(PROMPT).token_ids == before.token_ids
    with torch.no_grad():
        model.merge_adapter()
    assert_refused(engine, "adapters of tiny")
    model.unmerge_adapter()
    with torch.no_grad():
        merged = model.merge_and_unload()
    bare = engine_of(merged, tokenizer, tmp_path)
    assert bare.signature != engine.signature and bare.generate(PROMPT).usage.chunks_reused == 0
    bare.encode(CHUNKS[:1])
    assert bare.generate(PROMPT).usage.chunks_reused == 1


def test_adapters_within_a_model_of_transformers_are_part_of_the_identity(
    make_model: Make, tokenizer: Any, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    model = make_model()
    bare = engine_of(model, tokenizer, tmp_path)
    torch.manual_seed(5)
    settings = peft.LoraConfig(r=4, target_modules=["v_proj"], init_lora_weights=False)
    peft.inject_adapter_in_model(settings, model, "first")  # as model.add_adapter does
    model.eval()
    assert_refused(bare, "adapters of tiny")
    engine = engine_of(model, tokenizer, tmp_path)
    engine.encode(CHUNKS[:1])
    assert engine.signature != bare.signature and engine.generate(PROMPT).usage.chunks_reused == 1
    for module in model.modules():  # as model.disable_adapters() does
        if isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer):
            module.enable_adapters(False)
    assert_refused(engine, "adapters of tiny")
    disabled = engine_of(model, tokenizer, tmp_path)
    assert disabled.signature != engine.signature and disabled.generate(PROMPT).usage.chunks_reused == 0


def test_soft_prompts_of_peft_are_refused(make_model: Make, tokenizer: Any) -> None:
    peft = pytest.importorskip("peft")
    for settings in (
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    ):
        with warnings.catch_warnings(), pytest.raises(KVPacketError):
            warnings.simplefilter("ignore")
            Backbone(peft.get_peft_model(make_model(), settings), tokenizer)
