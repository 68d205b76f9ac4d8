"""Events as a person wants to read them: one plain line for what matters, nothing for the rest."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slurm_resilience.observe.endings import ending
from slurm_resilience.observe.failures import word_of
from slurm_resilience.observe.incidents import Incident, Incidents

_EVERY_S = 10.0
_LONG_CHARS = 40


class Narrator:
    """Turns events into lines, in order.  ``every_s``: how often steps, and how often checkpoints, are worth a line."""

    def __init__(self, *, every_s: float = _EVERY_S) -> None:
        self._incidents = Incidents()
        self._every_s = every_s
        self._last_checkpoint_t = float("-inf")
        self._last_step: tuple[float, int] | None = None
        self._told_exception_of = -1
        self._told_texts: list[str] = []
        self._untold_checkpoints: list[Any] = []
        self._joined: set[str] = set()
        self._nodes: list[str] = []
        self._decision = ""
        self._slurm = True

    def catch_up(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Take what was told earlier into account, without telling it again."""
        for event in events:
            self._incidents.apply(event)

    def lines(self, event: Mapping[str, Any]) -> list[str]:
        """The lines for one event, each with its time of day (UTC) in front."""
        recovered = self._incidents.apply(event)
        told = [self._told(event)]
        if recovered is not None:
            told.append(recovery(recovered))
        told = [self._only_once(line) for line in told]
        if any(told):
            self._remember(event)
        stamp = time.strftime("%H:%M:%S", time.gmtime(event["t"]))
        return [f"{stamp}  {line}" for line in told if line]

    def _told(self, event: Mapping[str, Any]) -> str:
        """The event's own line; one of another release, which lacks what the line needs, is shown as it is."""
        teller = getattr(self, f"_{event['event']}", None)
        try:
            return str(teller(event)) if teller is not None else ""
        except (KeyError, TypeError, ValueError):
            rest = {name: value for name, value in event.items() if name not in ("v", "seq", "t", "restart", "event")}
            return f"{event['event']}: {rest}"

    def _only_once(self, line: str) -> str:
        """A long message that was told before is only referred to: five copies of it hide what is new."""
        for text in self._told_texts:
            line = line.replace(text, "as told above")
        return line

    def _remember(self, event: Mapping[str, Any]) -> None:
        if event["event"] not in ("exception", "fault_detected"):
            return
        text = str(event.get("message" if event["event"] == "exception" else "detail") or "")
        for form in (text, " ".join(text.split())):  # what is quoted later stands in one line
            if len(form) >= _LONG_CHARS and form not in self._told_texts:
                self._told_texts = [*self._told_texts[-7:], form]

    def _run_started(self, event: Mapping[str, Any]) -> str:
        return f"run {event.get('run_id')}: {' '.join(map(str, event.get('argv', [])))}"

    def _allocation_started(self, event: Mapping[str, Any]) -> str:
        self._nodes = list(event["nodes"])
        self._joined = set()
        self._slurm = event.get("job_id") not in (None, "", "local")
        job = f"job {event['job_id']}" if event.get("job_id") else "this machine"
        again = f", restart {event['restart']}" if event.get("restart") else ""
        return f"{job}{again}: {_nodes(self._nodes)}"

    def _allocation_lost(self, event: Mapping[str, Any]) -> str:
        which = f" (job {event['job_id']}, restart {event.get('of_restart', 0)})" if "job_id" in event else ""
        return f"the supervisor of the allocation before{which} left no word of its end: it died, or its node did"

    def _supervisor_restarted(self, event: Mapping[str, Any]) -> str:
        return "the supervisor was restarted; waiting for the agents to call"

    def _supervisor_took_over(self, event: Mapping[str, Any]) -> str:
        host = event.get("node", "the batch host")
        return f"nothing was heard from {host} and its supervisor: another node takes over, waiting for the agents to call"

    def _job_ended_for_batch_host(self, event: Mapping[str, Any]) -> str:
        return f"no batch script was left to end the job: it was {event.get('how', 'ended')} for that"

    def _supervisor_was_frozen(self, event: Mapping[str, Any]) -> str:
        return f"the supervisor itself did not run for {event['seconds']:.1f} s; nobody's silence in that time counts"

    def _agent_joined(self, event: Mapping[str, Any]) -> str:
        first = event["node"] not in self._joined
        self._joined.add(event["node"])
        if first and len(self._joined) >= len(self._nodes) > 0 and self._joined >= set(self._nodes):
            return f"all {len(self._nodes)} agents are here" if len(self._nodes) > 1 else "the agent is here"
        return "" if first else f"{event['node']}: its agent is back"

    def _agent_warm(self, event: Mapping[str, Any]) -> str:
        reason = event.get("reason")
        return f"{event['node']}: ranks will be started cold: {reason}" if not event.get("warm") and reason else ""

    def _agent_lost(self, event: Mapping[str, Any]) -> str:
        return f"{event['node']} is lost: {event['why']}"

    def _node_drained(self, event: Mapping[str, Any]) -> str:
        return f"{event['node']} was drained by somebody: {event.get('reason')}"

    def _node_undrained(self, event: Mapping[str, Any]) -> str:
        return f"{event['node']} is in service again"

    def _node_check_started(self, event: Mapping[str, Any]) -> str:
        return f"the nodes are checked before the next attempt: {event['reason']}"

    def _node_check_done(self, event: Mapping[str, Any]) -> str:
        took = f"the nodes were checked in {event['seconds']:.1f} s"
        if event.get("inconclusive"):
            return f"{took}, which tells nothing: {event['inconclusive']}"
        found = "; ".join(f"{node}: {why}" for node, why in event["suspects"].items())
        return f"{took}: {found or 'nothing speaks against any of them'}"

    def _node_forgiven(self, event: Mapping[str, Any]) -> str:
        return f"{event['node']} is taken back by its user: what crashed there so far is held against it no more"

    def _node_gone(self, event: Mapping[str, Any]) -> str:
        return f"{event['node']} is no longer part of the job: {event['why']}"

    def _agent_start_failed(self, event: Mapping[str, Any]) -> str:
        return f"{event['node']}: the agent did not start (exit code {event['exit_code']}): {event['detail']}"

    def _attempt_started(self, event: Mapping[str, Any]) -> str:
        plan = event.get("plan") or {}
        parts = [_nodes(event["nodes"]), _many(event["world"], "rank")]
        if plan.get("global_batch"):
            parts.append(_batch(plan))
        mesh = {axis: size for axis, size in (plan.get("mesh") or {}).items() if size > 1 and not axis.startswith("dp")}
        if mesh:
            parts.append("mesh " + " x ".join(f"{axis} {size}" for axis, size in mesh.items()))
        return f"attempt {event['attempt']}: {', '.join(parts)}"

    def _attempt_adopted(self, event: Mapping[str, Any]) -> str:
        count = int(event["world"])
        ranks = f"all {count} ranks" if count != 1 else "its one rank"
        return f"attempt {event['attempt']}: {ranks} had gone on meanwhile; nothing was lost"

    def _launched_cold(self, event: Mapping[str, Any]) -> str:
        return f"{event['node']}: ranks are started cold: {event['reason']}"

    def _resumed(self, event: Mapping[str, Any]) -> str:
        took = f" in {event['seconds']:.2f} s" if isinstance(event.get("seconds"), int | float) else ""
        anew = "; the world size has changed: random numbers are derived anew" if event.get("rng") == "derived" else ""
        return f"attempt {event['attempt']}: resumed at step {event.get('step')} from {event.get('checkpoint')}{took}{anew}"

    def _started_fresh(self, event: Mapping[str, Any]) -> str:
        weights = f", with the weights in {event['weights']}" if event.get("weights") else ""
        return f"attempt {event['attempt']}: no checkpoint yet, training starts at step 0{weights}"

    def _first_step(self, event: Mapping[str, Any]) -> str:
        self._last_step = None
        return f"attempt {event['attempt']}: first step done (step {event.get('step')}{_loss(event)})"

    def _step_reported(self, event: Mapping[str, Any]) -> str:
        t, step, before = float(event["t"]), event.get("step"), self._last_step
        if not isinstance(step, int):
            return ""
        if before is None or step < before[1]:  # another attempt, whose first report came before its first step was told
            self._last_step = (t, step)
            return ""
        if t - before[0] < self._every_s:
            return ""
        self._last_step = (t, step)
        speed = (step - before[1]) / (t - before[0])
        return (
            f"step {step}{_loss(event)}, {speed:.1f} steps/s"
            if speed >= 1
            else f"step {step}{_loss(event)}, {1 / max(speed, 1e-9):.1f} s/step"
        )

    def _checkpoint_committed(self, event: Mapping[str, Any]) -> str:
        if event["t"] - self._last_checkpoint_t < self._every_s:
            self._untold_checkpoints.append(event.get("step"))
            return ""
        self._last_checkpoint_t = float(event["t"])
        untold, self._untold_checkpoints = self._untold_checkpoints, []
        size = f", {event['bytes'] / 1e6:.1f} MB" if isinstance(event.get("bytes"), int | float) else ""
        took = f" in {event['seconds']:.2f} s" if isinstance(event.get("seconds"), int | float) else ""
        return f"checkpoint {event.get('name')} at step {event.get('step')} committed{took}{size}{_since(untold)}"

    def _checkpoint_failed(self, event: Mapping[str, Any]) -> str:
        return f"the checkpoint at step {event.get('step')} failed: {event.get('error')}; training goes on, older ones stand"

    def _checkpoint_quarantined(self, event: Mapping[str, Any]) -> str:
        return f"checkpoint {event.get('name')} is not used any more: {event.get('reason')}"

    def _checkpoint_passed_over(self, event: Mapping[str, Any]) -> str:
        return f"checkpoint {event.get('name')} was passed over: {event.get('reason')}"

    def _exception(self, event: Mapping[str, Any]) -> str:
        if event["attempt"] == self._told_exception_of:  # the others mostly say that they lost this one
            return ""
        self._told_exception_of = event["attempt"]
        return f"{_who(event)} raised {event.get('type')}: {event.get('message')}"

    def _rank_exited_early(self, event: Mapping[str, Any]) -> str:
        return f"{_who(event)} left with code 0{_at(event)} while others go on"

    def _died_at_exit(self, event: Mapping[str, Any]) -> str:
        return f"{_who(event)} died of {event['signal']} in the teardown of its interpreter, after its script had ended well"

    def _lingered(self, event: Mapping[str, Any]) -> str:
        return (
            f"warning: the run is complete, and {event['ranks']} ranks have done nothing for {event['quiet_s']:.0f} s without "
            "ending (a thread, a child or an exit handler that never ends?): they are killed, it counts as complete"
        )

    def _left_unfinished(self, event: Mapping[str, Any]) -> str:
        return (
            f"warning: the script ended with code 0{_at(event)}, before the last step of run.steps() and without run.finish(): "
            "it counts as complete, and what was done since the last checkpoint is saved nowhere"
        )

    def _fault_detected(self, event: Mapping[str, Any]) -> str:
        return f"fault: {event['cause']}{_where(event)}: {event.get('detail', '')}"

    def _warning_received(self, event: Mapping[str, Any]) -> str:
        if event.get("again"):
            return f"{event['signal']} again ({event['source']})"
        if event["signal"] == "drain":  # it is explained at once
            return ""
        return f"warning: {event['signal']} ({event['source']}){'; asking Slurm why' if self._slurm else ''}"

    def _warning_explained(self, event: Mapping[str, Any]) -> str:
        if "deadline" not in event:
            return ""
        left = float(event["deadline"]) - float(event["t"])
        detail = f" ({event['detail']})" if event.get("detail") else ""
        return f"why: {word_of(event)}{detail}; {max(0.0, left):.0f} s left"

    def _straggler_found(self, event: Mapping[str, Any]) -> str:
        whole = ", as is its whole node" if event.get("whole_node") else ""
        return (
            f"{_who(event)} is slow: a step costs it {event['own_s']:.3g} s by itself, "
            f"the others {event['others_s']:.3g} s{whole}"
        )

    def _straggler_recovered(self, event: Mapping[str, Any]) -> str:
        return f"{_who(event)} is as fast as the others again"

    def _watched_from_outside(self, event: Mapping[str, Any]) -> str:
        return (
            "no rank uses a Run: less is known of them, only exits, CPU, reading and writing are watched; "
            f"a hang is one when all are quiet for {event['quiet_limit_s']:g} s"
        )

    def _rank_quiet(self, event: Mapping[str, Any]) -> str:
        return f"{_who(event)} has shown no sign of life for {event['quiet_s']:.0f} s"

    def _stop_not_heard(self, event: Mapping[str, Any]) -> str:
        waited = f", for {event['waited_s']:.0f} s" if "waited_s" in event else ""
        where = f"; rank {event.get('rank')} is in {event['section']!r}" if "section" in event else ""
        return f"no rank has heard that it is to stop{waited}{where}: let the code in there ask run.should_stop()"

    def _stop_deadline_passed(self, event: Mapping[str, Any]) -> str:
        ended, world = event["ended"], event["world"]
        said = f", {event['saved']} of {world} had saved and said so" if isinstance(event.get("saved"), int) else ""
        return f"the time to stop is over: {ended} of {world} ranks have ended{said}; what still runs is killed"

    def _attempt_stopped(self, event: Mapping[str, Any]) -> str:
        if event.get("fault"):
            why = f"{event['cause']}{_where(event)}: {event.get('detail', '')}"
            untold, self._untold_checkpoints = self._untold_checkpoints, []
            return f"attempt {event['attempt']}: stopped everywhere{_at(event)}; {why}{_since(untold)}"
        how = "saved and stopped" if event.get("saved") else "stopped, not all ranks had saved"
        untold, self._untold_checkpoints = self._untold_checkpoints, []
        why = f" ({word})" if (word := word_of(event)) != "unknown" else ""  # it is still being asked for
        return f"attempt {event['attempt']}: {how}{_at(event)}{why}{_since(untold)}"

    def _decided(self, event: Mapping[str, Any]) -> str:
        self._decision = str(event["reason"])
        return f"decision: {event['action']}: {event['reason']}"

    def _requeue_started(self, event: Mapping[str, Any]) -> str:
        nodes = event.get("nodes")
        return f"asking Slurm for a new allocation{f' of {nodes[0]}-{nodes[1]} nodes' if nodes else ''}"

    def _requeue_done(self, event: Mapping[str, Any]) -> str:
        without = f", without {', '.join(event['excluded'])}" if event.get("excluded") else ""
        return f"requeued{without}; the run goes on in this job's next allocation"

    def _requeue_failed(self, event: Mapping[str, Any]) -> str:
        return f"Slurm did not requeue the job: {event.get('reason')}"

    def _run_completed(self, event: Mapping[str, Any]) -> str:
        untold, self._untold_checkpoints = self._untold_checkpoints, []
        return f"run complete{_at(event)}{_since(untold)}"

    def _run_failed(self, event: Mapping[str, Any]) -> str:
        told = bool(self._decision) and str(event["reason"]) == self._decision
        again = "; started again in this folder, it goes on" if event.get("cause") == "cancelled" else ""
        return f"run ended{'' if told else f': {ending(event)}'} (exit code {event['exit_code']}){again}"


def recovery(incident: Incident) -> str:
    """One line on an incident that ended well."""
    names = {"first_step": "first step", "caught_up": "caught up"}
    shown = [
        f"{names.get(name, name)} {seconds:.2f}"
        for name, seconds in incident.as_dict()["phases"].items()
        if name not in ("fault", "caught_up")
    ]
    where = f" ({incident.node})" if incident.node else ""
    again = f"; {_many(incident.steps_lost, 'step')} to do again" if incident.steps_lost else ""
    if not incident.fault:
        return f"training again {incident.seconds:.2f} s after the requeue by hand: {', '.join(shown)}{again}"
    return f"recovered from {incident.cause}{where} in {incident.seconds:.2f} s: {', '.join(shown)}{again}"


def _batch(plan: Mapping[str, Any]) -> str:
    dp = 1
    for axis in ("dp_replicate", "dp_shard"):
        dp *= (plan.get("mesh") or {}).get(axis, 1)
    total, micro, passes = plan["global_batch"], plan["micro_batch"], plan["accumulation"]
    if micro * passes * dp == total:
        return f"global batch {total} = {dp} x {micro} x {passes}"
    return f"global batch {total} on {_many(dp, 'share')} in {passes} passes of up to {micro}"


def _nodes(names: Sequence[str]) -> str:
    return f"{_many(len(names), 'node')} ({' '.join(names) if len(names) <= 8 else f'{names[0]} .. {names[-1]}'})"


def _many(count: int | None, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _who(event: Mapping[str, Any]) -> str:
    """A rank, and its node where somebody knows it: without an agent nobody does."""
    return f"rank {event.get('rank')}" + (f" on {event['node']}" if event.get("node") else "")


def _where(event: Mapping[str, Any]) -> str:
    rank = f"rank {event['rank']}" if event.get("rank") is not None else ""
    node = str(event.get("node") or "")
    return f" ({', '.join(part for part in (rank, node) if part)})" if rank or node else ""


def _at(event: Mapping[str, Any]) -> str:
    return f" at step {event['step']}" if (event.get("step") or 0) >= 0 and event.get("step") is not None else ""


def _since(steps: Sequence[Any]) -> str:
    """Checkpoints that had no line of their own, so that few lines do not look like few checkpoints."""
    if not steps:
        return ""
    which = " ".join(map(str, steps)) if len(steps) <= 8 else f"{steps[0]} .. {steps[-1]} ({len(steps)} of them)"
    told = f"checkpoints at steps {which} were" if len(steps) > 1 else f"a checkpoint at step {which} was"
    return f"; since the last line about one, {told} committed too"


def _loss(event: Mapping[str, Any]) -> str:
    loss = event.get("loss")
    return f", loss {loss:.4f}" if isinstance(loss, int | float) else ""
