"""Scores of NVIDIA's kvpress, for tokens chosen here.

Only ``score()`` of its presses is used. Its own hook reads arguments that attention modules are no longer given, and
importing the package as a whole wraps the attention of every model in the process, so its modules are loaded apart.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kvpacket_rag.compress.press import LayerView, Needs, clamp_window
from kvpacket_rag.errors import MissingExtraError, ModelNotFoundError

_SNAPKV_WINDOW = 32
_SINKS = 4  # of CUR
_EDGES = (8, 4)  # first and last tokens that Compactor keeps


class KVPress:
    """One of kvpress's presses.

    Args:
        name: ``"cur"``, ``"leverage"``, ``"tova"``, ``"snapkv"`` or ``"compactor"``.
        ratio: share of the tokens to remove; Compactor weighs its two scores by it.

    Raises:
        MissingExtraError: kvpress is not installed.
    """

    def __init__(self, name: str, ratio: float) -> None:
        modules = _load([f"presses.{name}_press", "utils"])
        self._presses = modules[f"presses.{name}_press"]
        self._project_keys = modules["utils"].get_prerope_key_states
        self._name = name
        self._ratio = ratio
        self.needs: Needs = "tensors" if name == "cur" else "projections"
        of_name = {"snapkv": f", window {_SNAPKV_WINDOW}", "cur": f", {_SINKS} sinks", "compactor": f", edges {_EDGES}"}
        self.settings = f"{name} of kvpress{of_name.get(name, '')}"

    def score(self, layer: LayerView, num_kept: int, seed: int) -> Tensor:
        """See :meth:`Press.score`."""
        num_tokens = layer.keys.shape[2]
        window = {"tova": 1, "snapkv": clamp_window(_SNAPKV_WINDOW, num_tokens, num_kept)}.get(self._name, 0)
        press = self._press(num_kept, window)
        keys, values = layer.keys, layer.values
        if self.needs == "tensors":
            keys, values = keys.float(), values.float()
        angles = {"position_embeddings": (layer.cos, layer.sin)}
        found: Tensor = press.score(layer.module, layer.hidden, keys, values, None, angles)
        scores = found[0].float()
        scores[:, num_tokens - window :] = torch.inf
        return scores

    def _press(self, num_kept: int, window: int) -> Any:
        """The press for a packet of which so many tokens are kept."""
        edge = num_kept // 4
        if self._name == "cur":
            return self._presses.CURPress(num_sinks=min(_SINKS, edge))
        if self._name == "leverage":
            return self._presses.LeverageScorePress()
        if self._name == "tova":
            return self._presses.TOVAPress()
        if self._name == "snapkv":
            return self._presses.SnapKVPress(window_size=window)
        first, last = (min(size, edge) for size in _EDGES)
        return self._presses.CompactorPress(self._ratio, sink_size_start=first, sink_size_end=last)

    def project_keys(self, layer: LayerView) -> Tensor:
        """See :meth:`Press.project_keys`."""
        return self._project_keys(layer.module, layer.hidden)  # type: ignore[no-any-return]


class KVzapPress:
    """Scores by a small trained network, from what the attention modules read (arXiv 2601.07891).

    Args:
        weights: folder or hub name of the network.

    Raises:
        MissingExtraError: kvpress is not installed.
        ModelNotFoundError: there are no such weights.
    """

    needs: Needs = "hidden"

    def __init__(self, weights: str | Path) -> None:
        model_class = _load(["presses.kvzap_press"])["presses.kvzap_press"].KVzapModel
        try:
            self._model = model_class.from_pretrained(str(weights)).eval()
        except (OSError, ValueError, TypeError) as error:
            raise ModelNotFoundError(
                f"the press kvzap needs its own weights for this model, and {str(weights)!r} holds none ({error}); "
                "name their folder with kvzap:RATIO:weights=FOLDER, or take a press that needs none"
            ) from error
        from kvpacket_rag.fingerprint import fingerprint_weights

        self.settings = f"kvzap of kvpress, weights {fingerprint_weights(self._model)}"

    def score(self, layer: LayerView, num_kept: int, seed: int) -> Tensor:
        """See :meth:`Press.score`."""
        if layer.number >= len(self._model.layers):
            raise ModelNotFoundError(
                f"the weights of kvzap are for {len(self._model.layers)} layers, the model has more; "
                "take those that were trained for it"
            )
        network = self._model.layers[layer.number].to(layer.keys.device)
        scores: Tensor = network(layer.hidden[0].float())  # type: ignore[index]
        return scores.T

    def project_keys(self, layer: LayerView) -> Tensor:
        """Not needed."""
        raise NotImplementedError


def _load(names: list[str]) -> dict[str, ModuleType]:
    """Modules of kvpress by name, without the package's own ``__init__``.

    Raises:
        MissingExtraError: it is not installed.
    """
    spec = find_spec("kvpress")
    if spec is None or spec.submodule_search_locations is None:
        raise MissingExtraError("this press needs kvpress; pip install 'kvpacket-rag[compress]'")
    if "kvpress" in sys.modules:
        return {name: importlib.import_module(f"kvpress.{name}") for name in names}
    package = ModuleType("kvpress")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["kvpress"] = package
    try:
        return {name: importlib.import_module(f"kvpress.{name}") for name in names}
    finally:  # so that whoever imports kvpress gets all of it
        for name in [name for name in sys.modules if name.partition(".")[0] == "kvpress"]:
            del sys.modules[name]
