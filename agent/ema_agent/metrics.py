"""Metrics in Prometheus' text format, and the two health pages, on a thread of their own.

The loop publishes a snapshot once in a while; a scrape reads the last one and never waits for the data path.
"""

import threading
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ema_agent.figures import BUCKETS, Figures

CONTENT: Final = "text/plain; version=0.0.4; charset=utf-8"


class Snapshot:
    """The last status, its leases, and the counters behind it."""

    def __init__(self, figures: Figures) -> None:
        self.status: dict[str, Any] = {}
        self.leases: list[dict[str, Any]] = []
        self.figures = figures


class Metrics(Collector):
    """Turns a snapshot into metric families."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """Every family. Base units; labels are bounded: GPUs, pools, states, causes."""
        status = self._snapshot.status
        if not status:
            return
        yield from self._gpus(status["gpus"])
        yield from self._node(status)
        yield from self._leases(self._snapshot.leases)
        yield from self._durations()

    def _gpus(self, gpus: Iterable[dict[str, Any]]) -> Iterator[Metric]:
        by_state = GaugeMetricFamily("ema_lent_bytes", "Bytes lent from a GPU, by state.", labels=["gpu", "state"])
        free = GaugeMetricFamily("ema_gpu_free_bytes", "Bytes that the driver shows free.", labels=["gpu"])
        total = GaugeMetricFamily("ema_gpu_memory_bytes", "Bytes that the GPU has.", labels=["gpu"])
        healthy = GaugeMetricFamily("ema_gpu_healthy", "1 if the GPU may lend.", labels=["gpu"])
        short = CounterMetricFamily(
            "ema_headroom_shortfall_seconds", "Seconds with less than the headroom free while lending.", labels=["gpu"]
        )
        leaked = GaugeMetricFamily(
            "ema_leaked_bytes", "Bytes given back that the driver still shows in use.", labels=["gpu"]
        )
        for gpu in gpus:
            label = [gpu["id"]]
            for state, size in gpu["states"].items():
                by_state.add_metric([*label, state], size)
            if gpu["free"] is not None:
                free.add_metric(label, gpu["free"])
            total.add_metric(label, gpu["total"])
            healthy.add_metric(label, 0 if gpu["sick"] or gpu["skipped"] else 1)
            short.add_metric(label, gpu["shortfall_seconds"])
            leaked.add_metric(label, gpu["leaked"])
        yield from (by_state, free, total, healthy, short, leaked)

    def _node(self, status: dict[str, Any]) -> Iterator[Metric]:
        counted = status["counted"]
        yield GaugeMetricFamily(
            "ema_host_held_bytes", "Host memory held for chunks and copies.", status["host"]["held"]
        )
        yield GaugeMetricFamily("ema_leases", "Open leases.", status["leases"])
        yield GaugeMetricFamily("ema_queue_length", "Leases that wait for memory.", len(status["queue"]))
        yield GaugeMetricFamily("ema_barred_pairs", "Claimed paths that failed their test.", len(status["barred"]))
        yield GaugeMetricFamily("ema_overdue_bytes", "Bytes that must leave and cannot.", counted["overdue_bytes"])
        moved = CounterMetricFamily("ema_moved_bytes", "Lent bytes that changed place.", labels=["pool"])
        for pool, size in counted["moved_bytes"].items():
            moved.add_metric([pool], size)
        yield moved
        yield CounterMetricFamily("ema_lost_bytes", "Bytes that went with their GPU.", counted["lost_bytes"])
        yield CounterMetricFamily("ema_ledger_repeats", "Messages that asked for what was done.", counted["repeats"])

    def _leases(self, leases: Iterable[dict[str, Any]]) -> Iterator[Metric]:
        borrowed: dict[str, int] = {}
        waited: dict[str, float] = {}
        stepped: dict[str, float] = {}
        for lease in leases:
            pool = lease["pool"]
            borrowed[pool] = borrowed.get(pool, 0) + sum(lease["held"].values())
            waited[pool] = waited.get(pool, 0.0) + lease["waited_seconds"]
            stepped[pool] = stepped.get(pool, 0.0) + lease["step_seconds"]
        for name, help_text, values in (
            ("ema_borrowed_bytes", "Bytes held by borrowers.", borrowed),
            ("ema_exposed_wait_seconds", "Seconds that live leases waited for fetches.", waited),
            ("ema_step_seconds", "Seconds of steps of live leases.", stepped),
        ):
            family = GaugeMetricFamily(name, help_text, labels=["pool"])
            for pool, value in values.items():
                family.add_metric([pool], value)
            yield family

    def _durations(self) -> Iterator[Metric]:
        figures = self._snapshot.figures
        family = HistogramMetricFamily(
            "ema_reclaim_duration_seconds", "From decision until the bytes were free.", labels=["cause", "kind"]
        )
        for (cause, clean), durations in list(figures.reclaims.items()):
            labels = [cause.value, "clean" if clean else "dirty"]
            family.add_metric(labels, _buckets(durations.counts), durations.total)
        yield family
        plans = HistogramMetricFamily("ema_plan_duration_seconds", "Time to make a plan.")
        plans.add_metric([], _buckets(figures.plans.counts), figures.plans.total)
        yield plans


def _buckets(counts: list[int]) -> list[tuple[str, float]]:
    bounds = [*map(str, BUCKETS), "+Inf"]
    total = 0
    found: list[tuple[str, float]] = []
    for bound, count in zip(bounds, list(counts), strict=True):
        total += count
        found.append((bound, total))
    return found


class Pages:
    """`/metrics`, `/healthz` (the process serves) and `/readyz` (it can lend), on one address."""

    def __init__(self, host: str, port: int, snapshot: Snapshot) -> None:
        registry = CollectorRegistry()
        registry.register(Metrics(snapshot))

        class Page(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/metrics":
                    self._reply(200, generate_latest(registry))
                elif self.path == "/healthz":
                    self._reply(200, b"ok\n")
                elif self.path == "/readyz":
                    trouble = snapshot.status.get("trouble", "it is starting")
                    self._reply(503 if trouble else 200, (trouble or "ok").encode() + b"\n")
                else:
                    self._reply(404, b"there are /metrics, /healthz and /readyz\n")

            def _reply(self, code: int, body: bytes) -> None:
                self.send_response(code)
                self.send_header("Content-Type", CONTENT)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
                """A scrape is no news."""

        self._server = ThreadingHTTPServer((host, port), Page)
        self._server.daemon_threads = True
        self.address: tuple[str, int] = self._server.server_address[:2]  # type: ignore[assignment]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.2,), name="ema-pages", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(2.0)
