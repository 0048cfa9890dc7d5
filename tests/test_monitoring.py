"""What a server measures of itself, as Prometheus reads it."""

from prometheus_client.parser import text_string_to_metric_families

from cupyrec.serving.monitoring import Monitoring


def samples(monitoring):
    kind, text = monitoring.exposition()
    assert kind.startswith("text/plain")
    families = text_string_to_metric_families(text.decode())
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_requests_are_counted_by_status_and_time():
    monitoring, other = Monitoring(), Monitoring()  # of one process
    for status, seconds in [(200, 0.0004), (200, 0.004), (503, 9)]:
        monitoring.answered(status, seconds)
    told = samples(monitoring)
    assert told["cupyrec_requests_total", "200"] == 2
    assert told["cupyrec_requests_total", "503"] == 1
    buckets = [told["cupyrec_request_seconds_bucket", le] for le in ("0.0005", "0.005", "+Inf")]
    assert buckets == [1, 2, 3]
    assert told["cupyrec_request_seconds_sum",] == 9.0044
    assert told["process_resident_memory_bytes",] > 1 << 20
    assert ("cupyrec_requests_total", "200") not in samples(other)
