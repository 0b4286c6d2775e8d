"""The counts of stores for Prometheus, through the optional package ``prometheus-client``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kvpacket_rag.errors import MissingExtraError
from kvpacket_rag.store.protocol import PacketStore

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_COUNTERS = {
    "hits": "Packets asked for and given",
    "loads": "Packets read from a file or copied into a tier",
    "bytes_loaded": "Bytes of packets read or copied",
    "verifications": "Loads that recomputed the checksum",
    "puts": "Packets written",
    "bytes_put": "Bytes of packets written",
    "evictions": "Packets that made room under the byte cap",
    "bytes_evicted": "Bytes of packets that made room",
    "damaged_rows": "Rows whose text was not believed",
}
_LABELS = ["store", "tier"]


class StoreCollector:
    """Reads the counts of stores, by tier, whenever they are scraped; labels carry names, never a text.

    Args:
        stores: by the name each is to have.
        registry: of ``prometheus-client``; its default one if None.

    Raises:
        MissingExtraError: the package is not installed.

    Example:
        >>> StoreCollector({"handbook": engine.store})             # doctest: +SKIP
        >>> prometheus_client.start_http_server(9000)              # doctest: +SKIP
    """

    def __init__(self, stores: Mapping[str, PacketStore], registry: CollectorRegistry | None = None) -> None:
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

        tiers = {(name, tier): found for name, store in self._stores.items() for tier, found in store.tiers.items()}
        counts = {labels: tier.metrics.snapshot() for labels, tier in tiers.items()}
        for field, told in _COUNTERS.items():
            family = CounterMetricFamily(f"kvpacket_store_{field}", told, labels=_LABELS)
            for labels, found in counts.items():
                family.add_metric(labels, getattr(found, field))
            yield family
        misses = CounterMetricFamily(
            "kvpacket_store_misses", "Packets asked for and not given", labels=[*_LABELS, "reason"]
        )
        for labels, found in counts.items():
            for reason, amount in found.misses.items():
                misses.add_metric([*labels, reason], amount)
        yield misses
        packets = GaugeMetricFamily("kvpacket_store_packets", "Packets held now", labels=_LABELS)
        size = GaugeMetricFamily("kvpacket_store_size_bytes", "Bytes they take", labels=_LABELS)
        for labels, tier in tiers.items():
            packets.add_metric(labels, len(tier))
            size.add_metric(labels, tier.size_bytes)
        yield from (packets, size)

    def close(self) -> None:
        """Leave the registry."""
        self._registry.unregister(self)
