"""The teacher's answers on disk: one safetensors file a row, named by all that decides its content."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save

from kvpacket_rag.training.objective import Targets

logger = logging.getLogger(__name__)


class AnswersFolder:
    """Remembers answers by name.

    A damaged file counts as none, for it can be made again. When nothing more can be written, as on a full
    disk, that is said once and the run goes on: it costs the next one time, never this one its work.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writes = True

    def read(self, name: str) -> list[Targets] | None:
        """The answers of that name, if they were remembered."""
        try:
            tensors = load(self._path(name).read_bytes())
            numbers = range(sum(key.endswith(".answer") for key in tensors))
            answers = [
                Targets(
                    tensors[f"{n}.answer"].long(),
                    tensors[f"{n}.top_ids"].long(),
                    tensors[f"{n}.top_log_probs"],
                    tensors.get(f"{n}.hidden"),
                )
                for n in numbers
            ]
            return answers or None
        except (OSError, SafetensorError, KeyError):
            return None

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
        half = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            half.write_bytes(save(tensors))
            half.replace(path)
        except OSError as error:
            with suppress(OSError):
                half.unlink(missing_ok=True)
            self._writes = False
            logger.warning(
                "the teacher's answers are not remembered any more: %s; training goes on, and a later run will "
                "have to ask again. Make room in %s to have them kept",
                str(error),
                self._folder,
            )

    def _path(self, name: str) -> Path:
        return self._folder / name[:2] / f"{name}.safetensors"
