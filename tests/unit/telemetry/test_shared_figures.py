"""Figures of several processes, read as one."""

from prometheus_client import CollectorRegistry, generate_latest

from services.telemetry.histogram import Histogram
from services.telemetry.metrics import Families
from services.telemetry.shared_figures import SharedFigures


def figures_of(*, requests: int, live: int, ready: int):
    families = Families("octavo_frontend")
    latency = Histogram([1.0])
    latency.observe(0.5, requests)
    return [
        families.gauge("requests_live", live, "live"),
        families.gauge("engine_ready", ready, "ready"),
        families.gauge("engines", 2, "engines"),
        families.counters("requests_failed", "error", {"Bad": requests}, "failed"),
        families.histogram("submit_seconds", latency, "latency"),
    ]


def shown(figures):
    class Joint:
        def collect(self):
            return figures.joint()

        def describe(self):
            return ()

    registry = CollectorRegistry()
    registry.register(Joint())
    lines = generate_latest(registry).decode().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))


def test_totals_add_up_and_gauges_say_what_holds_for_all():
    figures = SharedFigures(2)
    figures.publish(0, figures_of(requests=3, live=1, ready=1))
    figures.publish(1, figures_of(requests=4, live=2, ready=0))
    told = shown(figures)
    assert told["octavo_frontend_requests_live"] == "3.0"
    assert told["octavo_frontend_engine_ready"] == "0.0"
    assert told["octavo_frontend_engines"] == "2.0"
    assert told['octavo_frontend_requests_failed_total{error="Bad"}'] == "7.0"
    assert told['octavo_frontend_submit_seconds_bucket{le="1.0"}'] == "7.0"
    assert told["octavo_frontend_submit_seconds_sum"] == "3.5"


def test_totals_outlive_their_process_and_gauges_do_not():
    figures = SharedFigures(2)
    for _ in range(2):
        figures.publish(0, figures_of(requests=3, live=1, ready=1))
        assert figures.has_published(0)
        figures.retire(0)
        assert not figures.has_published(0)
    figures.publish(1, figures_of(requests=4, live=2, ready=1))
    told = shown(figures)
    assert told["octavo_frontend_requests_live"] == "2.0"
    assert told['octavo_frontend_requests_failed_total{error="Bad"}'] == "10.0"
    assert told["octavo_frontend_submit_seconds_count"] == "10.0"
