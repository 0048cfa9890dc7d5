"""What a server measures of itself, as Prometheus reads it."""

from __future__ import annotations

from typing import Any

import prometheus_client
from prometheus_client import Counter, Gauge, Histogram, Info

__all__ = ["Monitoring"]

_SECONDS = 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0
_ROWS = [1 << n for n in range(0, 14, 2)]


class Monitoring:
    """Counters of one server.

    Attributes
    ----------
    rows, batch_rows, waiting, reloads, version
        Of prometheus_client.

    Examples
    --------
    >>> monitoring = Monitoring()
    >>> monitoring.answered(200, 0.003)
    >>> b'cupyrec_requests_total{status="200"} 1.0' in monitoring.exposition()[1]
    True
    """

    def __init__(self) -> None:
        self._registry = prometheus_client.CollectorRegistry()
        prometheus_client.ProcessCollector(registry=self._registry)
        to: dict[str, Any] = {"registry": self._registry, "namespace": "cupyrec"}
        self._requests = Counter("requests", "Inference requests by status", ["status"], **to)
        self._by_status: dict[int, Counter] = {}
        about = "From the head of a request to its answer"
        self._seconds = Histogram("request_seconds", about, buckets=_SECONDS, **to)
        self.rows = Counter("rows", "Rows predicted", **to)
        self.batch_rows = Histogram("batch_rows", "Rows of a batch", buckets=_ROWS, **to)
        self.waiting = Gauge("waiting_rows", "Rows that wait for a batch", **to)
        self.reloads = Counter("reloads", "Newer checkpoints by outcome", ["outcome"], **to)
        self.version = Info("model", "What is served", **to)

    def answered(self, status: int, seconds: float) -> None:
        """Count an inference request.

        Examples
        --------
        See the class.
        """
        if status not in self._by_status:
            self._by_status[status] = self._requests.labels(status)
        self._by_status[status].inc()
        self._seconds.observe(seconds)

    def exposition(self) -> tuple[str, bytes]:
        """Return the content type and the text of all of them.

        Examples
        --------
        See the class.
        """
        text = prometheus_client.generate_latest(self._registry)
        return prometheus_client.CONTENT_TYPE_LATEST, text
