"""`bash examples/demo.sh`: plays the story on the stage that this machine has, and says whether it went as promised."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from record import DemoFailed
from story import Story, last_line, verdict


def why_not_slurm() -> str | None:
    """Why the demo cannot have a real Slurm here, or None when it can."""
    if os.geteuid() != 0:
        return "a sandbox needs root"
    if shutil.which("slurmctld") is None and shutil.which("apt-get") is None:
        return "Slurm is not installed, and there is no apt-get to install it"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="demo.sh", description=__doc__, allow_abbrev=False)
    parser.add_argument("--keep", action="store_true", help="leave sandbox and run folder to look at, also after a success")
    parser.add_argument("--local", action="store_true", help="four pretend nodes on this machine, no Slurm")
    parser.add_argument("--steps", type=int, default=160, help="length of the training (default: 160)")
    options = parser.parse_args()

    reason = "--local was asked for" if options.local else why_not_slurm()
    if reason:
        from pretend import Pretend

        print(f"without Slurm: {reason}", flush=True)
        stage = Pretend()
    else:
        from on_slurm import OnSlurm

        stage = OnSlurm()
    folder = stage.folder(f"resilience-demo-{time.strftime('%Y%m%d-%H%M%S')}")
    story = Story(stage, folder, options.steps)
    try:
        result = story.play()
        wrong = verdict(result, options.steps)
    except DemoFailed as failure:
        wrong = [str(failure)]
        print(stage.evidence(), file=sys.stderr)
    finally:
        if not options.keep:
            stage.close()
    for sentence in wrong:
        print(f"DEMO FAILED  {sentence}")
    if wrong:
        print(f"the run is in {folder}", file=sys.stderr)
        return 1
    if options.keep:
        print(f"the run is in {story.record.run_dir}")
    else:
        shutil.rmtree(folder)
    print(last_line(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
