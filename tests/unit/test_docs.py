"""The documentation says what is true: references match the code, links lead somewhere, commands and code exist."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

from slurm_resilience.config import ResilienceConfig
from slurm_resilience.observe.run_metrics import METRICS
from tests.unit.surface import reference

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")
IDS = [str(page.relative_to(ROOT)) for page in PAGES]


def test_the_reference_is_what_the_code_says() -> None:
    assert reference().differing() == [], "run: python docs/reference/generate.py"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_to_files(page: Path) -> None:
    targets = [target for target in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_named_files_of_the_project_exist(page: Path) -> None:
    named = re.findall(r"`((?:examples|tests|docs|sbatch|slurm_resilience|\.ci)/[\w./-]*)`", page.read_text(encoding="utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_python_in_the_text_is_python(page: Path) -> None:
    for language, code in FENCE.findall(page.read_text(encoding="utf-8")):
        if language == "python":
            ast.parse(textwrap.dedent(code))


def test_python_of_a_migration_is_shown_before_and_after() -> None:
    for page in (ROOT / "docs" / "how-to").glob("from-*.md"):
        blocks = [code for language, code in FENCE.findall(page.read_text(encoding="utf-8")) if language == "python"]
        assert len(blocks) >= 2, page.name
        for code in blocks:
            compile(textwrap.dedent(code), page.name, "exec")
        after = "\n".join(blocks[1:])
        assert "slurm_resilience" in after, page.name
        assert "slurm_resilience" not in blocks[0], page.name
        for module, names in re.findall(r"^from (slurm_resilience[\w.]*) import (.+)$", after, re.MULTILINE):
            for name in names.split(", "):
                assert hasattr(importlib.import_module(module), name.strip()), f"{page.name}: {module} has no {name}"


def test_every_metric_of_a_run_is_in_the_list() -> None:
    text = (ROOT / "docs" / "how-to" / "be-told.md").read_text(encoding="utf-8")
    listed = text.partition("<!-- metrics:begin -->")[2].partition("<!-- metrics:end -->")[0].strip().splitlines()[2:]
    assert listed == [
        f"| `{name}` | {metric.kind} | {', '.join(f'`{label}`' for label in metric.labels)} | {metric.says} |"
        for name, metric in METRICS.items()
    ]


def test_configuration_in_the_text_is_valid() -> None:
    """Each YAML block that is one of ours: known keys, sensible values."""
    found = 0
    for page in PAGES:
        for language, block in FENCE.findall(page.read_text(encoding="utf-8")):
            values = yaml.safe_load(block) if language in ("yaml", "yml") else None
            if isinstance(values, dict) and values.keys() & ResilienceConfig.model_fields.keys():
                ResilienceConfig.build(values)
                found += 1
    assert found


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed: pip install -e .[docs]")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Links, anchors and the navigation lead somewhere, and every page is in the navigation."""
    words = [sys.executable, "-m", "mkdocs", "build", "-q", "-f", ROOT / ".mkdocs.yml", "--strict", "-d", tmp_path / "site"]
    built = subprocess.run(
        words, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert (tmp_path / "site" / "tutorial" / "first-recovery.html").exists()


def test_the_lines_to_add_are_those_of_a_script_that_runs(tmp_path: Path) -> None:
    script = ROOT / "examples" / "minimal.py"
    shown = script.read_text(encoding="utf-8").partition("[start:readme]\n")[2].partition("# --8<--")[0]
    blocks = [
        code for language, code in FENCE.findall((ROOT / "README.md").read_text(encoding="utf-8")) if language == "python"
    ]
    assert shown == blocks[0]
    for outcome in ("completed", "already_complete"):
        done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert done.stdout == f"{outcome} at step 200\n", done.stderr


def commands_in(page: Path) -> list[str]:
    """Each `slurm-resilience …` line of a shell block, continuation lines joined, and each one in running text."""
    text = page.read_text(encoding="utf-8")
    found = []
    for language, block in FENCE.findall(text):
        if language in ("bash", "sh", "console"):
            for line in block.replace("\\\n", " ").splitlines():
                line = line.strip().removeprefix("$ ").split(" #")[0]
                if re.match(r"(sudo )?slurm-resilience\b", line):
                    found.append(line.removeprefix("sudo "))
    prose = FENCE.sub("", text)
    found += [code for code in re.findall(r"`([^`\n]+)`", prose) if code.startswith("slurm-resilience ") and "…" not in code]
    return found


def known_options() -> dict[str, set[str]]:
    return {
        name: {option for action in parser._actions for option in action.option_strings}
        for name, parser in reference().parsers()
    }


def name_of(words: list[str], known: dict[str, set[str]]) -> str:
    """The command with its subcommands, as far as they are known."""
    name = " ".join(words[:2])
    for word in words[2:]:
        if f"{name} {word}" not in known:
            break
        name = f"{name} {word}"
    return name


def has_subcommands(name: str) -> bool:
    parser = dict(reference().parsers())[name]
    return any(isinstance(action, argparse._SubParsersAction) for action in parser._actions)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands_in_the_text_exist(page: Path) -> None:
    known = known_options()
    for line in commands_in(page):
        words = shlex.split(line)
        words = words[: words.index("--")] if "--" in words else words
        if set(words[1:]) <= {"--help", "--version", "COMMAND"}:
            continue
        name = name_of(words, known)
        assert name in known, f"no such command: {line}"
        used = {word.split("=")[0] for word in words if word.startswith("--")}
        if used != {"--help"} and words != name.split():  # to name a group is not to call it
            assert not has_subcommands(name), f"no such subcommand: {line}"
        assert used <= known[name], f"no such option: {line}"
