"""What the probe of a model found, and from where on packets are called fit for it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

FIT_GAP = 0.5  # share of plain concatenation's divergence that packets have to remove
FIT_KL = 0.02  # nats a token that are close enough whatever plain concatenation does
RULE = (
    f"fit are packets with a recovered gap of {FIT_GAP:.2f} or more, or with a KL of at most {FIT_KL:.3f} nats a token "
    "that is no higher than plain concatenation's"
)


@dataclass(frozen=True, slots=True)
class Fidelity:
    """How close one way of reading is to full prefill, along full prefill's own greedy answers.

    Attributes:
        kl: KL(full prefill ‖ this), nats a token.
        agreement: share of tokens for which the most likely one is the same.
    """

    kl: float
    agreement: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found.

    Attributes:
        error_shift: largest relative error of keys moved against keys encoded in place.
        error_packets: relative error of the logits of packets against a block mask.
        tokens: of answers that were compared.
        packets: as they are served, with the adapter or without.
        plain: the chunks' bare keys and values side by side.
        full: full prefill in one forward against itself token by token: what arithmetic alone differs.
        has_adapter: whether ``packets`` had one to use.
    """

    error_shift: float
    error_packets: float
    tokens: int
    packets: Fidelity
    plain: Fidelity
    full: Fidelity
    has_adapter: bool

    @property
    def recovered_gap(self) -> float:
        """1 - KL(packets) / KL(plain concatenation)."""
        return 1 - self.packets.kl / self.plain.kl if self.plain.kl > 0 else 0.0

    @property
    def is_fit(self) -> bool:
        """Whether packets are near enough to full prefill; see :data:`RULE`."""
        return self.packets.kl <= min(FIT_KL, self.plain.kl) or self.recovered_gap >= FIT_GAP

    @property
    def sentence(self) -> str:
        """The verdict in one line."""
        found = f"{self.packets.kl:.3f} nats a token from full prefill"
        if self.is_fit:
            return f"fit: answers from packets are {found}, a recovered gap of {self.recovered_gap:.2f}"
        if not self.has_adapter:
            return f"not fit without an adapter: answers from packets are {found}; train one with 'kvpacket train'"
        return (
            f"not fit: with this adapter answers are {found}, plain concatenation {self.plain.kl:.3f}; "
            "it belongs to other weights or needs more training"
        )

    def to_dict(self) -> dict[str, Any]:
        """All figures by name, for JSON."""
        rule = {"recovered_gap": FIT_GAP, "kl": FIT_KL, "rule": RULE}
        derived = {"recovered_gap": self.recovered_gap, "fit": self.is_fit, "verdict": self.sentence}
        return asdict(self) | derived | {"thresholds": rule}
