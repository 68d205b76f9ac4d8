"""Incidents as OpenTelemetry traces, in the JSON encoding of OTLP."""

from __future__ import annotations

import http.server
import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.cli import main
from slurm_resilience.errors import ExitCode
from tests.unit.observe import a_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return a_run.write(tmp_path / "run")


def test_an_incident_is_a_trace_and_its_phases_are_spans(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(run_dir)]) == ExitCode.OK
    (resource,) = json.loads(capsys.readouterr().out)["resourceSpans"]
    about = {each["key"]: each["value"]["stringValue"] for each in resource["resource"]["attributes"]}
    assert (about["service.name"], about["run.run_id"], about["run.job_id"]) == ("slurm-resilience", "gpt-1a2b3c", "4711")
    spans = resource["scopeSpans"][0]["spans"]
    roots = [span for span in spans if "parentSpanId" not in span]
    assert [span["name"] for span in roots] == ["incident rank_crash", "incident node_lost", "incident preemption"]
    assert len({span["traceId"] for span in roots}) == 3
    assert all(len(span["traceId"]) == 32 and len(span["spanId"]) == 16 for span in spans)
    lost = [span for span in spans if span["traceId"] == roots[1]["traceId"]]
    assert [span["name"] for span in lost[1:]] == [
        "detected", "stopped", "launched", "loaded", "verified", "first_step", "caught_up",
    ]  # fmt: skip
    assert all(span["parentSpanId"] == lost[0]["spanId"] for span in lost[1:])
    times = [(int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])) for span in lost]
    assert times[0][0] == times[1][0]
    assert times[0][1] == times[-1][1]
    assert all(before[1] == after[0] for before, after in itertools.pairwise(times[1:]))
    attributes = {each["key"]: next(iter(each["value"].values())) for each in lost[0]["attributes"]}
    assert (attributes["cause"], attributes["node"], attributes["steps_lost"]) == ("node_lost", "n3", "10")
    assert lost[0]["status"] == {"code": 1}


def test_the_same_again_has_the_same_identities(run_dir: Path, tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        assert main(["trace", str(run_dir), "-o", str(tmp_path / name)]) == ExitCode.OK
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


class Collector(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.heard.append((self.path, self.headers["Content-Type"], json.loads(body)))  # type: ignore[attr-defined]
        code, answer = self.server.answer  # type: ignore[attr-defined]
        self.send_response(code)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Any]:
    server: Any = http.server.HTTPServer(("127.0.0.1", 0), Collector)
    server.heard, server.answer = [], (200, b"{}")
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_collector_gets_it_by_http(run_dir: Path, collector: Any) -> None:
    url = f"http://127.0.0.1:{collector.server_address[1]}/v1/traces"
    assert main(["trace", str(run_dir), "--endpoint", url]) == ExitCode.OK
    ((path, kind, body),) = collector.heard
    assert (path, kind) == ("/v1/traces", "application/json")
    assert len(body["resourceSpans"][0]["scopeSpans"][0]["spans"]) > 3


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((404, b"not here"), "it answered 404: not here"),
        ((200, b'{"partialSuccess": {"rejectedSpans": "2", "errorMessage": "too old"}}'), "refused 2 spans"),
    ],
)
def test_a_collector_that_refuses(
    run_dir: Path, collector: Any, answer: tuple[int, bytes], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    collector.answer = answer
    url = f"http://127.0.0.1:{collector.server_address[1]}/"
    assert main(["trace", str(run_dir), "--endpoint", url]) == ExitCode.CONFIG_ERROR
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--endpoint", "http://127.0.0.1:1/v1/traces"], "cannot be reached"),
        (["--endpoint", "localhost:4318"], "is no http(s) URL"),
        (["-o", "/nowhere/x.json"], "cannot be written"),
    ],
)
def test_what_does_not_work_is_said(run_dir: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(run_dir), *words]) == ExitCode.CONFIG_ERROR
    assert says in capsys.readouterr().err
