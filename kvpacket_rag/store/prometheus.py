"""The counts of stores for Prometheus, through the optional package ``prometheus-client``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from kvpacket_rag.errors import MissingExtraError
from kvpacket_rag.store.metrics import StoreMetrics

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_COUNTERS = {
    "hits": "Packets asked for and given",
    "loads": "Packets read from a file",
    "bytes_loaded": "Bytes of packet files read",
    "verifications": "Loads that recomputed the checksum",
    "puts": "Packets written",
    "bytes_put": "Bytes of packets written",
    "evictions": "Packets that made room under the byte cap",
    "bytes_evicted": "Bytes of packets that made room",
    "damaged_rows": "Rows whose text was not believed",
}


class CountingStore(Protocol):
    """A store that counts, as both stores of this package do."""

    metrics: StoreMetrics

    def __len__(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...


class StoreCollector:
    """Reads the counts of stores whenever they are scraped; labels carry the stores' names, never a text.

    Args:
        stores: by the name each is to have.
        registry: of ``prometheus-client``; its default one if None.

    Raises:
        MissingExtraError: the package is not installed.

    Example:
        >>> StoreCollector({"handbook": engine.store})             # doctest: +SKIP
        >>> prometheus_client.start_http_server(9000)              # doctest: +SKIP
    """

    def __init__(self, stores: Mapping[str, CountingStore], registry: CollectorRegistry | None = None) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise MissingExtraError("metrics need prometheus-client; pip install 'kvpacket-rag[metrics]'") from error
        self._stores = dict(stores)
        self._registry = registry if registry is not None else prometheus_client.REGISTRY
        self._registry.register(self)

    def collect(self) -> Iterator[Any]:
        """The families of all counts, as a registry asks for them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        counts = {name: store.metrics.snapshot() for name, store in self._stores.items()}
        for field, told in _COUNTERS.items():
            family = CounterMetricFamily(f"kvpacket_store_{field}", told, labels=["store"])
            for name, found in counts.items():
                family.add_metric([name], getattr(found, field))
            yield family
        misses = CounterMetricFamily(
            "kvpacket_store_misses", "Packets asked for and not given", labels=["store", "reason"]
        )
        for name, found in counts.items():
            for reason, amount in found.misses.items():
                misses.add_metric([name, reason], amount)
        yield misses
        packets = GaugeMetricFamily("kvpacket_store_packets", "Packets stored now", labels=["store"])
        size = GaugeMetricFamily("kvpacket_store_size_bytes", "Bytes they take", labels=["store"])
        for name, store in self._stores.items():
            packets.add_metric([name], len(store))
            size.add_metric([name], store.size_bytes)
        yield from (packets, size)

    def close(self) -> None:
        """Leave the registry."""
        self._registry.unregister(self)
