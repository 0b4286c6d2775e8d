"""KV packets in vLLM: a connector that vLLM loads by its module path. Nothing of vLLM is changed.

``kvpacket vllm-card`` writes the card and prints the command that starts vLLM, with ``--kv-transfer-config``::

    {"kv_connector": "KVPacketConnector", "kv_connector_module_path": "kvpacket_rag.serving.vllm",
     "kv_role": "kv_both", "kv_connector_extra_config": {"card": "card.json", "store": "library"}}

and with ``--logits-processors kvpacket_rag.serving.vllm:KVPacketGuard``, which tells a client what is wrong with its
request. Without it such a request fails all the same, and only the log says why.

The only module that imports vLLM. It was made for vLLM 0.32, whose connector API is experimental and moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.sample.logits_processor import LogitsProcessor

from kvpacket_rag.errors import KVPacketError, UnsupportedModelError
from kvpacket_rag.serving.vllm_admit import Admission, Settings, require_same_weights, require_supported
from kvpacket_rag.serving.vllm_card import ServingCard
from kvpacket_rag.serving.vllm_layout import check_sampling, read_claim
from kvpacket_rag.serving.vllm_load import LayerWriter, PacketLoader, Step, Work


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """From the scheduler's connector to the worker's."""

    step: Step


class KVPacketConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Gives vLLM the keys and values of packets as a prefix that was computed elsewhere.

    vLLM makes one for its scheduler and one for its worker.

    Raises:
        KVPacketError: vLLM or the connector is set up so that answers would be wrong, or card or store are not there.
    """

    _cache_hit_source = CacheHitSource.DISK  # names packets in vLLM's metrics

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        settings = Settings.of(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._card = ServingCard.load(settings.card)
        require_supported(vllm_config, self._card)
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise UnsupportedModelError(
                "the layers' caches are not managed alike; pass --disable-hybrid-kv-cache-manager to vLLM"
            )
        self._store = settings.open_store()
        if role is KVConnectorRole.SCHEDULER:
            if settings.verify_weights:
                require_same_weights(vllm_config.model_config, self._card)
            self._admission = Admission(self._card, self._store, settings.async_load)
        else:
            self._work: Work | None = None

    # of the scheduler

    def on_new_request(self, request: Any) -> None:
        self._admission.receive(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return self._admission.offer(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._admission.allocated(request.request_id, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return StepMetadata(self._admission.take_step())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._admission.forget(request.request_id)
        return False, None

    # of the worker

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        layers = get_layers_from_vllm_config(self._vllm_config, Attention)
        cache_config = self._vllm_config.cache_config
        writers = {extract_layer_index(name): _writer(layers[name], cache) for name, cache in kv_caches.items()}
        dtype, device = self._vllm_config.model_config.dtype, next(iter(kv_caches.values())).device
        loader = PacketLoader(self._store, self._card.plan, writers, cache_config.block_size, dtype, device)
        self._work = Work(loader, cache_config.block_size)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        if self._work is not None and isinstance(metadata, StepMetadata):
            self._work.start(metadata.step)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        done, failed = self._work.take_done() if self._work else (set(), set())
        return KVConnectorTransferResults(finished_recving=done, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._work.take_failed_blocks() if self._work else set()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: what a step needs was written before it began."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved: packets are made by the engine."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    def shutdown(self) -> None:
        if self.role is KVConnectorRole.WORKER and self._work is not None:
            self._work.close()
        self._store.close()


def _writer(layer: Any, cache: Tensor) -> LayerWriter:
    """Writes through the layer's own update, which alone knows how its cache is laid out."""

    def write(keys: Tensor, values: Tensor, slots: Tensor) -> None:
        layer.impl.do_kv_cache_update(layer, keys, values, cache, slots)

    return write


class KVPacketGuard(LogitsProcessor):  # type: ignore[misc]
    """Changes no logits: vLLM asks its logits processors about every request, so a client is told what is wrong."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        """As vLLM makes it."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Refuse a request that names packets malformedly, or bypasses them.

        Raises:
            ValueError: which vLLM answers with status 400.
        """
        try:
            if read_claim((sampling_params.extra_args or {}).get("kv_transfer_params")) is not None:
                check_sampling(sampling_params)
        except KVPacketError as error:
            raise ValueError(str(error)) from error

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: Any) -> None:
        """It has no state."""

    def apply(self, logits: Tensor) -> Tensor:
        return logits
