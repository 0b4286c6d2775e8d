"""What the deep parts of an adapter do to a forward, against the same sums written out."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from kvpacket_rag.adapter import Adapter, LowRank
from kvpacket_rag.attach import OUTSIDE, attached, decoder_layers
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.errors import AdapterError

QUERY = "model.layers.1.self_attn.q_proj"


def _low_rank(outputs: int = 64, name: str = QUERY) -> LowRank:
    generator = torch.Generator().manual_seed(0)
    return LowRank({name: (torch.randn(2, 64, generator=generator), torch.randn(outputs, 2, generator=generator))})


def _adapter(deep: torch.Tensor | None = None, low_rank: LowRank | None = None) -> Adapter:
    return Adapter(torch.zeros(2, 64), torch.zeros(1, 64), deep=deep, low_rank=low_rank)


@torch.no_grad()
def test_a_low_rank_update_adds_its_product_at_the_tokens_of_packets(backbone: Backbone) -> None:
    adapter, module = _adapter(low_rank=_low_rank()), backbone.model.get_submodule(QUERY)
    inputs = torch.randn(1, 4, 64)
    bare = module(inputs)
    with attached(adapter, backbone.model, torch.tensor([[0, 3, OUTSIDE, 2]])):
        found = module(inputs)
    added = inputs @ (adapter.low_rank.up[0] @ adapter.low_rank.down[0]).T
    added[:, 2] = 0
    assert_close(found, bare + added, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["autocast", "subclass"])
def test_an_output_that_is_not_its_own_memory_or_format_is_updated_beside_it(
    backbone: Backbone, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Keeping(torch.nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.kept = super().forward(inputs)
            return self.kept

    adapter, module = _adapter(low_rank=_low_rank()), backbone.model.get_submodule(QUERY)
    if kind == "subclass":
        monkeypatch.setattr(module, "__class__", Keeping)
    inputs = torch.randn(1, 4, 64)
    added = inputs @ (adapter.low_rank.up[0] @ adapter.low_rank.down[0]).T
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"), torch.no_grad():
        bare = module(inputs)
        with attached(adapter, backbone.model, torch.tensor([[0, 3, 1, 2]])):
            found = module(inputs)
    assert_close(found.float(), bare.float() + added, atol=0.2 if kind == "autocast" else 1e-4, rtol=0.02)
    if kind == "subclass":
        assert torch.equal(module.kept, bare)


@torch.no_grad()
def test_deep_vectors_are_added_in_front_of_their_layer_at_their_token(backbone: Backbone) -> None:
    deep = torch.randn(2, 3, 64)
    seen: list[torch.Tensor] = []
    inputs = torch.randint(3, 400, (1, 5))
    roles = torch.tensor([[0, 1, 3, 2, OUTSIDE]])
    expected = backbone.model(inputs, output_hidden_states=True).hidden_states[1].clone()
    with attached(_adapter(deep=deep), backbone.model, roles):
        hook = decoder_layers(backbone.model)[1].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        backbone.model(inputs)
        hook.remove()
    expected[0, [0, 1, 3]] += deep[0]
    assert_close(seen[0], expected)


@torch.no_grad()
def test_afterwards_the_model_is_as_before(backbone: Backbone) -> None:
    inputs = torch.randint(3, 400, (1, 5))
    before = backbone.model(inputs).logits
    with attached(_adapter(torch.ones(2, 3, 64), _low_rank()), backbone.model, torch.tensor([[0, 1, 3, 3, 2]])):
        assert not torch.equal(backbone.model(inputs).logits, before)
    assert torch.equal(backbone.model(inputs).logits, before)


def test_a_module_the_model_lacks_is_named(backbone: Backbone) -> None:
    roles = torch.tensor([[0, 1, 3, 2]])
    for low_rank in (_low_rank(name="model.layers.9.q_proj"), _low_rank(outputs=32)):
        with (
            pytest.raises(AdapterError, match=r"updates 'model\.layers"),
            attached(_adapter(low_rank=low_rank), backbone.model, roles),
        ):
            pass


def test_deep_vectors_of_another_depth_are_refused(backbone: Backbone) -> None:
    adapter = _adapter(deep=torch.zeros(7, 3, 64))
    with (
        pytest.raises(AdapterError, match="8 layers, the model has 3"),
        attached(adapter, backbone.model, torch.ones(1, 1)),
    ):
        pass
