"""The rules of the tree: small functions that return complaints, each seen to complain."""

import ast
import collections
import fnmatch
import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

TOP = set(
    ".ci .clang-format .gitignore .pre-commit-config.yaml CHANGELOG.md CONTRIBUTING.md LICENSE"
    " README.md cupyrec docs kernels pyproject.toml ruff.toml scripts setup.cfg tests".split()
)
MODULE = re.compile(r"cupyrec/(.*/)?(?!__)\w+\.py")
MAX_LINES = 450

# Lower never imports higher; "cupyrec" is the namespace of cupyrec/__init__.py.
LAYERS = (
    "activity control_groups errors < loop_cache < cpu < cublaslt_library nvrtc < sim < arrays"
    " < bulk huge_pages interruption random kernel ragged scratch cublaslt streams timeline"
    " < autograd < graph ops < parallel < embedding < optim < nn < models"
    " < checkpoint checkpoint_checks checkpoint_deltas checkpoint_diff checkpoint_export"
    " checkpoint_files checkpoint_fits checkpoint_import checkpoint_reshard checkpoint_shards"
    " config data dense_work from_settings hardware inference interop measure_hardware metrics"
    " migrate plan progress report run_folder step_work table_sizes tensorboard testing"
    " training zipf < serving < cupyrec < checkpoint_commands cli commands data_commands"
    " device_flags doctor doctor_checks doctor_gpu_checks plan_commands resuming serve_commands"
    " __main__"
)
HEIGHT = {name: i for i, layer in enumerate(LAYERS.split(" < ")) for name in layer.split()}
READS_ONLY = {"data": {"activity", "errors", "cpu", "arrays", "ragged", "data"}}

ANYWHERE, ABOVE_MODELS = {"ml_dtypes", "numba", "numpy"}, {"pyarrow", "safetensors", "tqdm"}
IN_ONE_PLACE = {
    "arrays": {"cupy"},
    "cpu": {"threadpoolctl"},
    "cublaslt_library": {"cuda"},
    "doctor_checks": {"mpi4py", "threadpoolctl"},
    "doctor_gpu_checks": {"cupy"},
    "interop": {"torch"},
    "kernel": {"cupy"},
    "nvrtc": {"cuda", "cupy"},
    "parallel": {"mpi4py"},
    "report": {"matplotlib"},
    "serving": {"orjson", "prometheus_client", "simdjson", "starlette", "uvicorn", "uvloop"},
    "tensorboard": {"tensorboardX"},
}
COMMANDS = {"cli", "commands", "checkpoint_commands", "data_commands", "doctor", "plan_commands"}
LOOPS = {"loop", "exact_loop", "cpu.loop", "cpu.exact_loop", "cpu.exact_inline"}
AT_WORK = {  # what else they import in functions, cli for its speed, doctor as it may be broken
    "cupyrec.cli": {"cupyrec"},
    "cupyrec.doctor_checks": {"cupyrec", "numba", "numpy", "threadpoolctl"},
    "cupyrec.doctor_gpu_checks": {"cupyrec", "numpy"},
}
OPTIONAL = {"cuda", "cupy", "matplotlib", "mpi4py", "sklearn", "tensorboardX", "torch"}


# The tree


def tree_files() -> list[str]:
    """Files of the repository that .gitignore lets through; neither git nor a clone is needed."""
    ignored = [".git", *(line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split())]

    def walk(folder: Path) -> Iterator[str]:
        for path in sorted(folder.iterdir()):
            name = path.relative_to(ROOT).as_posix()
            if any(fnmatch.fnmatch(path.name, p) or f"/{name}" == p for p in ignored):
                continue
            if path.is_dir():
                yield from walk(path)
            else:
                yield name

    return list(walk(ROOT))


def strangers(files: list[str]) -> list[str]:
    """Names at the top of the tree that the design does not list, and names that say nothing."""
    tops = {file.split("/")[0] for file in files} - TOP
    vague = [f for f in files if Path(f).stem in {"base", "common", "helpers", "misc", "utils"}]
    return sorted(tops) + [file for file in vague if not file.endswith(".cuh")]


def lonely(files: list[str]) -> list[str]:
    """Modules without their test, kernels without their op."""
    modules = [f for f in files if MODULE.fullmatch(f)]
    kernels = [f for f in files if re.fullmatch(r"kernels/.*\.cu", f)]
    tests = [f"{file} has no tests/test_{Path(file).stem}.py" for file in modules]
    ops = [f"{file} has no cupyrec/ops/{Path(file).stem}.py" for file in kernels]
    return [text for text in tests + ops if text.split(" has no ")[1] not in files]


def twins(files: list[str]) -> list[str]:
    """Stems that two modules of cupyrec share."""
    count = collections.Counter(Path(file).stem for file in files if MODULE.fullmatch(file))
    return [stem for stem, n in count.items() if n > 1]


@pytest.mark.parametrize("rule", [strangers, lonely, twins])
def test_tree_keeps(rule: Callable) -> None:
    complaints = rule(tree_files())
    assert not complaints, "\n".join(complaints)


def test_tree_is_seen_whole() -> None:
    files = tree_files()
    assert {"LICENSE", ".ci/run", "cupyrec/errors.py", "kernels/__init__.py"} <= set(files)
    assert not [f for f in files if f.startswith((".git/", ".venv/")) or f.endswith(".pyc")]


@pytest.mark.parametrize(
    ("rule", "files", "complaints"),
    [
        (strangers, ["setup.py", "cupyrec/nn/utils.py"], ["setup.py", "cupyrec/nn/utils.py"]),
        (strangers, ["setup.cfg", "kernels/common.cuh", "docs/base/x.md"], []),
        (lonely, ["cupyrec/ops/x.py"], ["cupyrec/ops/x.py has no tests/test_x.py"]),
        (lonely, ["kernels/x.cu", "tests/test_x.py"], ["kernels/x.cu has no cupyrec/ops/x.py"]),
        (lonely, ["cupyrec/__init__.py", "cupyrec/ops/x.py", "tests/test_x.py"], []),
        (lonely, ["cupyrec/ops/x.py", "tests/test_x.py", "kernels/x.cu", "kernels/y.cuh"], []),
        (twins, ["cupyrec/nn/x.py", "cupyrec/ops/x.py"], ["x"]),
        (twins, ["cupyrec/nn/__init__.py", "cupyrec/ops/__init__.py", "tests/x.py"], []),
    ],
)
def test_tree_rule(rule: Callable, files: list[str], complaints: list[str]) -> None:
    assert rule(files) == complaints


def long_file(text: str) -> list[str]:
    lines = text.count("\n")
    return [f"{lines} lines, more than {MAX_LINES}"] if lines > MAX_LINES else []


def test_files_are_short() -> None:
    files = [f for f in tree_files() if f.endswith((".py", ".cu", ".cuh", ".sh"))]
    complaints = [f"{f}: {c}" for f in files for c in long_file((ROOT / f).read_text())]
    assert not complaints, "\n".join(complaints)


def test_long_file() -> None:
    assert long_file("x = 1\n" * 451) == ["451 lines, more than 450"]
    assert long_file("x = 1\n" * 450) == []


# What the source of one module says: rules of (module's dotted name, its syntax tree)


@functools.lru_cache(maxsize=1)  # a walk takes longer than what a rule asks of the nodes
def nodes(tree: ast.Module) -> list[ast.AST]:
    return list(ast.walk(tree))


def imports(module: str, tree: ast.Module) -> Iterator[str]:
    """Dotted names of what is imported; of ``from a import b`` that is a.b."""
    return (name for name, _ in lines_of_imports(module, tree))


def lines_of_imports(module: str, tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*start, *filter(None, [node.module])])
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def layer_of(name: str) -> str:
    """``cupyrec.ops.x.f`` is in ops; a name that is no layer comes from the namespace itself."""
    second = [*name.split("."), "cupyrec"][1]
    return second if second in HEIGHT else "cupyrec"


def upward_imports(module: str, tree: ast.Module) -> list[str]:
    own = [*module.split("."), "cupyrec"][1]
    if own not in HEIGHT:
        return [f"'{own}' has no place among LAYERS"]
    names = [n for n in imports(module, tree) if n.split(".")[0] == "cupyrec"]
    targets = [(n, layer_of(n)) for n in names if n != "cupyrec.__version__"]
    return [
        f"arrow upward to {name}"
        for name, layer in targets
        if HEIGHT[layer] > HEIGHT[own] or layer not in READS_ONLY.get(own, HEIGHT)
    ]


def foreign_imports(module: str, tree: ast.Module) -> list[str]:
    own = [*module.split("."), "cupyrec"][1]
    allowed = ANYWHERE | IN_ONE_PLACE.get(own, set()) | sys.stdlib_module_names | {"cupyrec"}
    if HEIGHT.get(own, 0) > HEIGHT["models"]:
        allowed |= ABOVE_MODELS
    return [f"imports {n}" for n in imports(module, tree) if n.split(".")[0] not in allowed]


def nested_imports(module: str, tree: ast.Module) -> list[str]:
    functions = [
        range(n.lineno, n.end_lineno + 1)
        for n in nodes(tree)
        if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    every = lines_of_imports(module, tree)
    names = {name for name, line in every if any(line in lines for lines in functions)}
    names -= {n for n in names if n.startswith("cupyrec.sim")}  # an extra, and 0.7 s to import
    allowed = OPTIONAL | AT_WORK.get(module, set())
    hidden = [f"imports {n} inside a function" for n in names if n.split(".")[0] not in allowed]
    if module.startswith("cupyrec."):
        hidden += [
            f"calls {name}"
            for name in called(nodes(tree))
            if name in {"import_module", "__import__"}
        ]
    return hidden


def called(found: Iterable[ast.AST]) -> Iterator[str]:
    """Last part of the name of each function that is called."""
    for node in found:
        if isinstance(node, ast.Call):
            yield getattr(node.func, "id", getattr(node.func, "attr", ""))


def sentence(node: ast.expr) -> str | None:
    """Text of a string expression, {} for what is filled in; None if it is no string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(sentence(part) or "{}" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return f"{sentence(node.left) or '{}'}{sentence(node.right) or '{}'}"
    return None


def unclear_errors(module: str, tree: ast.Module) -> list[str]:
    """Errors are sentences *where: rule, values.*"""
    complaints = []
    for node in nodes(tree):
        error = node.exc if isinstance(node, ast.Raise) else None
        name = getattr(getattr(error, "func", error), "id", None)
        if name in {"ValueError", "TypeError"}:
            text = sentence(error.args[0]) if getattr(error, "args", None) else ""
            if text is not None and not re.fullmatch(r"\S.*?: \S.*\.", text, re.DOTALL):
                complaints.append(f"{name}({text!r}) is no 'where: rule, values.'")
    return complaints


def output(module: str, tree: ast.Module) -> list[str]:
    """The library logs to "cupyrec" and never prints; the CLI writes its results."""
    calls = [node for node in nodes(tree) if isinstance(node, ast.Call)]
    names = [ast.unparse(call.func) for call in calls]
    prints = [n for n in names if n == "print" and module[8:] not in COMMANDS]
    loggers = [ast.unparse(c) for c in calls if ast.unparse(c.func).endswith("getLogger")]
    return prints + [text for text in loggers if text != "logging.getLogger('cupyrec')"]


def unhinted(module: str, tree: ast.Module) -> list[str]:
    """Public functions, and public methods of public classes, without type hints.

    A loop that Numba specialises by its arguments is left out: its docstring names the types.
    """
    owners = [tree] + [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name[0] != "_"]
    complaints = []
    for function in (f for owner in owners for f in owner.body if isinstance(f, ast.FunctionDef)):
        private = function.name[0] == "_" and function.name != "__init__"
        if private or any(ast.unparse(d) in LOOPS for d in function.decorator_list):
            continue
        a = function.args
        every = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, [a.vararg, a.kwarg])]
        bare = [x.arg for x in every if x.annotation is None and x.arg not in {"self", "cls"}]
        if function.returns is None and function.name != "__init__":
            bare.append("return")
        if bare:
            complaints.append(f"{function.name} has no type for {', '.join(bare)}")
    return complaints


def idle_tests(module: str, tree: ast.Module) -> list[str]:
    """Tests, and the helpers they lean on, without an assertion that can fail."""
    complaints = []
    for node in nodes(tree):
        if isinstance(node, ast.FunctionDef) and re.match(r"(test|check|assert)_", node.name):
            body = list(ast.walk(node))
            asserts = [
                n
                for n in body
                if isinstance(n, ast.Assert) and not isinstance(n.test, (ast.Constant, ast.Tuple))
            ]
            leans = [n for n in called(body) if re.match(r"raises$|warns$|(check|assert)_", n)]
            if not asserts + leans:
                complaints.append(f"{node.name} asserts nothing")
    return complaints


def modules(*folders: str) -> dict[str, str]:
    """Dotted name -> path of each Python file below the folders."""
    files = [f for f in tree_files() if f.endswith(".py") and f.split("/")[0] in folders]
    names = [f.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for f in files]
    return dict(zip(names, files, strict=True))


RULES = {
    upward_imports: {"cupyrec"},
    foreign_imports: {"cupyrec"},
    nested_imports: {"cupyrec", "kernels", "scripts", "tests"},
    unclear_errors: {"cupyrec"},
    output: {"cupyrec"},
    unhinted: {"cupyrec"},
    idle_tests: {"tests"},
}


@pytest.fixture(scope="module")
def complaints() -> dict[Callable, list[str]]:
    """Of each rule; a file is parsed once for all of them."""
    found: dict[Callable, list[str]] = {rule: [] for rule in RULES}
    for name, file in modules(*set().union(*RULES.values())).items():
        tree = ast.parse((ROOT / file).read_text(), file)
        for rule, folders in RULES.items():
            if name.split(".")[0] in folders:
                found[rule] += [f"{name}: {complaint}" for complaint in rule(name, tree)]
    return found


@pytest.mark.parametrize("rule", RULES)
def test_source_keeps(rule: Callable, complaints: dict[Callable, list[str]]) -> None:
    assert not complaints[rule], "\n".join(complaints[rule])


@pytest.mark.parametrize(
    ("rule", "module", "source"),
    [
        (upward_imports, "cupyrec.ops.x", "from cupyrec import nn"),
        (upward_imports, "cupyrec.ops.x", "from cupyrec.nn.mlp import FusedMLP"),
        (upward_imports, "cupyrec.ops.x", "from ..nn import mlp"),
        (upward_imports, "cupyrec.ops.x", "import cupyrec.training"),
        (upward_imports, "cupyrec.ops.x", "import cupyrec"),
        (upward_imports, "cupyrec.training", "from cupyrec import relu"),
        (upward_imports, "cupyrec.errors", "def f():\n    from cupyrec import cpu"),
        (upward_imports, "cupyrec.data.tsv", "from cupyrec import nn"),
        (upward_imports, "cupyrec.data.tsv", "from cupyrec.training import fit"),
        (upward_imports, "cupyrec", "from cupyrec import cli"),
        (upward_imports, "cupyrec.novel", "import os"),
        (foreign_imports, "cupyrec.ops.x", "import cupy"),
        (foreign_imports, "cupyrec.ops.x", "from mpi4py import MPI"),
        (foreign_imports, "cupyrec.nn.x", "import pyarrow.csv"),
        (foreign_imports, "cupyrec.nn.x", "import threadpoolctl"),
        (foreign_imports, "cupyrec.training", "import torch"),
        (nested_imports, "cupyrec.nn.x", "def f():\n    import json"),
        (
            nested_imports,
            "cupyrec.nn.x",
            "class A:\n    def f(self):\n        from cupyrec import ops",
        ),
        (nested_imports, "cupyrec.nn.x", "m = importlib.import_module('json')"),
        (nested_imports, "cupyrec.cli", "def f():\n    import pyarrow"),
        (nested_imports, "tests.test_x", "async def f():\n    import json"),
        (unclear_errors, "cupyrec.x", "raise ValueError"),
        (unclear_errors, "cupyrec.x", "raise ValueError()"),
        (unclear_errors, "cupyrec.x", "raise TypeError('wrong type')"),
        (unclear_errors, "cupyrec.x", "raise TypeError('f: must be int')"),
        (unclear_errors, "cupyrec.x", "raise ValueError(f'{where} must be {x}.')"),
        (unclear_errors, "cupyrec.x", "raise ValueError('f: ' + text)"),
        (output, "cupyrec.training", "def f():\n    print('loss')"),
        (output, "cupyrec.training", "log = logging.getLogger(__name__)"),
        (output, "cupyrec.cli", "log = logging.getLogger()"),
        (unhinted, "cupyrec.x", "def f(x) -> int: ..."),
        (unhinted, "cupyrec.x", "def f(x: int): ..."),
        (unhinted, "cupyrec.x", "def f(*xs, **ys) -> int: ..."),
        (unhinted, "cupyrec.x", "class A:\n    def __init__(self, x): ..."),
        (unhinted, "cupyrec.x", "class A:\n    def f(self): ..."),
        (idle_tests, "tests.test_x", "def test_f():\n    f()"),
        (idle_tests, "tests.test_x", "def test_f():\n    assert True"),
        (idle_tests, "tests.test_x", "def test_f():\n    assert (f(), 'never fails')"),
        (idle_tests, "tests.test_x", "class TestF:\n    def test_f(self):\n        f()"),
        (idle_tests, "tests.test_x", "def check_f():\n    f()"),
    ],
)
def test_source_rule_catches(rule: Callable, module: str, source: str) -> None:
    assert len(rule(module, ast.parse(source))) == 1


@pytest.mark.parametrize(
    ("rule", "module", "source"),
    [
        (
            upward_imports,
            "cupyrec.ops.x",
            "from cupyrec import errors\nfrom cupyrec.ops.y import f",
        ),
        (upward_imports, "cupyrec.checkpoint", "from cupyrec import __version__, data"),
        (upward_imports, "cupyrec.cli", "import cupyrec\nfrom cupyrec import fit, training"),
        (upward_imports, "cupyrec.data.tsv", "from cupyrec import cpu\nfrom .schema import Schema"),
        (upward_imports, "cupyrec", "from cupyrec.training import fit"),
        (
            foreign_imports,
            "cupyrec.ops.x",
            "import os\nimport numpy as np\nfrom numba.core import event",
        ),
        (foreign_imports, "cupyrec.parallel.world", "def world():\n    from mpi4py import MPI"),
        (foreign_imports, "cupyrec.arrays", "import cupy"),
        (foreign_imports, "cupyrec.data.tsv", "import pyarrow.csv"),
        (nested_imports, "cupyrec.arrays", "import json\ndef f():\n    import cupy"),
        (nested_imports, "cupyrec.cli", "def train():\n    from cupyrec import training"),
        (nested_imports, "cupyrec", "def __getattr__(name):\n    importlib.import_module(name)"),
        (unclear_errors, "cupyrec.x", "raise ValueError(f'{where}: {name!r} must be 1, got {x}.')"),
        (unclear_errors, "cupyrec.x", "raise TypeError('f: ' f'got {x}' '.')"),
        (unclear_errors, "cupyrec.x", "raise ValueError(message)"),
        (unclear_errors, "cupyrec.x", "raise"),
        (unclear_errors, "cupyrec.x", "raise AttributeError('no such name')"),
        (output, "cupyrec.cli", "print(result)\nlog = logging.getLogger('cupyrec')"),
        (unhinted, "cupyrec.x", "def _f(x): ...\nclass _A:\n    def f(self, x): ..."),
        (unhinted, "cupyrec.x", "@cpu.exact_loop\ndef f(x): ..."),
        (
            unhinted,
            "cupyrec.x",
            "class A:\n    def __init__(self, x: int): ...\n    def __len__(self): ...",
        ),
        (
            idle_tests,
            "tests.test_x",
            "def test_f():\n    with pytest.raises(ValueError):\n        f()",
        ),
        (idle_tests, "tests.test_x", "def test_f():\n    np.testing.assert_array_equal(f(), 1)"),
        (
            idle_tests,
            "tests.test_x",
            "def check_f():\n    assert f()\ndef test_f():\n    check_f()",
        ),
    ],
)
def test_source_rule_allows(rule: Callable, module: str, source: str) -> None:
    assert rule(module, ast.parse(source)) == []
