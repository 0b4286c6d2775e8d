"""The teacher's answers on disk: one safetensors file a row, named by all that decides its content."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from kvpacket_rag.adapter_file import write_whole
from kvpacket_rag.training.objective import Targets

logger = logging.getLogger(__name__)


class AnswersFolder:
    """Remembers answers by name.

    Every file holds a checksum. One that is damaged, or has none, counts as none, for it can be made again. When
    nothing more can be written, as on a full disk, that is said once and the run goes on: it costs the next one time,
    never this one its work.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writes = True

    def read(self, name: str) -> list[Targets] | None:
        """The answers of that name, if they were remembered and are as they were written."""
        try:
            tensors = load(self._path(name).read_bytes())
            if not torch.equal(tensors.pop("sha256"), _checksum(name, tensors)):
                return None
        except (OSError, SafetensorError, KeyError, ValueError, RuntimeError):
            return None
        return [
            Targets(
                tensors[f"{n}.answer"].long(),
                tensors[f"{n}.top_ids"].long(),
                tensors[f"{n}.top_log_probs"],
                tensors.get(f"{n}.hidden"),
            )
            for n in range(sum(key.endswith(".answer") for key in tensors))
        ]

    def write(self, name: str, answers: Sequence[Targets]) -> None:
        """Remember answers, complete or not at all."""
        if not self._writes:
            return
        tensors = {}
        for number, found in enumerate(answers):
            tensors[f"{number}.answer"], tensors[f"{number}.top_ids"] = found.answer.int(), found.top_ids.int()
            tensors[f"{number}.top_log_probs"] = found.top_log_probs
            if found.hidden is not None:
                tensors[f"{number}.hidden"] = found.hidden
        path = self._path(name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, save(tensors | {"sha256": _checksum(name, tensors)}))
        except OSError as error:
            self._writes = False
            logger.warning(
                "the teacher's answers are not remembered any more: %s; training goes on, and a later run will "
                "have to ask again. Make room in %s to have them kept",
                str(error),
                self._folder,
            )

    def _path(self, name: str) -> Path:
        return self._folder / name[:2] / f"{name}.safetensors"


def _checksum(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """(32,) bytes: SHA-256 over the file's name and its tensors with their names, types and shapes."""
    return torch.tensor(list(hashlib.sha256(name.encode() + save(dict(tensors))).digest()), dtype=torch.uint8)
