"""The state of a training run on disk, so that a killed one goes on as if nothing had happened."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.adapter_file import write_whole
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.errors import TrainingError
from kvpacket_rag.shipped import check_adapter

_FORMAT = "kvpacket-training-1"
_NAMED = 4  # differences between two runs that are told
_LONGEST = 40  # characters of a value that are told; digests are longer


@dataclass(slots=True)
class Progress:
    """How far a run has come.

    Attributes:
        step: steps done.
        best: lowest validation KL so far.
        best_step: when it was measured.
        stale: validations since then.
        figures: of the best validation, by name.
        plain: the same of plain concatenation, which is what training has to bring down.
    """

    step: int = 0
    best: float = float("inf")
    best_step: int = 0
    stale: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    plain: dict[str, float] = field(default_factory=dict)


def save_state(path: Path, recipe: str, progress: Progress, adapter: Adapter, optimiser: torch.optim.Optimizer) -> None:
    """Write adapter, optimiser and progress as one safetensors file, complete or not at all.

    Args:
        path: of the file.
        recipe: what the run is made of; a run with another one is not continued.
        progress: see :class:`Progress`.
        adapter: in training.
        optimiser: of it.
    """
    tensors = {f"adapter.{name}": p.detach().cpu().contiguous() for name, p in adapter.named_parameters()}
    for name, parameter in adapter.named_parameters():
        for key, value in optimiser.state.get(parameter, {}).items():
            tensors[f"optimiser.{name}.{key}"] = value.detach().cpu().contiguous()
    numbers = {name: getattr(progress, name) for name in Progress.__slots__}
    content = save(tensors, {"format": _FORMAT, "recipe": recipe, "progress": json.dumps(numbers)})
    try:
        write_whole(path, content)
    except OSError as error:
        raise TrainingError(
            f"cannot write the state of the training to {path}: {error}; "
            "make room and start again, it goes on from the last state written"
        ) from error


def load_state(path: Path, recipe: str, adapter: Adapter, optimiser: torch.optim.Optimizer) -> Progress | None:
    """Bring adapter and optimiser to a saved state; None if there is none.

    Raises:
        TrainingError: the file is damaged, or belongs to a run with another recipe, model or data.
    """
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            progress = Progress(**json.loads(about["progress"]))
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise TrainingError(f"{path} is no state of a training run ({error}); remove it to start anew") from error
    if about.get("format") != _FORMAT or about.get("recipe") != recipe:
        raise TrainingError(
            f"{path} belongs to another run: {_difference(about.get('recipe', ''), recipe)}. "
            "Go on with the old settings, or name another folder"
        )
    for name, parameter in adapter.named_parameters():
        parameter.data.copy_(tensors[f"adapter.{name}"])
        optimiser.state[parameter] = _moments(tensors, f"optimiser.{name}.", parameter)
    return progress


def started_from(path: Path) -> dict[str, str]:
    """What :func:`warm_up` gave when a run began, read from its state; nothing without a warm start or a state."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            recipe = json.loads((file.metadata() or {})["recipe"])
    except (OSError, SafetensorError, KeyError, ValueError):
        return {}
    return {key: recipe[key] for key in ("warm_start", "warm_start_training") if key in recipe}


def warm_up(adapter: Adapter, trained: Adapter | Mapping[str, str] | None, backbone: Backbone) -> dict[str, str]:
    """Give an untrained adapter the numbers of a trained one that is built alike, or with a lower rank.

    What a higher rank adds begins as it is built, without effect.

    Args:
        adapter: untrained.
        trained: the one to go on from; or what this function gave for it, and nothing is changed.
        backbone: the model; an adapter of near weights is warned of.

    Returns:
        What the trained one says of itself, for the metadata of what comes of it: ``warm_start``, its digest, and
        ``warm_start_training``, its recipe, data and step, and what it was warm-started from in turn.

    Raises:
        TrainingError: the two are built otherwise.
        AdapterError: the trained one is of another model.
    """
    if not isinstance(trained, Adapter):
        return dict(trained or {})
    check_adapter(trained, backbone)
    own, given = adapter.metadata, trained.metadata
    differing = [f"{key} is {given.get(key)!r} and would be {own[key]!r}" for key in own if given.get(key) != own[key]]
    places, values = _by_name(adapter), _by_name(trained)
    # modules the trained one leaves out change nothing
    missing = [name for name in places.keys() - values.keys() if not name.endswith((".down", ".up"))]
    rooms = {name: _room(name, places[name], value) for name, value in values.items() if name in places}
    if missing or len(rooms) < len(values) or any(rooms[n].shape != values[n].shape for n in values):
        differing.append(f"it has {trained.summary}, the recipe makes {adapter.summary}")
    if differing:
        raise TrainingError(
            f"the adapter to go on from is built otherwise: {'; '.join(differing)}; set the recipe to what it has"
        )
    for name, value in values.items():
        rooms[name].copy_(value)
    kept = ("recipe", "data", "step", "warm_start", "warm_start_training")
    about = {key: given[key] for key in kept if key in given}
    return {"warm_start": trained.digest, "warm_start_training": json.dumps(about)}


def _room(name: str, place: Tensor, value: Tensor) -> Tensor:
    """Where a trained value goes in a parameter: all of it, or the first ranks of a low-rank update."""
    place = place.detach()
    if name.endswith(".down"):
        return place[: value.shape[0]]
    return place[:, : value.shape[1]] if name.endswith(".up") else place


def _by_name(adapter: Adapter) -> dict[str, Tensor]:
    """Every parameter, those of the low-rank update by module."""
    named: dict[str, Tensor] = {name: p for name, p in adapter.named_parameters() if not name.startswith("low_rank.")}
    if update := adapter.low_rank:
        for module, down, up in zip(update.names, update.down, update.up, strict=True):
            named[f"{module}.down"], named[f"{module}.up"] = down, up
    return named


def _moments(tensors: dict[str, Tensor], prefix: str, parameter: Tensor) -> dict[str, Tensor]:
    found = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    return {key: value if key == "step" else value.to(parameter) for key, value in found.items()}


def _difference(before: str, now: str) -> str:
    try:
        old, new = _leaves(json.loads(before)), _leaves(json.loads(now))
    except ValueError:
        return "its settings cannot be read"
    if old.get("warm_start") != new.get("warm_start"):
        started, starts = (
            f"from {w[:12]}…" if (w := found.get("warm_start")) else "from nothing" for found in (old, new)
        )
        return f"that one started {started}, this one starts {starts}"
    names = sorted(old.keys() | new.keys())
    told = differences([(name, old.get(name), new.get(name)) for name in names], "{} was {} and is {}")
    return told or "it has the same data sets in another order"


def differences(pairs: Sequence[tuple[str, object, object]], words: str) -> str:
    """What differs among things of a name and two values, the first few of them in the given words."""
    told = [words.format(name, _brief(one), _brief(other)) for name, one, other in pairs if one != other]
    return "; ".join([*told[:_NAMED], *([f"and {len(told) - _NAMED} more"] if len(told) > _NAMED else [])])


def _leaves(value: Any, name: str = "") -> dict[str, Any]:
    """Every number and text of a run's settings by its path, ``data.shape.max_chunks``; JSON within text is opened."""
    if isinstance(value, str) and value.startswith("{"):
        with suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, list):
        names = [str(part.get("name", n) if isinstance(part, dict) else n) for n, part in enumerate(value)]
        value = dict(zip(names if len(set(names)) == len(names) else map(str, range(len(names))), value, strict=True))
    if not isinstance(value, dict):
        return {name: value}
    return {k: v for key, part in value.items() for k, v in _leaves(part, f"{name}.{key}" if name else key).items()}


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:12]}…"
