"""Metrics, notifications and the JSON log: from the run's events, off unless asked for, and never in the run's way."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from slurm_resilience.config import NotifyConfig, ObserveConfig
from slurm_resilience.errors import ConfigError
from slurm_resilience.observe import telemetry
from slurm_resilience.observe.events import EventWriter, read_events
from slurm_resilience.observe.json_lines import JsonNarrator, line
from slurm_resilience.observe.notify import Notifier, address
from slurm_resilience.observe.run_metrics import METRICS, RunMetrics
from slurm_resilience.observe.telemetry import Telemetry
from tests.unit.observe import a_run

PATIENCE_S = 60.0
ABOUT = {"run_id": "gpt-1a2b3c", "run_dir": "/r", "job_id": "7"}


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)
    return found


def samples(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Name → labels besides the run → value."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("run") == "gpt-1a2b3c"
            found.setdefault(sample.name, {})[tuple(sorted(labels.items()))] = sample.value
    return found


def exposition(metrics: RunMetrics) -> str:
    from prometheus_client import generate_latest

    return generate_latest(metrics.registry()).decode()


# --- metrics -----------------------------------------------------------------------------------------------------------------


def test_figures_are_those_of_the_events(tmp_path: Path) -> None:
    metrics = RunMetrics("gpt-1a2b3c")
    for event in read_events(a_run.write(tmp_path / "run")):
        metrics.apply(event)
        metrics.apply(event)  # a supervisor that restarts reads again what it wrote
    found = {name.removeprefix("slurm_resilience_run_"): rows for name, rows in samples(exposition(metrics)).items()}
    plain = {name: rows[()] for name, rows in found.items() if () in rows}
    assert plain["attempt"] == 4
    assert plain["restart"] == 1
    assert plain["ranks"] == 4
    assert plain["step"] == 260
    assert plain["checkpoints_committed_total"] == 14
    assert plain["checkpoints_quarantined_total"] == 1
    assert plain["steps_lost_total"] == 30
    assert plain["requeues_total"] == 1
    assert found["doing"][(("doing", "complete"),)] == 1
    assert sum(found["doing"].values()) == 1
    assert found["incidents_total"] == {(("cause", cause),): 1 for cause in ("rank_crash", "node_lost", "preemption")}
    lost = {labels: value for labels, value in found["recovery_seconds_bucket"].items() if ("cause", "node_lost") in labels}
    assert lost[(("cause", "node_lost"), ("le", "5.0"))] == 0
    assert lost[(("cause", "node_lost"), ("le", "10.0"))] == lost[(("cause", "node_lost"), ("le", "+Inf"))] == 1


def test_every_metric_has_its_type_and_a_sentence(tmp_path: Path) -> None:
    metrics = RunMetrics("gpt-1a2b3c")
    for event in read_events(a_run.write(tmp_path / "run")):
        metrics.apply(event)
    told = {family.name: family for family in text_string_to_metric_families(exposition(metrics))}
    assert {name: told[f"slurm_resilience_run_{name.removesuffix('_total')}"].type for name in METRICS} == {
        name: metric.kind for name, metric in METRICS.items()
    }
    assert all(family.documentation for family in told.values())


@pytest.fixture
def said() -> list[str]:
    return []


def told_of(run_dir: Path, config: ObserveConfig, said: list[str], **more: Any) -> Telemetry:
    made = Telemetry(run_dir, "gpt-1a2b3c", "7", config, said.append)
    made.start()
    return made


def test_the_endpoint_is_on_the_loopback_interface_and_follows_the_run(tmp_path: Path, said: list[str]) -> None:
    """Events of earlier allocations count, too."""
    run_dir = a_run.write(tmp_path / "run")
    watching = told_of(run_dir, ObserveConfig(metrics_port=0), said)
    writer = EventWriter(run_dir, restart=2)
    watching.take(writer.write("checkpoint_committed", step=300, name="c", seconds=1.0, bytes=5))
    watching.take(writer.write("requeue_done"))
    writer.close()
    watching.leave()
    (url,) = [text.partition(": ")[2] for text in said]
    assert url.startswith("http://127.0.0.1:")
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        found = samples(answer.read().decode())
    assert found["slurm_resilience_run_checkpoints_committed_total"][()] == 15
    assert found["slurm_resilience_run_requeues_total"][()] == 2


def test_a_port_that_is_taken_costs_the_metrics_and_nothing_else(tmp_path: Path, said: list[str]) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as other:
        watching = told_of(tmp_path, ObserveConfig(metrics_port=other.server_address[1]), said)
        watching.take({"seq": 1, "t": 1.0, "attempt": 0, "restart": 0, "event": "run_started"})
        watching.leave()
    assert [text for text in said if "the run goes on without" in text]


def test_the_textfile_is_whole_and_one_that_cannot_be_written_is_said_once(tmp_path: Path, said: list[str]) -> None:
    folder = tmp_path / "collector"
    folder.mkdir()
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    config = ObserveConfig(metrics_file=str(folder / "run.prom"))
    telemetry.check(config)
    writer = EventWriter(run_dir, restart=0)
    watching = told_of(run_dir, config, said)
    watching.take(writer.write("run_started", run_id="x", argv=[]))
    watching.leave()
    assert samples((folder / "run.prom").read_text())["slurm_resilience_run_attempt"][()] == 0
    assert os.listdir(folder) == ["run.prom"]
    (folder / "run.prom").unlink()
    folder.rmdir()
    for _ in range(2):
        watching.take(writer.write("agent_warm", node="n1", warm=True))
        watching.leave()
    writer.close()
    (complaint,) = said
    assert "metrics cannot be written" in complaint


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"metrics_file": "/tmp/x.txt"}, "textfile collector reads"),
        ({"metrics_file": "/nowhere/x.prom"}, "no folder that you may write into"),
        ({"notify": {"command": "x", "events": "run_faild"}}, "did you mean 'run_failed'"),
        ({"notify": {"webhook_file": "/nowhere"}}, "cannot be read"),
    ],
)
def test_what_could_never_work_is_refused_at_the_start(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace("(", "\\(")):
        telemetry.check(ObserveConfig.model_validate(config))


# --- notifications -----------------------------------------------------------------------------------------------------------


def events(run_dir: Path) -> Iterator[dict[str, Any]]:
    yield from read_events(a_run.write(run_dir))


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def make(body: str) -> str:
        path = tmp_path.parent / f"{tmp_path.name.encode().hex()[:12]}.sh"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return str(path)

    return make


def notify(config: NotifyConfig, run_dir: Path, said: list[str]) -> Notifier:
    made = Notifier(config, ABOUT, said.append)
    made.start()
    for event in events(run_dir):
        made.take(event)
    assert made.flush(within_s=PATIENCE_S)
    return made


def test_a_command_gets_each_chosen_event_on_stdin(tmp_path: Path, said: list[str], script: Callable[[str], str]) -> None:
    out = tmp_path.parent / "told"
    command = script(f"cat >> {out}; echo >> {out}; echo $RESILIENCE_EVENT >> {out}.names")
    notify(NotifyConfig(command=command, every_s=0), tmp_path / "run", said)
    told = [json.loads(text) for text in out.read_text().splitlines()]
    assert [each["event"] for each in told] == [
        "fault_detected", "recovered", "fault_detected", "recovered", "checkpoint_quarantined", "recovered", "run_completed",
    ]  # fmt: skip
    assert told[2]["text"] == "fault: node_lost (n3): silent for 4.1 s"
    assert told[3]["text"].startswith("recovered from node_lost (n3) in 5.33 s")
    assert told[0]["run_id"] == "gpt-1a2b3c"
    assert told[2]["fields"]["node"] == "n3"
    assert Path(f"{out}.names").read_text().splitlines()[0] == "fault_detected"
    assert said == []


def test_one_message_of_each_kind_in_a_while_and_the_next_says_how_many_were_held_back(
    tmp_path: Path, said: list[str], script: Callable[[str], str]
) -> None:
    out = tmp_path.parent / "told"
    config = NotifyConfig(command=script(f"cat >> {out}; echo >> {out}"), every_s=3600, events=("fault_detected",))
    made = notify(config, tmp_path / "run", said)
    assert len(out.read_text().splitlines()) == 1
    made._told_at.clear()  # an hour later
    made.take({"t": 1.0, "attempt": 9, "restart": 0, "event": "fault_detected", "cause": "hang"})
    assert made.flush(within_s=PATIENCE_S)
    assert json.loads(out.read_text().splitlines()[1])["held_back"] == 1


@pytest.mark.parametrize(
    ("body", "says"),
    [("exit 3", "ended with 3"), ("sleep 1000", "took more than 0.2 s and was killed"), (None, "No such file")],
)
def test_what_fails_or_hangs_is_said_once_and_waited_for_by_nobody(
    tmp_path: Path, said: list[str], script: Callable[[str], str], body: str | None, says: str
) -> None:
    command = script(body) if body is not None else "/nowhere/command"
    notify(NotifyConfig(command=command, every_s=0, timeout_s=0.2), tmp_path / "run", said)
    (complaint,) = said
    assert says in complaint
    assert complaint.endswith("the run goes on")


def test_too_many_that_wait_are_counted(said: list[str]) -> None:
    made = Notifier(NotifyConfig(command="true", every_s=0), ABOUT, said.append)  # nobody takes them
    for number in range(300):
        made.take({"t": 1.0, "seq": number, "attempt": 0, "restart": 0, "event": "run_failed",
                   "cause": "oom", "reason": "x", "exit_code": 85})  # fmt: skip
    assert made._lost == 300 - 256


class Answering(http.server.BaseHTTPRequestHandler):
    """Keeps what is posted; answers with the server's code."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.heard.append((self.path, dict(self.headers), json.loads(body)))  # type: ignore[attr-defined]
        self.send_response(self.server.code)  # type: ignore[attr-defined]
        self.send_header("Location", "http://127.0.0.1:1/elsewhere")
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def hook() -> Iterator[Any]:
    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    server.heard, server.code = [], 204
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def secret_file(path: Path, port: int) -> Path:
    path.write_text(f"http://127.0.0.1:{port}/T0P/SECRET\nAuthorization: Bearer s3cr3t\n")
    path.chmod(0o600)
    return path


def test_a_webhook_gets_json_with_headers_from_the_users_own_file(tmp_path: Path, said: list[str], hook: Any) -> None:
    file = secret_file(tmp_path / "hook", hook.server_address[1])
    notify(NotifyConfig(webhook_file=str(file), every_s=0, events=("recovered",)), tmp_path / "run", said)
    assert [body["event"] for _, _, body in hook.heard] == ["recovered"] * 3
    path, headers, body = hook.heard[0]
    assert (path, headers["Authorization"], headers["Content-Type"]) == ("/T0P/SECRET", "Bearer s3cr3t", "application/json")
    assert "s3cr3t" not in json.dumps(body)
    assert said == []


@pytest.mark.parametrize("code", [500, 302])
def test_a_webhook_that_refuses_or_sends_elsewhere_is_said_without_its_address(
    tmp_path: Path, said: list[str], hook: Any, code: int
) -> None:
    hook.code = code
    file = secret_file(tmp_path / "hook", hook.server_address[1])
    notify(NotifyConfig(webhook_file=str(file), every_s=0), tmp_path / "run", said)
    (complaint,) = said
    assert f"the webhook answered {code}" in complaint
    assert "SECRET" not in complaint
    assert "s3cr3t" not in complaint


def test_nobody_there(tmp_path: Path, said: list[str]) -> None:
    file = secret_file(tmp_path / "hook", 1)
    notify(NotifyConfig(webhook_file=str(file), every_s=0), tmp_path / "run", said)
    (complaint,) = said
    assert "Connection refused" in complaint
    assert "SECRET" not in complaint


def test_a_file_that_others_can_read_is_no_place_for_a_secret(tmp_path: Path) -> None:
    file = secret_file(tmp_path / "hook", 1)
    assert address(file)[1] == {"Authorization": "Bearer s3cr3t"}
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others") as refused:
        address(file)
    assert "s3cr3t" not in str(refused.value)
    file.write_text("")
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="is empty"):
        address(file)


# --- the JSON log ------------------------------------------------------------------------------------------------------------


def test_each_line_is_an_object_with_the_sentence_and_the_facts(tmp_path: Path) -> None:
    narrator = JsonNarrator(run_id="gpt-1a2b3c", job_id="7")
    run = [event for event in events(tmp_path / "run") if event["event"] != "attempt_started"]
    told = [json.loads(text) for event in run for text in narrator.lines(event)]
    lost = next(each for each in told if each["event"] == "agent_lost")
    assert (lost["level"], lost["message"], lost["node"], lost["run_id"]) == (
        "error", "n3 is lost: silent for 4.1 s", "n3", "gpt-1a2b3c",
    )  # fmt: skip
    assert lost["time"].startswith("2027-01-15T08:00:2")
    assert json.loads(line("hello", t=1.5)) == {"time": "1970-01-01T00:00:01.500Z", "level": "info", "message": "hello"}


def test_a_run_that_is_asked_for_all_of_it(tmp_path: Path) -> None:
    """The supervisor itself, from the command line; the ranks are no Python, so it takes seconds."""
    run_dir, prom = tmp_path / "run", tmp_path / "run.prom"
    told = tmp_path.parent / "told"
    command = f"sh -c 'cat >> \"$0\"' {str(told)!r}"
    done = subprocess.run(
        [sys.executable, "-m", "slurm_resilience", "run", "--local", "1", "--cold", "--run-dir", run_dir,
         "--log-format", "json", "--metrics-port", "0", "--set", f"observe.metrics_file={json.dumps(str(prom))}", "--set",
         f"observe.notify.command={json.dumps(command)}", "--", "sh", "-c", "true"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    log = [json.loads(text) for text in done.stdout.splitlines()]
    assert log[0]["run_dir"] == str(run_dir)
    assert any(each["message"].startswith("metrics: http://127.0.0.1:") for each in log)
    assert log[-1]["event"] == "run_completed"
    assert (run_dir / "logs" / "supervisor.log").read_text() == done.stdout
    assert 'slurm_resilience_run_doing{doing="complete",' in prom.read_text()
    assert json.loads(told.read_text())["event"] == "run_completed"
