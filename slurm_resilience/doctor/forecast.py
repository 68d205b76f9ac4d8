"""What will happen to a job here, in plain words and with the times: preemption, time limit, lost node, failed prolog."""

from __future__ import annotations

from dataclasses import dataclass, field

from slurm_resilience.doctor import preemption
from slurm_resilience.doctor.site import Site

# Measured on Slurm 22.05 in a cluster of four nodes, by an ordinary user.
ALONE_S = (4, 40)
ACTOR_S = 5
SEEN_S = 5
# How long after SlurmdTimeout a silent node was given up at last.
_GIVEN_UP_LATER_S = 113
_MARGIN_S = 4
DEFAULT_LEAD_S = 90


@dataclass(frozen=True)
class Forecast:
    """``event``: preemption, time_limit, node_lost or prolog_failure; ``seconds``: the times in the sentence, by name."""

    event: str
    says: str
    seconds: dict[str, float] = field(default_factory=dict)


def requeue_delay_s(site: Site) -> int:
    """How long Slurm by itself holds a requeued job back.  Source: job_mgr.c, cred_expire + 1; requeue_delay from 25.11."""
    if site.version >= (25, 11):
        own = site.parameters("SchedulerParameters").get("requeue_delay", "")
        if own.isdigit():
            return int(own)
    text = site.parameters("AuthInfo").get("cred_expire", "")
    return (int(text) if text.isdigit() else 120) + 1


def has_expediter(site: Site) -> bool:
    """Our EpilogSlurmctld hook is installed."""
    return "slurm-resilience" in site.config.get("EpilogSlurmctld", "")


def all_of(site: Site, *, lead_s: int = DEFAULT_LEAD_S) -> list[Forecast]:
    """The four forecasts, in order.  ``lead_s``: the job's --signal lead."""
    return [_preemption(site), _time_limit(site, lead_s), _node_lost(site), _prolog(site)]


def _back(site: Site) -> tuple[str, dict[str, float]]:
    if has_expediter(site):
        return f"the hook on the controller starts it again within {ACTOR_S} s where nodes are free", {"back_s": ACTOR_S}
    stock = requeue_delay_s(site)
    text = (
        f"where nodes are free it runs again after {ALONE_S[0]} to {ALONE_S[1]} s by itself (Slurm alone: {stock} s), "
        f"within {ACTOR_S} s with `slurm-resilience watch` on a login node"
    )
    return text, {"back_s": ALONE_S[1], "slurm_alone_s": stock}


def _preemption(site: Site) -> Forecast:
    ways = [way for way in preemption.of(site) if way.possible]
    if not ways:
        return Forecast("preemption", f"No job can preempt yours: {preemption.of(site)[0].decided_by}.")
    kill_wait = site.seconds("KillWait") or 30
    back, times = _back(site)
    says = []
    for way in ways:
        total = way.grace_s + kill_wait
        head = f"By {way.decided_by}: "
        if way.mode in ("REQUEUE", "CANCEL"):
            save = max(0, total - _MARGIN_S)
            grace = f"{way.grace_s} s of grace and then " if way.grace_s else ""
            says.append(
                f"{head}the ranks are warned at once and have {grace}{kill_wait} s, so a save must take less than {save} s; "
                f"{back}."
                + " Slurm cancels the job then; only because it requeues itself before does it come back."
                * (way.mode == "CANCEL")
            )
            times |= {"warned_s": 0, "grace_s": way.grace_s, "kill_wait_s": kill_wait, "save_s": save}
        else:
            says.append(f"{head}the job is stopped in memory (SIGSTOP) for as long as the other one runs.")
    return Forecast("preemption", " ".join(says), times)


def _time_limit(site: Site, lead_s: int) -> Forecast:
    kill_wait = site.seconds("KillWait") or 30
    limit = site.here.get("MaxTime", "UNLIMITED")
    back, times = _back(site)
    return Forecast(
        "time_limit",
        f"The limit may be up to {limit}. {lead_s} s before it (and up to 60 s earlier) the ranks are warned, save and end; "
        f"at the limit Slurm sends TERM, and KILL {kill_wait} s later. The job is requeued with its whole limit again; {back}.",
        times | {"lead_s": lead_s, "kill_wait_s": kill_wait},
    )


def _node_lost(site: Site) -> Forecast:
    timeout = site.seconds("SlurmdTimeout")
    ours = f"The agents notice within {SEEN_S} s, and training goes on on the other nodes"
    if timeout == 0:
        return Forecast("node_lost", f"{ours}. Slurm itself never notices: SlurmdTimeout is 0.", {"seen_s": SEEN_S})
    alone = (timeout or 300) + _GIVEN_UP_LATER_S
    return Forecast(
        "node_lost",
        f"{ours}. Slurm itself takes about {alone} s to give the node up, and {requeue_delay_s(site)} s more until the job may "
        "start again.",
        {"seen_s": SEEN_S, "slurm_notices_s": alone, "slurm_alone_s": alone + requeue_delay_s(site)},
    )


def _prolog(site: Site) -> Forecast:
    if not site.config.get("Prolog"):
        return Forecast("prolog_failure", "There is no prolog that could fail.")
    if "nohold_on_prolog_fail" in site.parameters("SchedulerParameters"):
        return Forecast("prolog_failure", "The node is drained and the job requeued; it starts elsewhere.")
    return Forecast(
        "prolog_failure",
        "The node is drained, the job is requeued and held (launch failed requeued held): `slurm-resilience watch` on a login "
        "node, or you with `scontrol release`, let it start elsewhere.",
    )
