"""The example of a user's own check holds on honest state, and its text in the documentation is the script's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "examples" / "own_check.py"


def run(folder: Path, steps: int) -> str:
    done = subprocess.run(
        [sys.executable, SCRIPT, str(steps)], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_a_check_of_ones_own_is_asked_on_every_resume(tmp_path: Path) -> None:
    assert run(tmp_path, 6) == "completed at step 6; own checks: none, it started fresh"
    assert run(tmp_path, 8) == "completed at step 8; own checks: passed, passed"


def test_the_page_shows_the_script() -> None:
    shown = SCRIPT.read_text(encoding="utf-8").partition("[start:check]\n")[2].partition("# --8<--")[0]
    assert shown in (ROOT / "docs" / "explanation" / "verification.md").read_text(encoding="utf-8")
