"""May ranks be forked from this process, and what may it import beforehand so that they start fast?

Standard library only, loaded by file path: the launcher's interpreter need not have this package.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import sys
import time

# This package itself is nobody's work in progress, even where it was installed as an editable checkout.
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def is_library(path: str) -> bool:
    """Whether a file belongs to the standard library or to an installed package, not to the user."""
    import sysconfig

    roots = {sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    return path.startswith(tuple(f"{root}{os.sep}" for root in roots)) or "/dist-packages/" in path or "/site-packages/" in path


def is_installed(name: str) -> bool:
    """Whether a module comes from the standard library, an installed package, or this one."""
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names:
        return True
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return False
    return spec is not None and spec.origin is not None and (is_library(spec.origin) or spec.origin.startswith(_OURS))


def why_not_fork() -> str:
    """What makes a fork of this process unsafe, "" when nothing does."""
    if len(os.listdir("/proc/self/task")) > 1:
        return "started a thread, which a forked rank would not have"
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is not None and cuda.is_initialized():
        return "initialised CUDA, whose context a forked rank cannot use"
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            device = os.readlink(f"/proc/self/fd/{fd}")
            if device.startswith(("/dev/nvidia", "/dev/kfd", "/dev/accel", "/dev/neuron", "/dev/habanalabs")):
                return f"opened the accelerator {device}, which a forked rank cannot use"
    return ""


def quiet_c10d() -> None:
    """Let c10d find out here, once, that addresses have no names.

    Its TCPStore looks each peer's address up in reverse; where DNS does not answer that costs 10–20 s in every process,
    until a static flag stops it.  A store that talks to itself trips the flag, and forked ranks inherit it.
    """
    torch_distributed = sys.modules.get("torch.distributed")
    if torch_distributed is None or not torch_distributed.is_available():
        return
    import datetime

    try:
        store = torch_distributed.TCPStore(
            "127.0.0.1", 0, 1, True, datetime.timedelta(seconds=10), wait_for_workers=False
        )  # fmt: skip
        del store
    except Exception as error:  # noqa: BLE001 -- without it the ranks are slower, not wrong
        print(f"c10d could not be made ready: {error!r}", file=sys.stderr, flush=True)
    deadline = time.monotonic() + 5
    while len(os.listdir("/proc/self/task")) > 1 and time.monotonic() < deadline:
        time.sleep(0.002)
    # The short patience that the agent set for these lookups is not for the ranks: read the resolver's settings anew.
    os.environ.pop("RES_OPTIONS", None)
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).__res_init()
