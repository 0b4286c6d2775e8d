"""What a training run does, as numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvpacket_rag.adapter import Adapter, LowRank
from kvpacket_rag.attach import decoder_layers
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.errors import TrainingError
from kvpacket_rag.training.objective import Objective

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Recipe:
    """How an adapter is built and trained. The defaults fit any model, for rates follow the model's own scale.

    They make what measured best: a header that is left out of packets, and a low-rank update of the encoder. The
    paper's soft tokens alone are ``trailer=8, keep_header=True, rank=0``.

    Attributes:
        header: soft tokens before a chunk.
        trailer: soft tokens behind it.
        deep: train vectors for the soft tokens in front of every layer, too.
        rank: of the low-rank update of the encoder; 0 for none.
        start: "normal" draws the soft tokens with mean and deviation of the embeddings, "tokens" takes the
            embeddings of the first tokens of the model's chat template.
        keep_header: False reads the header before a chunk and leaves it out of the packet.
        separators: "absorbed" leaves out white space between packets, "read" reads it as text.
        objective: "kl", "ce" (teacher's greedy tokens) or "kl+ce".
        ce_weight: of the cross-entropy in "kl+ce".
        hidden_weight: of the squared error between the hidden states of teacher and student in the middle layer.
        lr: of the soft tokens, in multiples of the standard deviation of the model's input embeddings.
        deep_lr: of the deep vectors, in the same unit.
        low_rank_lr: of the low-rank update, as it is.
        steps: of the optimiser.
        batch_rows: rows of a step, over all processes.
        warmup: share of the steps over which the rate rises; it falls linearly to zero afterwards.
        clip: largest gradient norm of each part.
        forward_tokens: rows are read together up to this many tokens.
        checkpointing: recompute activations in the backward pass, for less memory.
        validate_every: steps between validations.
        patience: validations without improvement after which training stops.
        seed: of all that is drawn.
    """

    header: int = 8
    trailer: int = 0
    deep: bool = False
    rank: int = 16
    start: str = "normal"
    keep_header: bool = False
    separators: str = "absorbed"
    objective: Objective = "kl"
    ce_weight: float = 0.2
    hidden_weight: float = 0.0
    lr: float = 0.075
    deep_lr: float = 0.15
    low_rank_lr: float = 1.5e-3
    steps: int = 300
    batch_rows: int = 8
    warmup: float = 0.05
    clip: float = 1.0
    forward_tokens: int = 1024
    checkpointing: bool = False
    validate_every: int = 20
    patience: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        wrong = [
            n for n in ("steps", "batch_rows", "forward_tokens", "validate_every", "patience") if getattr(self, n) < 1
        ]
        wrong += [n for n in ("header", "trailer", "rank", "hidden_weight", "ce_weight") if getattr(self, n) < 0]
        wrong += [n for n in ("lr", "deep_lr", "low_rank_lr", "clip") if not 0 < getattr(self, n) < math.inf]
        if self.start not in ("normal", "tokens"):
            wrong.append("start")
        if self.separators not in ("absorbed", "read"):
            wrong.append("separators")
        if self.objective not in ("kl", "ce", "kl+ce"):
            wrong.append("objective")
        if wrong:
            found = ", ".join(f"{name}={getattr(self, name)!r}" for name in wrong)
            raise TrainingError(f"the recipe has {found}; see the attributes of Recipe for what is allowed")
        if not (self.header + self.trailer or self.rank):
            raise TrainingError("the recipe trains nothing: it has no soft tokens and no low-rank update")
        if self.deep and not self.header + self.trailer:
            raise TrainingError("deep vectors belong to soft tokens; give the recipe a header or a trailer")

    def to_dict(self) -> dict[str, Any]:
        """Every number by name."""
        return asdict(self)

    def rate(self, step: int) -> float:
        """Share of the full learning rate in ``step``, counted from 0."""
        rise = max(1, round(self.warmup * self.steps))
        return min((step + 1) / rise, (self.steps - step) / max(1, self.steps - rise + 1))

    def build(self, backbone: Backbone) -> Adapter:
        """The untrained adapter, in float32 on the model's device."""
        embeddings = backbone.model.get_input_embeddings().weight
        soft = Adapter.random(embeddings, self.header, self.trailer, self.seed)
        layers = decoder_layers(backbone.model)
        deep = torch.zeros(len(layers) - 1, soft.num_tokens, soft.hidden_size) if self.deep else None
        update = LowRank.fresh(dict(_projections(backbone.model, layers)), self.rank, self.seed) if self.rank else None
        if self.start == "tokens":
            soft = self._from_template(soft, backbone)
        about = {"separators": self.separators, "header": "kept" if self.keep_header else "left out"}
        return Adapter(soft.header, soft.trailer, about, deep=deep, low_rank=update).to(backbone.device)

    def _from_template(self, soft: Adapter, backbone: Backbone) -> Adapter:
        """Soft tokens that start as what the model reads first in a chat, repeated as often as needed."""
        if not getattr(backbone.tokenizer, "chat_template", None):
            raise TrainingError(f"{backbone.name} has no chat template to start from; use start='normal'")
        messages = [{"role": "system", "content": "Read the following text."}, {"role": "user", "content": "\n"}]
        text = str(backbone.tokenizer.apply_chat_template(messages, tokenize=False))
        ids = backbone.token_ids(text, plain=False)
        repeated = (ids * (1 + soft.num_tokens // len(ids)))[: soft.num_tokens]
        values = backbone.embed(repeated)
        return Adapter(values[: self.header], values[self.header :])

    def parameter_groups(self, adapter: Adapter, backbone: Backbone) -> list[dict[str, Any]]:
        """What AdamW takes: each part with its full learning rate as ``full_lr``."""
        scale = float(backbone.model.get_input_embeddings().weight.float().std())
        soft: list[Tensor] = [p for p in (adapter.header, adapter.trailer) if p.numel()]
        parts = [(soft, self.lr * scale)]
        if adapter.deep is not None:
            parts.append(([adapter.deep], self.deep_lr * scale))
        if adapter.low_rank is not None:
            parts.append((list(adapter.low_rank.parameters()), self.low_rank_lr))
        return [{"params": tensors, "full_lr": rate} for tensors, rate in parts if tensors]


def _projections(model: nn.Module, layers: nn.ModuleList) -> Iterator[tuple[str, tuple[int, int]]]:
    """Name and (outputs, inputs) of the projections to update: attention and the way out of the feed-forward.

    In a model that names them otherwise, all linear modules of its layers.
    """
    inside = {id(module) for module in layers.modules()}
    linear = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and id(m) in inside}
    usual = {name: module for name, module in linear.items() if name.endswith(_PROJECTIONS)}
    for name, module in (usual or linear).items():
        yield name, (module.out_features, module.in_features)
