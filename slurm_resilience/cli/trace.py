"""The incidents of a run as OpenTelemetry traces: an incident is a trace, its phases are the spans.

    slurm-resilience trace RUN -o incidents.json                    OTLP in JSON, for a collector that reads files
    slurm-resilience trace RUN --endpoint http://host:4318/v1/traces    by OTLP/HTTP, to a collector, Jaeger or Tempo

RUN is a run folder or a job id.  No SDK is needed; what was sent before keeps its identity, so it may be sent again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from slurm_resilience.cli import which_run
from slurm_resilience.errors import ConfigError, ExitCode

_TIMEOUT_S = 30.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("run", metavar="RUN", help="a run folder or a job id")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write it there (default: print it)")
    parser.add_argument("--endpoint", metavar="URL", help="post it to this OTLP/HTTP address, which ends in /v1/traces")
    parser.add_argument("--json", action="store_true", help="print one JSON document, as without any option")


def execute(args: argparse.Namespace) -> int:
    """Make it, and bring it where it shall go."""
    from slurm_resilience._atomic import write_output
    from slurm_resilience.observe.events import FILE_NAME, read_events
    from slurm_resilience.observe.incidents import Incidents
    from slurm_resilience.observe.traces import document

    folder, _ = which_run.find(args.run)
    if not (folder / FILE_NAME).exists():
        raise ConfigError(
            f"There is nothing to trace in {folder}",
            evidence=f"{folder / FILE_NAME} does not exist",
            remedy="give the folder that `slurm-resilience run` names in its first line, once the run has begun",
        )
    incidents = Incidents.of(read_events(folder))
    made = document(_names(folder), incidents)
    if args.endpoint:
        _post(args.endpoint, made)
    if args.output:
        try:
            write_output(args.output, json.dumps(made) + "\n")
        except OSError as error:
            raise ConfigError(f"{args.output} cannot be written", evidence=f"{type(error).__name__}: {error}") from error
    if args.endpoint or args.output:
        places = " and ".join(str(place) for place in (args.endpoint, args.output) if place)
        print(f"{len(incidents)} incidents -> {places}")
    else:
        print(json.dumps(made))
    return int(ExitCode.OK)


def _names(folder: Path) -> dict[str, str]:
    """What names the run."""
    from slurm_resilience.observe.events import read_events

    names = {"folder": str(folder.absolute())}
    for event in read_events(folder):
        if event["event"] == "run_started":
            names["run_id"] = str(event.get("run_id", ""))
        if event["event"] == "allocation_started":
            names["job_id"] = str(event.get("job_id", ""))
            break
    return names


def _post(url: str, made: dict[str, Any]) -> None:
    import urllib.error
    import urllib.request

    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--endpoint {url} is no http(s) URL", remedy="write it like http://localhost:4318/v1/traces")
    asked = urllib.request.Request(url, json.dumps(made).encode(), {"Content-Type": "application/json"}, method="POST")  # noqa: S310
    try:
        with urllib.request.urlopen(asked, timeout=_TIMEOUT_S) as answer:  # noqa: S310, http(s) only, see above
            taken = answer.read()
    except urllib.error.HTTPError as error:
        said = error.read()[:300].decode(errors="replace")
        raise ConfigError(
            f"{url} did not take the traces", evidence=f"it answered {error.code}: {said}",
            remedy="the address of a collector ends in /v1/traces, its port is mostly 4318",
        ) from error  # fmt: skip
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{url} cannot be reached", evidence=str(getattr(error, "reason", error)),
            remedy="is a collector there, with its OTLP/HTTP receiver on?",
        ) from error  # fmt: skip
    try:
        refused = json.loads(taken or b"{}").get("partialSuccess") or {}
    except (ValueError, AttributeError):
        refused = {}
    if refused.get("rejectedSpans") not in (None, 0, "0"):
        raise ConfigError(f"{url} refused {refused['rejectedSpans']} spans", evidence=str(refused.get("errorMessage", "")))
