"""Faults of the controller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slurm_resilience.errors import SandboxMisuse
from slurm_resilience.sandbox import lifecycle, services
from slurm_resilience.sandbox.layout import CONTROL
from slurm_resilience.sandbox.state import locked

if TYPE_CHECKING:
    from slurm_resilience.sandbox.cluster import Sandbox


def kill_controller(sandbox: Sandbox, _targets: list[str], _options: dict[str, Any]) -> dict[str, Any]:
    """slurmctld is dead, as by kill -9; jobs run on."""
    with locked(sandbox.layout):
        state = lifecycle.existing(sandbox.layout)
        victim = services.kill(state.hosts[CONTROL], "slurmctld")
    return {"pid": victim.pid}


def restart_controller(sandbox: Sandbox, _targets: list[str], _options: dict[str, Any]) -> dict[str, Any]:
    """slurmctld serves again, with the state that it saved."""
    with locked(sandbox.layout):
        state = lifecycle.existing(sandbox.layout)
        control = state.hosts[CONTROL]
        if "slurmctld" in services.running(control):
            raise SandboxMisuse("slurmctld runs already", evidence=f"process {services.running(control)['slurmctld'].pid}")
        services.start_slurmctld(sandbox.layout, control)
        pid = services.running(control)["slurmctld"].pid
    return {"pid": pid}


def heal(sandbox: Sandbox) -> None:
    """Every daemon of the control host runs."""
    with locked(sandbox.layout):
        state = lifecycle.existing(sandbox.layout)
        services.start_missing(sandbox.layout, state.hosts[CONTROL], accounting=state.cluster.accounting)
