"""Entry of every hook: whatever goes wrong in ours is recorded, and the exit code is 0."""

import os
import sys

from . import ledger, world

DEADLINES_S = {"prolog": 6.0, "epilog": 8.0, "healthcheck": 45.0, "epilogslurmctld": 4.0}


def main(argv: "list[str]", environ: "dict[str, str]") -> int:
    """``argv``: context, compiled configuration, state folder.  Always 0."""
    here = None
    try:
        context, config, state = argv
        node = world.node_name(environ) if context != "epilogslurmctld" else "slurmctld"
        folder, why = world.state_folder(state, node)
        here = world.World(context, node, {}, folder, environ, DEADLINES_S[context])
        if not node:
            ledger.record(here, "own_error", error="SLURMD_NODENAME is not the name of a node")
            return 0
        if why:
            ledger.record(here, "own_error", error=f"state is elsewhere: {why}")
        here.settings = world.load_settings(config)
        _run(here, context)
    except world.BadSettings as error:
        assert here is not None
        ledger.record(here, "own_error", error=f"configuration: {error}")
    except BaseException as error:  # nothing of ours may fail a prolog
        _record_crash(here, error)
    return 0


def _run(here: "world.World", context: str) -> None:
    if context == "prolog":
        from . import prolog

        prolog.run(here)
    elif context == "epilog":
        from . import epilog

        epilog.run(here)
    elif context == "healthcheck":
        from . import periodic

        periodic.run(here)
    else:
        from . import expedite

        expedite.run(here)


def _record_crash(here: "world.World | None", error: BaseException) -> None:
    import traceback

    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    if here is None:
        sys.stderr.write(text)
        return
    ledger.record(here, "own_error", error=text[-1500:])


if __name__ == "__main__":
    os._exit(main(sys.argv[1:], dict(os.environ)))
