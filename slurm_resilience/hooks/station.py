"""One step of a hook: what goes wrong in it is recorded, and the steps behind it are made all the same.

A state file that a disk has spoilt, or a file that a user has left for us, must not switch off the checks for good.
"""

from . import ledger

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .world import World


def attempt(world: "World", what: str, step: "Callable[[], None]") -> None:
    """Make this step.  Raises nothing."""
    try:
        step()
    except Exception as error:
        import traceback

        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        ledger.record(world, "own_error", error=f"{what}: {text[-1400:]}")
