"""Where is the acting supervisor of a run, and which secret proves it?"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

from slurm_resilience._atomic import read_json, write_json_atomic
from slurm_resilience.runtime.message import WIRE_VERSION, WireError

SUPERVISOR_FILE = "supervisor.json"


@dataclass(frozen=True)
class SupervisorAddress:
    """``supervisor.json``: where the acting supervisor of a run listens, and the secret that both sides prove to know.

    ``host`` is a numeric address, because looking a name up could block an agent's loop for seconds.  ``others``: further
    addresses of the same host, tried in turn.  ``epoch`` grows with each supervisor of the run.  ``node``: its name in Slurm,
    "" for a local run.  ``started``: when process ``pid`` began, in clock ticks since the boot; 0 from an older release.
    """

    epoch: int
    host: str
    port: int
    token: str
    pid: int
    boot_id: str
    job_id: str
    restart_count: int
    others: list[str] = field(default_factory=list)
    node: str = ""
    started: int = 0

    def write(self, run_dir: str | Path) -> None:
        """Publish it: whole or not at all, readable by the owner alone.  Raises :class:`WireError` for a host name."""
        import ipaddress

        for host in (self.host, *self.others):
            try:
                ipaddress.ip_address(host)
            except ValueError:
                raise WireError(
                    f"The supervisor's address must be numeric, not {host!r}",
                    evidence="an agent never looks names up",
                    remedy="pass the address of the interface that the nodes reach",
                ) from None
        write_json_atomic(Path(run_dir) / SUPERVISOR_FILE, {"v": WIRE_VERSION, **dataclasses.asdict(self)}, mode=0o600)

    @classmethod
    def read(cls, run_dir: str | Path) -> SupervisorAddress | None:
        """The published address, None when there is none (yet).

        Raises :class:`WireError` when it is not ours to read: torn, of a newer release, or not numeric; OSError when the
        folder cannot be read.
        """
        import ipaddress

        path = Path(run_dir) / SUPERVISOR_FILE
        try:
            raw = read_json(path)
            if raw is None:
                return None
            if raw["v"] > WIRE_VERSION:
                raise WireError(
                    f"{path} was written by a newer release", evidence=f"version {raw['v']}, we know {WIRE_VERSION}"
                )
            found = cls(**{item.name: raw[item.name] for item in dataclasses.fields(cls) if item.name in raw})
            for host in (found.host, *found.others):
                ipaddress.ip_address(host)
        except (ValueError, KeyError, TypeError) as error:
            raise WireError(
                f"{path} does not say where the supervisor is", evidence=f"{type(error).__name__}: {error}"
            ) from None
        return found
