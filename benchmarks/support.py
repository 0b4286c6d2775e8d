"""Tries every decoder that transformers has and writes the support table, SUPPORT.md.

    python benchmarks/support.py             # all of them, a few minutes on one core
    python benchmarks/support.py llama glm   # these only; prints, writes nothing

Each architecture is built tiny and random from its own config class, loaded as any model is, and
then held against what it answers by itself, as the tests do for a selection.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
import transformers
from architectures import NotADecoderError, model_types, tiny
from reference import error, own_layers, own_logits, random_ids, served_logits, slot_logits
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from kvpacket_rag.backbone import Backbone
from kvpacket_rag.errors import UnsupportedModelError
from kvpacket_rag.rope import RotaryPlan, TensorGroup, realign

NEAR, FAR, TOKENS, WINDOW = 7, 3000, 13, 4096
ALLOWED_NEAR, ALLOWED_FAR, ALLOWED_LOGITS = 1e-5, 3e-4, 2e-5  # float32; far away the model's own angles drift
LEAST_EXACT = 110
REASONS = {
    "a state without a token axis": "recurrent, convolutional or compressed state in the cache",
    "by their cache slot": "learned or absolute positions, counted by cache slot",
    "not by a rotation": "positions that are no rotation: learned, sinusoidal, or scaled behind the rotation",
    "depends on the absolute position": "attention depends on the absolute position",
    "has layers of class": "cache layers of a class of their own",
    "returns no cache with layers": "no cache by layer",
    "plain tokens from position": "does not run on plain token ids",
}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    tensors: str
    near: float
    far: float
    logits: float
    one_pass: bool
    soft_tokens: bool
    positions: int

    @property
    def exact(self) -> bool:
        return self.near < ALLOWED_NEAR and self.far < ALLOWED_FAR and self.logits < ALLOWED_LOGITS

    def __str__(self) -> str:
        cells = [self.name, self.tensors, f"{self.near:.0e}", f"{self.far:.0e}", f"{self.logits:.0e}"]
        cells += ["yes" if self.one_pass else "no", "yes" if self.soft_tokens else "no"]
        cells += ["all" if self.positions >= WINDOW else str(self.positions)]
        return f"| {' | '.join(cells)} |"


@torch.inference_mode()
def measure(name: str) -> Row:
    """Build, load and hold against the model itself.

    Raises:
        UnsupportedModelError: the probe refuses it.
    """
    letters = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    backbone = Backbone(tiny(name), PreTrainedTokenizerFast(tokenizer_object=letters, unk_token="a"), name)
    far = min(FAR, backbone.context_window - TOKENS)
    packets: list[Any] = [("packet", random_ids(21, 1)), ("packet", random_ids(19, 2))]
    question: Any = ("text", random_ids(6, 3))
    prompts = [
        [*packets, question],
        [("text", random_ids(5, 4)), packets[0], ("text", random_ids(4, 5)), packets[1], question],
    ]
    return Row(
        name=name,
        tensors=describe(backbone.plan),
        near=shift_error(backbone, NEAR),
        far=shift_error(backbone, far),
        logits=max(error(served_logits(backbone, p), own_answer(backbone.model, p)) for p in prompts),
        one_pass=backbone.report.one_pass,
        soft_tokens=backbone.report.takes_embeddings,
        positions=backbone.context_window,
    )


def shift_error(backbone: Backbone, shift: int) -> float:
    """Of the realigned tensors, against those of the model's own cache at the new positions."""
    here, there = (own_layers(backbone.model, random_ids(TOKENS), start) for start in (0, shift))
    return max(
        error(realign(getattr(here[layer], group.name), group.rotation, shift), getattr(there[layer], group.name))
        for group in backbone.plan.groups
        for layer in group.layers
    )


def own_answer(model: Any, pieces: list[Any]) -> torch.Tensor:
    """Of one forward under a block mask, or piece by piece where the architecture takes no such mask."""
    try:
        return own_logits(model, pieces)
    except ValueError:
        return slot_logits(model, pieces)


def describe(plan: RotaryPlan) -> str:
    """The tensors that carry positions: name, layout, rotary channels of all channels, layers if not all."""
    layers = {layer for group in plan.groups for layer in group.layers}
    return "; ".join(_describe_group(group, layers) for group in plan.groups if group.rotation) or "none"


def _describe_group(group: TensorGroup, layers: set[int]) -> str:
    rotation = group.rotation
    assert rotation is not None
    sign = " backwards" if rotation.frequencies[0] < 0 else ""
    where = "" if set(group.layers) == layers else f" (layers {', '.join(map(str, group.layers))})"
    return f"{group.name} {rotation.layout}{sign} {rotation.start}–{rotation.stop} of {group.width}{where}"


def try_all(names: list[str]) -> Iterator[tuple[str, Row | str]]:
    """Each decoder with its row, or with what speaks against it; prints as it goes."""
    for number, name in enumerate(names, 1):
        found: Row | str
        try:
            found = measure(name)
        except NotADecoderError:
            continue
        except UnsupportedModelError as refusal:
            found = str(refusal)
        except Exception as failure:  # transformers cannot build it from its default config, made small
            found = f"not built: {type(failure).__name__}: {' '.join(str(failure).split())[:100]}"
        print(f"{number:4}/{len(names)} {name}: {found}", flush=True)
        yield name, found


def render(results: dict[str, Row | str]) -> str:
    """The whole of SUPPORT.md."""
    exact = [row for row in results.values() if isinstance(row, Row) and row.exact]
    inexact = [row for row in results.values() if isinstance(row, Row) and not row.exact]
    lines = [
        "# Supported architectures",
        "",
        f"{len(exact)} decoders answer from packets exactly (torch {torch.__version__.split('+')[0]}, "
        f"transformers {transformers.__version__}). `python benchmarks/support.py` writes this file.",
        "",
        "Every architecture was built tiny and random from its own config class and compared, in float32, with what "
        "the model computes by itself. Errors are relative to the largest value. *Near* and *far*: cached tensors "
        f"realigned by {NEAR} and by {FAR} positions against the model's own cache there (far away the model's own "
        "float32 angles drift). *Logits*: two packets and a question, and text between packets in one pass, against "
        "one forward under a block mask. *One pass*: text between packets needs one forward whatever the mix. "
        "*Soft tokens*: a trained adapter can be used; otherwise plain packets only. *Positions*: the part of the "
        f"window of {WINDOW} in which the laws hold.",
        "",
        "| architecture | tensors that carry positions | near | far | logits | one pass | soft tokens | positions |",
        "|---|---|---|---|---|---|---|---|",
        *map(str, exact),
        "",
    ]
    if inexact:
        lines += ["## Accepted but not exact", "", *(f"* {row}" for row in inexact), ""]
    lines += ["## Refused when loaded, by reason", ""]
    for marker, reason in REASONS.items():
        names = [n for n, r in results.items() if isinstance(r, str) and not r.startswith("not built") and marker in r]
        lines += [f"* **{reason}** ({len(names)}): {', '.join(names)}"] if names else []
    left = [f"{n} ({r.removeprefix('not built: ')})" for n, r in results.items() if str(r).startswith("not built")]
    lines += ["", f"Not built from a default config: {'; '.join(left)}."] if left else []
    return "\n".join(lines) + "\n"


def main() -> int:
    transformers.logging.set_verbosity_error()
    results = dict(try_all(sys.argv[1:] or list(model_types())))
    exact = sum(isinstance(found, Row) and found.exact for found in results.values())
    print(f"{exact} exact of {len(results)}")
    if sys.argv[1:]:
        return 0
    Path(__file__).with_name("SUPPORT.md").write_text(render(results), encoding="utf-8")
    return 0 if exact >= LEAST_EXACT else 1


if __name__ == "__main__":
    sys.exit(main())
