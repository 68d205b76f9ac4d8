"""One bounded call to Slurm by its absolute path.  No answer is "unknown", and is said to be so."""

from . import child, nodes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .world import World

CALL_S = 3.0  # a dead controller holds scontrol for nine seconds or more: longer than an epilog has
SETTLE_S = 1.2  # slurmctld's times are whole seconds


class NoAnswer(Exception):
    """Slurm did not answer, or not in words that we know."""


class Refused(Exception):
    """Slurm answered, and did not do it."""


def call(world: "World", tool: str, *words: str) -> str:
    """What the command said.  Raises :class:`NoAnswer` or :class:`Refused`."""
    path = world.text("slurm", tool, "/usr/bin/" + tool)
    done = child.run(
        (path, *words), world.remaining(world.number("slurm", "call_s", CALL_S)), world.slurm_environment(), cap_bytes=64 << 20
    )
    said = " ".join((done.problem or done.err or done.out[:300]).split())
    if done.code is None or done.cut:
        raise NoAnswer("{} {}: {}".format(tool, " ".join(words[:3]), said or "its answer is too long"))
    if done.code != 0:
        lost = ("Unable to contact", "configuration source", "timed out", "Connection refused", "Zero Bytes", "Socket")
        kind = NoAnswer if done.code < 0 or any(word in said for word in lost) else Refused
        raise kind("{} {}: code {}: {}".format(tool, " ".join(words[:3]), done.code, said))
    return done.out


def all_nodes(world: "World") -> "list[nodes.Node]":
    """Every node of the cluster.  Raises :class:`NoAnswer` also for an answer that we cannot read."""
    try:
        return nodes.parse(call(world, "scontrol", "-o", "show", "nodes"))
    except (ValueError, Refused) as error:  # whatever is wrong with an answer, it is none
        raise NoAnswer(f"scontrol show nodes: {error}") from None


def this_node(found: "list[nodes.Node]", name: str) -> "nodes.Node | None":
    mine = [node for node in found if node.name == name]
    return mine[0] if len(mine) == 1 else None


def update(world: "World", *fields: str) -> None:
    """Change fields of this node, and of this node only."""
    call(world, "scontrol", "update", "NodeName=" + world.node, *fields)


def put_back(world: "World") -> None:
    """Take the drain away, and nothing else: RESUME would cancel a reboot that somebody asked for."""
    update(world, "State=UNDRAIN")


def drains_since(world: "World", since: float) -> "list[dict[str, str]]":
    """Drains of this node that accounting wrote down from ``since`` on; [] where there is no accounting.

    Slurm forgets a drain that is wiped; its accounting does not.  Raises :class:`NoAnswer`.
    """
    if not world.section("slurm").get("accounting"):
        return []
    import time

    begin = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(since - 1))
    try:
        out = call(world, "sacctmgr", "-n", "-P", "show", "event", "nodes=" + world.node, "start=" + begin,
                   "format=timestart,timeend,state,user,reason")  # fmt: skip
    except Refused as error:
        raise NoAnswer(str(error)) from None
    found = []
    for line in out.splitlines():
        parts = line.split("|", 4)
        if len(parts) == 5 and "DRAIN" in parts[2].upper() and nodes.seconds(parts[0]) >= since:
            found.append({"at": parts[0], "until": parts[1], "user": parts[3].split("(")[0], "reason": parts[4]})
    return found
