"""Arrows go one way: doors -> loops -> pure -> wire, and doors -> edges -> pure -> wire. Help is quick."""

import ast
import resource
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

import wire

CHECKOUT = Path(wire.__file__).parents[1]
PACKAGES = ("wire", "producer", "worker")

STDLIB = frozenset(sys.stdlib_module_names)
TORCH = ("torch", "transformers")
ENGINE, QUEUE = "worker.engine", "worker.queue"
PURE_ENGINE = tuple(f"{ENGINE}.{name}" for name in ("plan", "prompt", "task"))
PURE = tuple(f"worker.{name}" for name in ("drain", "intake", "batch", "ports", "observe.report"))

# Who may import nothing else than this, beside the standard library; inside functions neither.
ALLOWED = {
    "wire": ("wire", "msgspec"),
    "producer": ("producer", "wire", "redis", "rq", "click", "rich", "msgspec"),
}
# Who may not import what, not even inside a function or for its types. (`wire.Keys` is `wire.keys` re-exported.)
FORBIDDEN = {
    ENGINE: ("redis", QUEUE, "wire.keys", "wire.Keys", "producer"),
    QUEUE: (*TORCH, ENGINE, "producer"),
}
EXCEPTIONS = {QUEUE: PURE_ENGINE}
# Whose import may not cause what, by however long a way.
NEVER_CAUSES = {**dict.fromkeys(PURE, ("redis", *TORCH)), ENGINE: ("redis",), QUEUE: TORCH, "producer": TORCH}

# The time help may take, in seconds of processor time, so that a busy machine does not matter. It takes a tenth of it.
HELP_CPU_S = 3.0


@dataclass(frozen=True)
class Import:
    """One name that a module imports: `worker.engine.plan.Batch`, say. `runs`: importing the module does it."""

    target: str
    line: int
    runs: bool


def is_under(name: str, parents: Iterable[str]) -> bool:
    """Tell whether a dotted name is one of the parents, or inside one."""
    return any(name == parent or name.startswith(f"{parent}.") for parent in parents)


def imports_of(path: Path, package: str) -> Iterator[Import]:
    """Find every import of a file, those inside functions and those for types too."""

    def visit(node: ast.AST, runs: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, runs) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            home = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*home, *([node.module] if node.module else [])])
            yield from (Import(f"{base}.{alias.name}", node.lineno, runs) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            yield from (Import(str(arg.value), node.lineno, runs) for arg in node.args if isinstance(arg, ast.Constant))
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from (found for child in node.body for found in visit(child, False))
            yield from (found for child in node.orelse for found in visit(child, runs))
            return
        deferred = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, runs and not deferred)

    return visit(ast.parse(path.read_text("utf-8")), True)


def read_project(root: Path) -> dict[str, list[Import]]:
    """Map every module of the three packages to its imports."""
    modules = {}
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        modules[name] = list(imports_of(path, name if is_package else name.rpartition(".")[0]))
    return modules


def module_of(target: str, modules: Mapping[str, object]) -> str | None:
    """Name the project's module that an imported name is, or lies in."""
    while target and target not in modules:
        target = target.rpartition(".")[0]
    return target or None


def parents_of(module: str) -> list[str]:
    """Name the packages around a module; they are run before it."""
    parts = module.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


def caused_by(module: str, modules: Mapping[str, list[Import]]) -> set[str]:
    """Name everything that is imported when `module` is: the project's modules and foreign names."""
    seen: set[str] = set()
    waiting = [module, *parents_of(module)]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for found in modules.get(name, []):
            if found.runs:
                inside = module_of(found.target, modules)
                waiting += [inside, *parents_of(inside)] if inside else [found.target]
    return seen


def cycles(modules: Mapping[str, list[Import]]) -> Iterator[str]:
    """Name the modules that import themselves by way of others."""
    edges: dict[str, set[str]] = {name: set() for name in modules}
    for name, imports in modules.items():
        for target in (module_of(found.target, modules) for found in imports if found.runs):
            # That a package is run before its own modules is no arrow of theirs.
            around = [parent for parent in parents_of(target or "") if parent != name and not is_under(name, [parent])]
            edges[name] |= {one for one in (target, *around) if one and one in modules}
    for start in modules:
        seen, waiting = set(), list(edges[start])
        while waiting:
            if (name := waiting.pop()) not in seen:
                seen.add(name)
                waiting += edges[name]
        if start in seen:
            yield start


def reversed_arrows(root: Path) -> list[str]:
    """Say what is wrong with the imports below `root`, one line a fault."""
    modules = read_project(root)
    faults = []
    for name, imports in modules.items():
        for found in imports:
            where = f"{name}:{found.line} imports {found.target}"
            for who, allowed in ALLOWED.items():
                if is_under(name, [who]) and not is_under(found.target, [*allowed, *STDLIB]):
                    faults.append(f"{where}, {who} may not")
            for who, forbidden in FORBIDDEN.items():
                excepted = is_under(found.target, EXCEPTIONS.get(who, ()))
                if is_under(name, [who]) and is_under(found.target, forbidden) and not excepted:
                    faults.append(f"{where}, {who} may not")
            if found.runs and is_under(found.target, TORCH) and not is_under(name, [ENGINE]):
                faults.append(f"{where} at module level, outside of {ENGINE}")
        for who, never in NEVER_CAUSES.items():
            caused = {one for one in caused_by(name, modules) if is_under(one, never)} if is_under(name, [who]) else ()
            faults += [f"importing {name} causes {one}, {who} may not" for one in sorted(caused)]
    return faults + [f"{name} is in a cycle of imports" for name in cycles(modules)]


def test_no_arrow_is_reversed() -> None:
    """wire knows msgspec alone, producer no worker, engine no Redis, queue no torch, the loop neither; no cycles."""
    assert reversed_arrows(CHECKOUT) == []


def test_every_module_named_here_is_there() -> None:
    """The rules are about modules that exist: a renamed one cannot slip out of them."""
    modules = read_project(CHECKOUT)
    named = {*ALLOWED, *FORBIDDEN, *NEVER_CAUSES, *PURE_ENGINE}
    assert named <= set(modules)


# A small project without a fault.
SOUND = {
    "wire/__init__.py": "import msgspec, json",
    "producer/push.py": "import redis\nfrom wire import Ticket",
    "worker/drain.py": "import worker.ports\ndef f():\n    import redis",
    "worker/ports.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\nelse:\n    import json",
    "worker/observe/report.py": "from wire import Label",
    "worker/queue/verbs.py": "import redis\nfrom worker.engine.plan import Batch",
    "worker/engine/plan.py": "import json",
    "worker/engine/model.py": "import torch\nfrom worker.ports import Scored",
    "worker/light.py": "def f():\n    import transformers",
    "worker/heavy.py": "from worker.engine import model",
    "worker/far.py": "from worker.nearer import x",
    "worker/nearer.py": "from redis import Redis",
    "worker/one.py": "",
    "worker/two.py": "from worker.one import x",
}


@pytest.mark.parametrize(
    ("file", "source", "fault"),
    [
        ("wire/new.py", "def f():\n    import redis", "wire.new:2 imports redis, wire may not"),
        ("wire/new.py", "from worker import light", "wire.new:1 imports worker.light, wire may not"),
        ("producer/new.py", "from worker.light import f", "producer.new:1 imports worker.light.f, producer may not"),
        ("producer/new.py", "import torch.nn", "producer.new:1 imports torch.nn, producer may not"),
        (
            "worker/engine/new.py",
            "async def f():\n    from redis import Redis",
            "imports redis.Redis, worker.engine may",
        ),
        ("worker/engine/new.py", "from ..queue import verbs", "imports worker.queue.verbs, worker.engine may not"),
        ("worker/engine/new.py", "from wire import Keys", "imports wire.Keys, worker.engine may not"),
        ("worker/engine/new.py", "import importlib\nimportlib.import_module('redis')", "engine.new:2 imports redis,"),
        (
            "worker/queue/new.py",
            "class C:\n    from worker.engine import Classifier",
            "Classifier, worker.queue may not",
        ),
        ("worker/queue/new.py", "import worker.heavy", "importing worker.queue.new causes torch, worker.queue may not"),
        (
            "worker/drain.py",
            "from worker.far import x",
            "importing worker.drain causes redis.Redis, worker.drain may not",
        ),
        ("worker/observe/report.py", "import worker.heavy", "importing worker.observe.report causes torch"),
        ("worker/__init__.py", "import redis", "importing worker.ports causes redis, worker.ports may not"),
        ("worker/new.py", "try:\n    import transformers\nfinally: ...", "worker.new:2 imports transformers at module"),
        ("worker/one.py", "import worker.two", "worker.two is in a cycle of imports"),
    ],
)
def test_a_planted_fault_is_found(tmp_path: Path, file: str, source: str, fault: str) -> None:
    """The checker can fail: each rule, broken in a small project of its own, is reported."""
    for name, text in SOUND.items():
        place = tmp_path / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    assert reversed_arrows(tmp_path) == []
    (tmp_path / file).write_text(source)
    assert any(fault in line for line in reversed_arrows(tmp_path)), reversed_arrows(tmp_path)


@pytest.mark.parametrize(
    "code",
    [
        "import producer",
        *(
            f"import sys; sys.argv[1:] = {arguments}; from worker.cli import main\ntry: main()\nexcept SystemExit: pass"
            for arguments in (["--help"], ["work", "--help"], ["push", "--help"])
        ),
    ],
)
def test_what_must_be_quick_leaves_torch_alone(code: str) -> None:
    """`import producer` and the help of every command end without torch in memory, and soon."""
    code += "\nimport sys\nprint('LOADED', sorted({'torch', 'transformers'} & set(sys.modules)))"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stdout.endswith("LOADED []\n"), done.stdout + done.stderr
    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < HELP_CPU_S
