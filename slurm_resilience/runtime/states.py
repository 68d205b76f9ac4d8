"""What the coordinator can be doing, and what it stops ranks for.

gathering → preparing → running ─┬─────────→ stopping ─┬→ gathering …             (a fault, a wish to grow)
    │                            └→ ending ─────┘   ↑  └→ asking → leaving        (complete, warned, given up)
    └→ checking ────────────────────────────────────┘                             (the nodes, now and then)
"""

from __future__ import annotations

import enum


class State(str, enum.Enum):
    """What the coordinator is doing."""

    GATHERING = "gathering"
    ADOPTING = "adopting"
    CHECKING = "checking"
    PREPARING = "preparing"
    RUNNING = "running"
    ENDING = "ending"
    STOPPING = "stopping"
    ASKING = "asking"
    LEAVING = "leaving"


class After(str, enum.Enum):
    """Why ranks are stopped, which decides what follows."""

    FAULT = "fault"
    COMPLETE = "complete"
    WARNED = "warned"
    GROW = "grow"
    MOVE = "node_drained"
    LEFT = "left"
    RESTART = "restart"
    CHECKED = "checked"

    @property
    def goes_on(self) -> bool:
        """The ranks are launched again at once: nothing has gone wrong, and nobody hurries us."""
        return self in (After.GROW, After.MOVE)
