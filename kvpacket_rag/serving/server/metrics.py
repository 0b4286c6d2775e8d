"""What a server counts, for Prometheus; labels carry routes and states, never a text."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvpacket_rag.serving.server.backend import Finished

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class ServerMetrics:
    """Counters of one server."""

    def __init__(self) -> None:
        self.registry = shared = CollectorRegistry()
        self._requests = Counter(
            "kvpacket_requests", "Requests by route and status", ["route", "status"], registry=shared
        )
        self.in_progress = Gauge(
            "kvpacket_requests_in_progress", "Requests that are not answered to their end", registry=shared
        )
        self._seconds = Histogram(
            "kvpacket_request_seconds", "From the request to its end", ["route"], buckets=_SECONDS, registry=shared
        )
        self._first_token = Histogram(
            "kvpacket_first_token_seconds", "From the prompt to its first token", buckets=_SECONDS, registry=shared
        )
        self._prompt_tokens = Counter(
            "kvpacket_prompt_tokens", "Tokens of prompts, cached or read", ["source"], registry=shared
        )
        self._completion_tokens = Counter("kvpacket_completion_tokens", "Tokens written", registry=shared)

    def request(self, route: str, status: int, seconds: float) -> None:
        """Count a request that ended; 499 is one whose client left."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def answer(self, finished: Finished) -> None:
        """Count the tokens of an answer."""
        self._prompt_tokens.labels("cached").inc(finished.cached_tokens)
        self._prompt_tokens.labels("read").inc(finished.prompt_tokens - finished.cached_tokens)
        self._completion_tokens.inc(finished.completion_tokens)
        if finished.first_token_seconds is not None:
            self._first_token.observe(finished.first_token_seconds)

    def text(self) -> bytes:
        """All counts in Prometheus' format."""
        return generate_latest(self.registry)
