"""Packets made by Ray workers, each with the model in memory, on one machine or many.

What a worker gets are whole forwards, as one process alone would make them, so the packets are the same bytes whoever
makes them. A batch is done when its packets are stored; one whose worker died is made again by another, and
what was stored before costs nothing.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.errors import MissingExtraError, PacketMismatchError, StoreError
from kvpacket_rag.packet_writer import MissingPacket
from kvpacket_rag.store import DiskStore, PacketStore, RemoteStore

_KEPT_BYTES = 1  # of packets on a worker's disk: it reads none


@dataclass(frozen=True, slots=True)
class RayWorkers:
    """Makes packets in Ray actors.

    A cluster that Ray is connected to, or that ``RAY_ADDRESS`` names, is used; else one is started on this machine.
    Packets in a folder can be made on its own machine only; for more machines they lie in an object store.

    Args:
        count: of workers, each with a model of its own; one for every GPU, or else for every machine by default.
        gpus: of each worker where the model runs on CUDA; less than 1 where several share one.

    Raises:
        MissingExtraError: Ray is not installed.
    """

    count: int | None = None
    gpus: float = 1.0

    def __post_init__(self) -> None:
        _ray()  # to be missed before a model is loaded

    def make(self, engine: KVPacketEngine, batches: Sequence[Sequence[MissingPacket]]) -> Iterator[str]:
        """Have packets made and stored; their ids, as they come.

        Args:
            engine: of the model that is to make them, and of the store they go to.
            batches: of one forward each.

        Raises:
            StoreError: the workers cannot reach the store.
            PacketMismatchError: a worker's machine has another model.
        """
        if not batches:
            return
        ray = _ray()
        if not ray.is_initialized():
            ray.init(include_dashboard=False, log_to_driver=False)
        ray.data.DataContext.get_current().enable_progress_bars = False  # the ingest has one of its own
        nodes = [node for node in ray.nodes() if node["Alive"]]
        if len(nodes) > 1 and not isinstance(engine.store, RemoteStore):
            raise StoreError(
                f"the cluster has {len(nodes)} machines, and packets in a folder of one cannot be written by the "
                "others; keep them in an object store, with --remote URL or remote=URL"
            )
        count = min(self._count(ray, len(nodes)), len(batches))
        on_gpu = engine.backbone.device.type == "cuda"
        cpus = ray.cluster_resources().get("CPU", 1.0)
        made = (
            ray.data.from_items([{"batch": _packed(batch)} for batch in batches], override_num_blocks=len(batches))
            .map_batches(
                _Worker,
                fn_constructor_args=(_Recipe.of(engine), max(1, int(cpus / count))),
                batch_size=1,
                compute=ray.data.ActorPoolStrategy(size=count),
                num_cpus=0 if on_gpu else min(1.0, cpus / count),
                num_gpus=self.gpus if on_gpu else None,
            )
            .iter_rows()
        )
        for row in made:
            yield row["packet_id"]
        if isinstance(engine.store, RemoteStore):
            engine.store.refresh()

    def _count(self, ray: Any, num_nodes: int) -> int:
        gpus = ray.cluster_resources().get("GPU", 0.0)
        return self.count or int(gpus / self.gpus) or num_nodes


@dataclass(frozen=True, slots=True)
class _Recipe:
    """What a worker needs to make the packets that the engine at home makes."""

    signature: str
    model: str
    dtype: str
    device: str
    adapter: Adapter
    sink: int
    compress: str | None
    quantize: str | None
    folder: str | None
    max_bytes: int | None
    url: str | None

    @classmethod
    def of(cls, engine: KVPacketEngine) -> _Recipe:
        store, encoder = engine.store, engine.encoder
        if not isinstance(store, DiskStore | RemoteStore):
            raise StoreError(
                f"packets in a {type(store).__name__} cannot be written by Ray workers; keep them in a folder or below "
                "a URL"
            )
        reduction = encoder.reduction
        return cls(
            signature=engine.signature.to_json(),
            model=engine.model_name,
            dtype=engine.signature.dtype,
            device=engine.backbone.device.type,
            adapter=encoder.adapter,
            sink=len(encoder.sink_ids),
            compress=str(reduction.compression) if reduction.compression else None,
            quantize=reduction.scheme.name if reduction.scheme else None,
            folder=str(store.folder) if isinstance(store, DiskStore) else None,
            max_bytes=store.max_bytes if isinstance(store, DiskStore) else None,
            url=store.url if isinstance(store, RemoteStore) else None,
        )

    def engine(self) -> KVPacketEngine:
        """The same engine in this process.

        Raises:
            PacketMismatchError: its packets would be others.
        """
        engine = KVPacketEngine.load(
            self.model,
            store=self._store(),
            adapter=self.adapter,
            sink=self.sink,
            device=self.device,
            dtype=self.dtype,
            compress=self.compress,
            quantize=self.quantize,
        )
        if engine.signature.to_json() != self.signature:
            raise PacketMismatchError(
                f"the machine of a worker has another {self.model}, whose packets could not be read here: "
                f"{engine.signature.to_json()}, expected {self.signature}"
            )
        return engine

    def _store(self) -> PacketStore:
        if self.url is None:
            return DiskStore(self.folder or "", self.max_bytes)
        own = tempfile.mkdtemp(prefix="kvpacket-worker-")
        return RemoteStore(self.url, own, _KEPT_BYTES, refresh_seconds=math.inf)


class _Worker:
    """A process with the model, which makes one batch after another."""

    def __init__(self, recipe: _Recipe, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._engine = recipe.engine()

    def __call__(self, rows: dict[str, Any]) -> dict[str, list[str]]:
        made = []
        for text in rows["batch"]:
            batch = [MissingPacket(**packet) for packet in json.loads(text)]
            names = [packet.packet_id for packet in batch]
            if not all(name in self._engine.store for name in names):  # whole, for a part gives other last bits
                self._engine.writer.write(batch)
            made += names
        return {"packet_id": made}


def _packed(batch: Sequence[MissingPacket]) -> str:
    return json.dumps([asdict(packet) for packet in batch])


def _ray() -> Any:
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise MissingExtraError(
            "the engine 'ray' needs Ray, which is not installed; run pip install 'kvpacket-rag[ray]'"
        ) from error
    return ray
