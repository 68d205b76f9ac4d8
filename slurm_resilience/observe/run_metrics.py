"""What a run's events say in numbers, for Prometheus.  The names in :data:`METRICS` stay: dashboards are built on them."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from slurm_resilience.observe.incidents import faults, steps_done_again
from slurm_resilience.observe.standing import Observer

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_Event = Mapping[str, Any]
_PREFIX = "slurm_resilience_run_"
BUCKETS_S = (1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
_DOING = ("queued", "starting", "launching", "loading", "training", "saving", "stopping", "deciding", "requeueing",
          "complete", "failed")  # fmt: skip
_AGENT = ("awaited", "here", "warm", "lost", "gone")


class Metric(NamedTuple):
    """Type (gauge, counter or histogram), labels besides ``run``, and one sentence."""

    kind: str
    labels: tuple[str, ...]
    says: str


METRICS: dict[str, Metric] = {
    "info": Metric("gauge", ("job_id",), "1; its labels name the run"),
    "doing": Metric("gauge", ("doing",), "1 for what the run does now, 0 for everything else"),
    "attempt": Metric("gauge", (), "number of the current attempt"),
    "restart": Metric("gauge", (), "Slurm's restart count of the job"),
    "ranks": Metric("gauge", (), "ranks of the current attempt"),
    "nodes": Metric("gauge", ("agent",), "nodes of the allocation, by how their agents are"),
    "step": Metric("gauge", (), "the newest step that was reported"),
    "step_seconds": Metric("gauge", (), "seconds a step, since the attempt's first step"),
    "loss": Metric("gauge", (), "the loss of the newest report that has one"),
    "last_report_timestamp_seconds": Metric("gauge", (), "when a step was last reported, on the wall clock"),
    "last_event_timestamp_seconds": Metric("gauge", (), "when the supervisor last wrote a fact, on the wall clock"),
    "checkpoints_committed_total": Metric("counter", (), "checkpoints that were committed"),
    "checkpoints_failed_total": Metric("counter", (), "saves that were given up"),
    "checkpoints_quarantined_total": Metric("counter", (), "checkpoints that are not to be trusted"),
    "checkpoint_step": Metric("gauge", (), "step of the newest committed checkpoint"),
    "checkpoint_timestamp_seconds": Metric("gauge", (), "when it was committed, on the wall clock"),
    "checkpoint_bytes": Metric("gauge", (), "its size"),
    "checkpoint_save_seconds": Metric("gauge", (), "how long saving it took"),
    "checkpoint_stall_seconds": Metric("gauge", (), "for how long training stood still for it"),
    "incidents_total": Metric("counter", ("cause",), "faults, by cause; what was ended on purpose is none"),
    "recovery_seconds": Metric("histogram", ("cause",), "seconds from the fault to the first step after it"),
    "steps_lost_total": Metric("counter", (), "steps that had to be done again"),
    "requeues_total": Metric("counter", (), "times that Slurm queued the job again"),
    "stragglers": Metric("gauge", (), "ranks that are slower than the others now"),
}


@dataclass
class _Histogram:
    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    total_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect.bisect_left(BUCKETS_S, seconds)] += 1
        self.total_s += seconds

    def buckets(self) -> list[tuple[str, float]]:
        bounds, running, out = [*map(str, BUCKETS_S), "+Inf"], 0, []
        for bound, count in zip(bounds, self.counts, strict=True):
            running += count
            out.append((bound, float(running)))
        return out


class RunMetrics:
    """A fold over events.  ``apply`` and ``rows`` may be called from different threads."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self._observer = Observer()
        self._seq = 0
        self._incidents: dict[str, int] = {}
        self._recoveries: dict[str, _Histogram] = {}
        self._told: set[int] = set()
        self._stall_s: float | None = None
        self._quarantined = self._requeues = 0
        self._slow: set[Any] = set()

    def apply(self, event: _Event) -> None:
        """Take one more event into account; one that was taken before changes nothing."""
        seq = event.get("seq")
        if isinstance(seq, int):
            if seq <= self._seq:
                return
            self._seq = seq
        self._observer.apply(event)
        match event["event"]:
            case "checkpoint_committed":
                stall = event.get("stall_s")
                self._stall_s = float(stall) if isinstance(stall, int | float) else None
            case "checkpoint_quarantined":
                self._quarantined += 1
            case "requeue_done":
                self._requeues += 1
            case "straggler_found":
                self._slow.add(event.get("rank"))
            case "straggler_recovered":
                self._slow.discard(event.get("rank"))
            case "attempt_started":
                self._slow.clear()
            case "first_step":
                self._recovered()

    def _recovered(self) -> None:
        for number, incident in enumerate(self._observer.standing.incidents):
            if number not in self._told and incident.recovered and incident.seconds is not None:
                self._told.add(number)
                self._recoveries.setdefault(incident.cause, _Histogram()).add(incident.seconds)

    def rows(self) -> Iterator[tuple[str, tuple[str, ...], float]]:
        """Name, label values and value of each gauge and counter; what nobody has said is left out."""
        now = self._observer.standing
        saved = now.newest
        plain: dict[str, float | None] = {
            "attempt": now.attempt, "restart": now.restart, "ranks": now.world, "step": now.step, "step_seconds": now.step_s,
            "loss": now.loss, "last_report_timestamp_seconds": now.step_at, "last_event_timestamp_seconds": now.last_event_at,
            "checkpoints_committed_total": now.committed, "checkpoints_failed_total": now.failed_saves,
            "checkpoints_quarantined_total": self._quarantined, "steps_lost_total": steps_done_again(now.incidents),
            "checkpoint_step": saved.step if saved else None, "checkpoint_timestamp_seconds": saved.t if saved else None,
            "checkpoint_bytes": saved.bytes if saved else None, "checkpoint_save_seconds": saved.seconds if saved else None,
            "checkpoint_stall_seconds": self._stall_s, "requeues_total": self._requeues, "stragglers": len(self._slow),
        }  # fmt: skip
        yield "info", (now.job_id,), 1.0
        yield from (("doing", (doing,), float(now.doing == doing)) for doing in _DOING)
        agents = [node.agent for node in list(now.nodes.values())]
        yield from (("nodes", (agent,), float(agents.count(agent))) for agent in _AGENT)
        yield from ((name, (), float(value)) for name, value in plain.items() if value is not None)
        causes: dict[str, int] = {}
        for incident in faults(list(now.incidents)):
            causes[incident.cause] = causes.get(incident.cause, 0) + 1
        yield from (("incidents_total", (cause,), float(count)) for cause, count in sorted(causes.items()))

    def registry(self) -> CollectorRegistry:
        """A registry of prometheus-client that has these metrics and nothing else."""
        from prometheus_client import CollectorRegistry

        made = CollectorRegistry()
        made.register(self)
        return made

    def collect(self) -> Iterator[Any]:
        """The metric families.  Called by prometheus-client."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        rows = list(self.rows())
        for name, metric in METRICS.items():
            full, labels = f"{_PREFIX}{name}", ["run", *metric.labels]
            family: Any
            if metric.kind == "histogram":
                family = HistogramMetricFamily(full, metric.says, labels=labels)
                for cause, seen in sorted(self._recoveries.items()):
                    family.add_metric([self.run_id, cause], buckets=seen.buckets(), sum_value=seen.total_s)
            else:
                kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                family = kind(full.removesuffix("_total") if metric.kind == "counter" else full, metric.says, labels=labels)
                for row, values, value in rows:
                    if row == name:
                        family.add_metric([self.run_id, *values], value)
            yield family
