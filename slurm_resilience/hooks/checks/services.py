"""Do the services that jobs need run?  Asks systemd; a systemd that does not answer is unknown (systemd/systemd#16670)."""

from . import FAIL, FLAG, OK, WARN, Host, Result, unknown

NAME = "services"
CONTEXTS = ("periodic", "boot")
TIMEOUT_S = 4.0
SEVERITY = "drain"

# Source: systemctl(1), table of unit active states.  For a unit that it does not know is-active says inactive.
_RUNS = ("active", "reloading", "refreshing")
_COMES = ("activating", "maintenance")
_DEAD = ("inactive", "failed", "deactivating")


def check(host: Host) -> Result:
    names = host.options.get("names")
    if not isinstance(names, list) or not names:
        return Result(OK, "no service is asked for")
    names = [str(name) for name in names]
    done = host.tool("systemctl", "/usr/bin/systemctl", "is-active", "--", *names)
    if done.problem:
        return unknown(f"systemctl: {done.problem}")
    return judge(names, done.out, done.err)


def judge(names: "list[str]", out: str, err: str = "") -> Result:
    """One word for each, in their order.  The exit code says nothing more: it is the same for dead and unknown units."""
    words = out.split()
    if len(words) != len(names) or any(word not in _RUNS + _COMES + _DEAD for word in words):
        return unknown("systemctl answers in a form that we do not know: {}".format(" ".join((out + err).split())[:200]))
    for name, word in zip(names, words):  # noqa: B905  as many, see above
        if word in _DEAD:
            return Result(FAIL, f"{name} is {word}", "dead", name.partition(".")[0][:12])
    for name, word in zip(names, words):  # noqa: B905
        if word in _COMES:
            return Result(WARN, f"{name} is {word}", "starting", severity=FLAG)
    return Result(OK, f"{len(names)} services")
