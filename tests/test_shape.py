"""The limits that keep the package readable, held over its source."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from headlong.version import __version__

ROOT = Path(__file__).parents[1]
FILE_LINES, FUNCTION_LINES, PARAMETERS, ENVIRONMENT_NAMES, README_LINES = 500, 80, 8, 5, 120

# Who may import whom, by the longest prefix that fits. "later" is allowed inside functions and for types alone.
COMMON = {"headlong.errors", "headlong.settings", "headlong.version"}
PEOPLE = COMMON | {"headlong", "headlong.engine"}
TENSORS = COMMON | {"headlong.checkpoint", "headlong.engine.request"}
RINGS: dict[str, tuple[set[str], set[str]]] = {
    "headlong": (COMMON | {"headlong.engine"}, {"headlong.checkpoint"}),
    "headlong.__main__": ({"headlong.cli"}, set()),
    "headlong.errors": (set(), set()),
    "headlong.settings": ({"headlong.errors"}, set()),
    "headlong.cli": (PEOPLE | {"headlong.cli"}, {"headlong.server"}),
    "headlong.cli.inspect": (PEOPLE | {"headlong.cli", "headlong.checkpoint"}, set()),
    "headlong.server": (PEOPLE | {"headlong.server"}, set()),
    "headlong.engine": (COMMON | {"headlong.engine"}, {"headlong.checkpoint", "headlong.backends"}),
    "headlong.engine.request": (COMMON, set()),
    "headlong.checkpoint": (COMMON | {"headlong.checkpoint"}, set()),
    "headlong.backends.torch": (TENSORS | {"headlong.backends.torch"}, {"headlong.engine.backend"}),
    "headlong.backends.mlx": (TENSORS | {"headlong.backends.mlx"}, {"headlong.engine.backend"}),
    "headlong.backends.fake": (TENSORS, {"headlong.engine.backend"}),
}
# Packages that belong to one ring.
OWNED = {
    **dict.fromkeys(("torch", "triton", "mlx", "mlx_lm"), "headlong.backends"),
    **dict.fromkeys(("starlette", "fastapi", "uvicorn", "prometheus_client"), "headlong.server"),
    "rich": "headlong.cli",
}
BROAD_EXCEPT = {"headlong.cli.main", "headlong.engine.loop"}


@dataclass(frozen=True)
class Import:
    target: str
    later: bool  # inside a function, or for types alone
    line: int


class Module:
    """One source file: its dotted name, its tree and what it imports."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.source = path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.source)
        parts = path.relative_to(ROOT).with_suffix("").parts
        self.name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def at(self, node: ast.AST) -> str:
        return f"{self.path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"

    @cached_property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]

    @cached_property
    def imports(self) -> list[Import]:
        return list(self._imports(self.tree, later=False))

    def _imports(self, node: ast.AST, later: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(name.name, later, child.lineno) for name in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert not child.level, f"{self.at(child)}: write imports in full"
                # `from package import module` names a module, `from module import name` does not
                full = {f"{child.module}.{name.name}" for name in child.names} & MODULE_NAMES
                yield from (Import(target, later, child.lineno) for target in sorted(full) or [str(child.module)])
            else:
                lazy = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or _is_type_checking(child)
                yield from self._imports(child, later or lazy)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def _is_within(name: str, ring: str) -> bool:
    """The package itself is a name of its own, not the ring of everything."""
    return name == ring or (ring != "headlong" and name.startswith(f"{ring}."))


MODULES = [Module(path) for path in sorted((ROOT / "headlong").rglob("*.py"))]
MODULE_NAMES = {module.name for module in MODULES}


def test_files_are_short():
    assert not [module.name for module in MODULES if len(module.source.splitlines()) >= FILE_LINES]


def test_functions_are_short():
    long = []
    for module in MODULES:
        for node in module.functions:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if (node.end_lineno or first) - first + 1 >= FUNCTION_LINES:
                long.append(f"{module.at(node)} {node.name}")
    assert not long


def test_functions_take_few_parameters():
    """But kernels: what they are launched with has no other place to be."""
    many = []
    for module in MODULES:
        for node in module.functions:
            if any("triton.jit" in ast.unparse(each) for each in node.decorator_list):
                continue
            given = node.args
            names = [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            names += [argument.arg for argument in (given.vararg, given.kwarg) if argument]
            if len([name for name in names if name not in ("self", "cls")]) > PARAMETERS:
                many.append(f"{module.at(node)} {node.name}")
    assert not many


def test_environment_names_are_few():
    pattern = re.compile(
        r"""(?:environ(?:\.\w+\(|\[)|getenv\()\s*["'](\w+)["']|["'](\w+)["'] (?:not )?in os\.environ"""
    )
    names = {first or second for module in MODULES for first, second in pattern.findall(module.source)}
    assert len(names) <= ENVIRONMENT_NAMES, sorted(names)


def test_imports_have_no_cycles():
    graph = {
        module.name: {item.target for item in module.imports if not item.later and item.target in MODULE_NAMES}
        for module in MODULES
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


def test_imports_point_inward():
    wrong = []
    for module in MODULES:
        fitting = [ring for ring in RINGS if _is_within(module.name, ring)]
        if not fitting:
            continue
        now, later = RINGS[max(fitting, key=len)]
        for item in module.imports:
            allowed = now | later if item.later else now
            if item.target.split(".")[0] == "headlong" and not any(_is_within(item.target, ring) for ring in allowed):
                wrong.append(f"{module.path.relative_to(ROOT)}:{item.line} imports {item.target}")
    assert not wrong


def test_packages_stay_in_their_ring():
    wrong = []
    for module in MODULES:
        for item in module.imports:
            owner = OWNED.get(item.target.split(".")[0])
            if owner and not _is_within(module.name, owner):
                wrong.append(f"{module.path.relative_to(ROOT)}:{item.line} imports {item.target}")
    assert not wrong


def test_broad_excepts_stand_at_the_two_doors():
    broad = []
    for module in MODULES:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ExceptHandler) and module.name not in BROAD_EXCEPT:
                caught = ast.unparse(node.type) if node.type else "BaseException"
                if re.search(r"\b(Base)?Exception\b", caught):
                    broad.append(module.at(node))
    assert not broad


def test_no_other_package_is_patched():
    """No assignment to, or deletion of, an attribute of anything that was imported from elsewhere."""
    patched = []
    for module in MODULES:
        foreign = set(_foreign_names(module.tree))
        for node in ast.walk(module.tree):
            is_set = isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)
            is_call = isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr")
            if (is_set and _root(node) in foreign) or (is_call and _root(node.args[0]) in foreign):
                patched.append(f"{module.at(node)} {ast.unparse(node)}")
    assert not patched


def _foreign_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.asname or name.name.split(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and not str(node.module).startswith("headlong"):
            yield from (name.asname or name.name for name in node.names)


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def test_every_module_says_what_it_is():
    silent = [module.name for module in MODULES if module.source.strip() and not ast.get_docstring(module.tree)]
    assert not silent


def test_the_map_says_what_the_modules_say():
    ran = subprocess.run([sys.executable, ROOT / "scripts" / "map", "--check"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= README_LINES


def test_the_changelog_begins_with_this_version():
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert versions[0] == __version__
