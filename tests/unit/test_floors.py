"""Imports point to lower floors only; packages on one floor do not import each other; torch stays where it is allowed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import slurm_resilience

ROOT = Path(slurm_resilience.__file__).parent
PACKAGE = "slurm_resilience"

# The house, from the ground up.  A new package needs a line here, which is a decision.
FLOORS: list[set[str]] = [
    {"errors", "_atomic", "_clock"},
    {"config"},
    {"slurm", "progress"},
    {"observe"},
    {"checkpoint", "elastic", "plan"},
    {"runtime", "training"},
    {"submit", "hooks", "sandbox", "doctor", "integrations"},
    {"rehearse"},
    {"cli"},
    {"__main__"},
]
FLOOR_OF = {unit: number for number, units in enumerate(FLOORS) for unit in units}

# Where torch may be imported: packages, or single modules; two of runtime only inside functions.
TORCH_AT_TOP = {"training", "integrations", "checkpoint.dcp"}
TORCH_INSIDE_FUNCTIONS = {"runtime.store_host", "runtime.node_check_rank"}


@dataclass(frozen=True)
class Import:
    importer: str
    target: str
    line: int
    at_top: bool
    typing_only: bool


def module_files() -> dict[str, Path]:
    """Dotted name without the package's own -> file; a package is named after its folder."""
    out = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = list(path.relative_to(ROOT).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        out[".".join(parts)] = path
    return out


MODULES = module_files()


def imports_of(name: str, source: str, *, is_package: bool) -> Iterator[Import]:
    def visit(node: ast.AST, at_top: bool, typing_only: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(name, alias.name, node.lineno, at_top, typing_only)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = [PACKAGE, *name.split(".")] if name else [PACKAGE]
                up = here[: len(here) - node.level + (1 if is_package else 0)]
                base = ".".join([*up, *([base] if base else [])])
            for alias in node.names:
                yield Import(name, f"{base}.{alias.name}", node.lineno, at_top, typing_only)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            named = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            yield from (Import(name, target, node.lineno, at_top, typing_only) for target in named)
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for field, value in ast.iter_fields(node):
            guarded = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and field == "body"
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from visit(child, at_top and not inside, typing_only or guarded)

    yield from visit(ast.parse(source), True, False)


def all_imports() -> list[Import]:
    return [
        found
        for name, path in MODULES.items()
        for found in imports_of(name, path.read_text(encoding="utf-8"), is_package=path.name == "__init__.py")
    ]


def own_module(target: str) -> str | None:
    """The module of ours that an import reaches ("" is the package itself), None for anybody else's."""
    if target != PACKAGE and not target.startswith(PACKAGE + "."):
        return None
    name = target.removeprefix(PACKAGE).lstrip(".")
    while name and name not in MODULES and name not in FLOOR_OF:
        name = name.rpartition(".")[0]
    return name


def unit_of(module: str) -> str:
    return module.split(".")[0]


def within(module: str, places: set[str]) -> bool:
    return any(module == place or module.startswith(place + ".") for place in places)


def floor_breaches(found: list[Import]) -> list[str]:
    out = []
    for each in found:
        target = own_module(each.target)
        if not target or not each.importer or unit_of(target) == unit_of(each.importer):
            continue
        here, there = FLOOR_OF[unit_of(each.importer)], FLOOR_OF[unit_of(target)]
        if there >= here:
            where = "the same floor" if there == here else f"floor {there} above"
            out.append(f"{each.importer}:{each.line} (floor {here}) imports {target}, on {where}")
    return out


def test_every_package_has_a_floor() -> None:
    assert sorted({unit_of(name) for name in MODULES if name} - FLOOR_OF.keys()) == []


def test_imports_point_to_lower_floors() -> None:
    assert floor_breaches(all_imports()) == []


@pytest.mark.parametrize(
    ("importer", "source", "breach"),
    [
        ("progress.page", "from slurm_resilience.runtime import agent", "above"),
        ("progress.page", "def f():\n    from slurm_resilience.observe.events import EventWriter", "above"),
        ("runtime.agent", "import slurm_resilience.training", "same floor"),
        ("observe.events", "import importlib\nimportlib.import_module('slurm_resilience.cli')", "above"),
        ("progress.page", "from ..config import ResilienceConfig", None),
        ("progress.page", "from .facts import FactSender", None),
        ("config", "from slurm_resilience import __version__", None),
        ("errors", "from slurm_resilience import config", "above"),
    ],
)
def test_the_check_itself_sees_a_breach(importer: str, source: str, breach: str | None) -> None:
    found = floor_breaches(list(imports_of(importer, source, is_package=False)))
    assert bool(found) == (breach is not None)
    assert all(breach in line for line in found if breach)


def test_torch_is_imported_only_where_it_is_allowed() -> None:
    wrong = [
        f"{each.importer}:{each.line} imports {each.target}"
        for each in all_imports()
        if each.target.split(".")[0] in ("torch", "torchdata", "torchvision")
        and not each.typing_only
        and not within(each.importer, TORCH_AT_TOP)
        and not (within(each.importer, TORCH_INSIDE_FUNCTIONS) and not each.at_top)
    ]
    assert wrong == []


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Each cycle once, as the path that closes it."""
    found: list[list[str]] = []
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> None:
        if name in path:
            found.append([*path[path.index(name) :], name])
            return
        if name in done:
            return
        for target in sorted(edges.get(name, ())):
            walk(target, [*path, name])
        done.add(name)

    for name in sorted(edges):
        walk(name, [])
    return found


def test_no_two_modules_need_each_other() -> None:
    edges: dict[str, set[str]] = {}
    for each in all_imports():
        target = own_module(each.target)
        if target and each.importer and each.at_top and not each.typing_only and target != each.importer:
            edges.setdefault(each.importer, set()).add(target)
    assert cycles(edges) == []
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == [["a", "b", "c", "a"]]
