"""What a vLLM that serves packets lets in: its own configuration at the start, then request by request.

Nothing here imports vLLM; its objects are read by their attributes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch

from kvpacket_rag.errors import KVPacketError, PacketMismatchError, PromptError, StoreError, UnsupportedModelError
from kvpacket_rag.namespace import namespace_folder
from kvpacket_rag.serving.vllm_card import ServingCard
from kvpacket_rag.serving.vllm_layout import (
    PlacedPacket,
    check_sampling,
    prove,
    read_claim,
    require_no_salt,
    require_stored,
)
from kvpacket_rag.serving.vllm_load import Load, Step
from kvpacket_rag.store import DiskStore, PacketStore, RemoteStore, is_url
from kvpacket_rag.store.remote_cache import RemoteCache

logger = logging.getLogger(__name__)

_UNDIVIDED = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
)


TRANSFER_CONFIG = {
    "kv_connector": "KVPacketConnector",
    "kv_connector_module_path": "kvpacket_rag.serving.vllm",
    "kv_role": "kv_both",
}
GUARD = "kvpacket_rag.serving.vllm:KVPacketGuard"  # for --logits-processors


@dataclass(frozen=True, slots=True)
class Settings:
    """The connector's ``kv_connector_extra_config``.

    Attributes:
        card: file that :meth:`ServingCard.save` wrote.
        store: folder of the engine's packets, such as that of its index, or URL of the object store they lie in.
        namespace: of a folder.
        cache: folder of this machine for packets of a URL; a folder that is such a cache already needs none.
        cache_bytes: cap on the packets of an object store that lie on this machine; 0 for none.
        async_load: read packets in a thread beside the model's work; without, a step waits for the packets of its new
            requests. Packets of an object store are always read so.
        verify_weights: at the start, load the model's files once more to see that they are the packets' model. Takes
            that much memory for that long.
    """

    card: str
    store: str
    namespace: str = ""
    cache: str = ""
    cache_bytes: int = 0
    async_load: bool = False
    verify_weights: bool = True

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """From a mapping.

        Raises:
            KVPacketError: a setting is missing, unknown or of another type, or has no effect beside the others.
        """
        expected = {name: str(kind) for name, kind in cls.__annotations__.items()}
        wrong = sorted({"card", "store"} - given.keys()) + sorted(given.keys() - expected.keys())
        wrong += [name for name, value in given.items() if expected.get(name) not in (None, type(value).__name__)]
        if wrong:
            raise KVPacketError(
                f"kv_connector_extra_config holds {sorted(given)}; expected {expected}, card and store at least "
                f"(wrong or missing: {', '.join(wrong)})"
            )
        settings = cls(**given)
        if is_url(settings.store) and (settings.namespace or not settings.cache):
            raise KVPacketError(
                f"kv_connector_extra_config names the object store {settings.store}; expected with it a folder of this "
                "machine as cache, and no namespace: the URL is that of the namespace"
            )
        return settings

    def transfer_config(self) -> dict[str, Any]:
        """What vLLM takes as ``--kv-transfer-config``; settings that are the defaults are left out."""
        defaults = type(self)(self.card, self.store)
        own = {"card": self.card, "store": self.store}
        own |= {name: value for name, value in asdict(self).items() if value != getattr(defaults, name)}
        return {**TRANSFER_CONFIG, "kv_connector_extra_config": own}

    def open_store(self) -> DiskStore | RemoteStore:
        """The store, which has to be there.

        Raises:
            StoreError: it is not.
        """
        most = self.cache_bytes or None
        if is_url(self.store):
            return RemoteStore(self.store, self.cache, most, sweep=False)
        folder = namespace_folder(self.store, self.namespace).expanduser()
        if not folder.is_dir():
            raise StoreError(f"there is no store in {str(folder)!r}; name the folder in which the engine keeps packets")
        store = RemoteCache(folder, sweep=False)
        url = store.url
        if url is None:
            return store
        store.close()
        return RemoteStore(url, folder, most, sweep=False)


def require_supported(config: Any, card: ServingCard) -> None:
    """Refuse a vLLM that would answer wrongly from packets.

    Args:
        config: its VllmConfig.
        card: of the packets.

    Raises:
        UnsupportedModelError: this way of serving is not supported.
        PacketMismatchError: the model is loaded otherwise than the packets' model.
    """
    policy = config.kv_transfer_config.kv_load_failure_policy
    if policy != "fail":
        raise UnsupportedModelError(
            f"kv_load_failure_policy is {policy!r}; with anything but 'fail', placeholders would be read as text"
        )
    if divided := [name for name in _UNDIVIDED if getattr(config.parallel_config, name, 1) != 1]:
        raise UnsupportedModelError(f"{', '.join(divided)} must be 1: packets of a divided model are not supported yet")
    dtype, kept = str(config.model_config.dtype).removeprefix("torch."), config.cache_config.cache_dtype
    if dtype != card.signature.dtype or kept not in ("auto", dtype):
        raise PacketMismatchError(
            f"the model is loaded in {dtype} and its cache in {kept!r}, the packets are in {card.signature.dtype}; "
            f"start vLLM with --dtype {card.signature.dtype}, or encode the chunks again"
        )
    if config.model_config.max_model_len > card.plan.max_positions:
        raise UnsupportedModelError(
            f"max_model_len is {config.model_config.max_model_len}, packets hold for {card.plan.max_positions} "
            f"positions; start vLLM with --max-model-len {card.plan.max_positions}"
        )


def require_same_weights(model: Any, card: ServingCard) -> None:
    """Refuse a model that is not the packets' model, by its parameters.

    Args:
        model: vLLM's ModelConfig.
        card: of the packets.

    Raises:
        PacketMismatchError: it is another one.
    """
    from transformers import AutoModelForCausalLM  # vLLM's own, which may be older than the engine's

    from kvpacket_rag.fingerprint import fingerprint_values

    dtype = getattr(torch, card.signature.dtype)
    loaded = AutoModelForCausalLM.from_pretrained(model.model, revision=model.revision, dtype=dtype)
    if fingerprint_values(loaded) != card.values:
        raise PacketMismatchError(
            f"the weights of {model.model} are not those of {card.model}, whose packets these are; serve that model, "
            "or encode the chunks with this one"
        )


class Admission:
    """The scheduler's half: says which tokens of a request come from packets, and fails what must not run.

    A scheduler has no way to refuse one request. One that is refused here is offered all of its tokens from outside,
    between two steps, and the worker reports that this failed; nothing is computed for it meanwhile.

    Args:
        card: of the packets.
        store: where they are.
        in_background: see :attr:`Load.in_background`; packets of an object store are always read so.
    """

    def __init__(self, card: ServingCard, store: PacketStore, in_background: bool) -> None:
        self._card = card
        self._store = store
        self._is_remote = isinstance(store, RemoteStore)
        self._in_background = in_background or self._is_remote
        self._placed: dict[str, tuple[PlacedPacket, ...]] = {}
        self._refused: set[str] = set()
        self._loads: list[Load] = []
        self._failing: set[str] = set()

    def receive(self, request: Any) -> None:
        """Look at a new request of vLLM's; what is wrong with it is logged, and it will fail."""
        try:
            placed = self._check(request)
        except Exception as error:  # whatever a request holds, it may not stop the scheduler
            logger.error("request %s is refused: %s: %s", request.request_id, type(error).__name__, str(error))
            self._refused.add(request.request_id)
            request.skip_reading_prefix_cache = False  # or the scheduler would not ask for tokens from outside
            return
        if placed:
            self._placed[request.request_id] = placed

    def _check(self, request: Any) -> tuple[PlacedPacket, ...]:
        claim = read_claim(request.kv_transfer_params)
        if claim is None:
            require_no_salt(request.cache_salt)
            return ()
        check_sampling(request.sampling_params)
        if request.lora_request is not None or request.prompt_token_ids is None:
            raise PromptError("packets fit prompts of token ids to the model itself, without LoRA and embeddings")
        placed = prove(claim, self._card, request.prompt_token_ids, request.cache_salt)
        if self._is_remote:  # whose packets need not be known here before they are read
            self._store.revision()  # has what others deleted looked for when that is due
        else:
            require_stored(placed, self._store)
        return placed

    def offer(self, request: Any, num_computed: int) -> tuple[int, bool]:
        """Tokens that come from packets beyond the first ``num_computed``, and whether between two steps."""
        if request.request_id in self._refused:
            return request.num_tokens - num_computed, True
        placed = self._placed.get(request.request_id, ())
        offered = max(0, placed[-1].stop - num_computed) if placed else 0
        return offered, offered > 0 and self._in_background

    def allocated(self, request_id: str, block_ids: Sequence[int], num_offered: int) -> None:
        """Room was made for what was offered; 0 if nothing is to be written."""
        if not num_offered:
            return
        if request_id in self._refused:
            self._failing.add(request_id)
            return
        placed = self._placed[request_id]
        start = placed[-1].stop - num_offered
        self._loads.append(Load(request_id, placed, start, tuple(block_ids), self._in_background))

    def take_step(self) -> Step:
        """What is to be done in the next step; asked once a step."""
        step = Step(tuple(self._loads), frozenset(self._failing))
        self._loads, self._failing = [], set()
        return step

    def forget(self, request_id: str) -> None:
        """A request is done."""
        self._placed.pop(request_id, None)
        self._refused.discard(request_id)
