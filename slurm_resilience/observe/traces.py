"""A run's incidents as OpenTelemetry traces: an incident is a trace, its phases are the spans.

The document is OTLP in its JSON encoding, which collectors take by HTTP and from files; no SDK is needed.  Identities come from
the run and the incident, so that sending one again adds nothing new.
Source: https://opentelemetry.io/docs/specs/otlp/ and the trace.proto of opentelemetry-proto 1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slurm_resilience import __version__
from slurm_resilience.observe.incidents import PHASES, Incident

_OK, _ERROR = 1, 2
_INTERNAL = 1


def document(run: Mapping[str, str], incidents: Iterable[Incident]) -> dict[str, Any]:
    """The OTLP document.  ``run``: run_id, job_id and what else names the run; it becomes the resource's attributes."""
    spans = [span for incident in incidents for span in _spans(run.get("run_id", ""), incident)]
    resource = {"service.name": "slurm-resilience", "service.version": __version__, **{f"run.{k}": v for k, v in run.items()}}
    scope = {"name": "slurm_resilience.incidents", "version": __version__}
    return {
        "resourceSpans": [{"resource": {"attributes": _attributes(resource)}, "scopeSpans": [{"scope": scope, "spans": spans}]}]
    }


def _spans(run_id: str, incident: Incident) -> Sequence[dict[str, Any]]:
    """The root, from the fault to the last phase that is known, and a span for each phase: from the one before to it."""
    name = f"{run_id}/{incident.attempt}/{incident.t:.6f}"
    trace, root = _identity(name, 32), _identity(f"{name}/root", 16)
    reached = sorted(
        ((seconds, PHASES.index(phase), phase) for phase, seconds in incident.phases.items() if phase != "fault"),
    )
    end = reached[-1][0] if reached else 0.0
    about = {
        "cause": incident.cause, "node": incident.node, "rank": incident.rank, "attempt": incident.attempt,
        "restart": incident.restart, "detail": incident.detail, "step": incident.step, "resumed_step": incident.resumed_step,
        "steps_lost": incident.steps_lost, "recovered": incident.recovered,
    }  # fmt: skip
    status = {"code": _OK} if incident.recovered or not incident.fault else {"code": _ERROR, "message": incident.detail}
    spans = [_span(trace, root, "", f"incident {incident.cause}", incident.t, incident.t + end, about, status)]
    before = 0.0
    for seconds, _, phase in reached:
        identity = _identity(f"{name}/{phase}", 16)
        spans.append(_span(trace, identity, root, phase, incident.t + before, incident.t + seconds, {}, {"code": _OK}))
        before = seconds
    return spans


def _span(
    trace: str,
    identity: str,
    parent: str,
    name: str,
    start: float,
    end: float,
    about: Mapping[str, Any],
    status: Mapping[str, Any],
) -> dict[str, Any]:
    parted = {"parentSpanId": parent} if parent else {}
    return {
        "traceId": trace, "spanId": identity, **parted, "name": name, "kind": _INTERNAL,
        "startTimeUnixNano": str(int(start * 1e9)), "endTimeUnixNano": str(int(end * 1e9)),
        "attributes": _attributes(about), "status": dict(status),
    }  # fmt: skip


def _identity(text: str, digits: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


def _attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items() if value not in (None, "")]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    return {"stringValue": str(value)}
