"""The kernel that docs/kernels.md adds from zero: it builds, passes its tests, and is judged so."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cupyrec import graphed, kernel, nn

ROOT = Path(__file__).parents[1]
WHOLE = (ROOT / "docs" / "kernels.md").read_text("utf-8")
PAGE = WHOLE.split("## A kernel from zero")[1].split("\n## ")[0]


def blocks(language: str, page: str = PAGE) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the repository with the page's four files."""
    pytest.importorskip("cupy", reason="CuPy brings NVRTC: pip install cupyrec[sim]")
    tree = tmp_path_factory.mktemp("tree")
    for folder in ("cupyrec", "kernels", "scripts"):
        left_out = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tree / folder, ignore=left_out)
    for file in ("setup.cfg", "tests/conftest.py", "tests/oracle.py"):
        (tree / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, tree / file)
    op, test, case = blocks("python")
    (cuda,) = blocks("cuda")
    named = dict.fromkeys(re.findall(r"`([\w/]+row_squares\.(?:py|cu))`", PAGE))
    for file, text in zip(named, (op, cuda, test), strict=True):
        (tree / file).write_text(text, "utf-8")
    with (tree / "scripts" / "kernel_cases.py").open("a", encoding="utf-8") as cases:
        cases.write("\n\n" + case)
    return tree


def run(tree: Path, number: int) -> str:
    """What a command of the page prints in the copy."""
    (shell,) = blocks("shell")
    program, *words = shlex.split(shell.splitlines()[number], comments=True)
    pytest = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    command = [sys.executable, *(pytest if program == "pytest" else []), *words]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    result = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_its_tests_pass(tree):
    told = run(tree, 0)
    passed = int(re.search(r"(\d+) passed", told)[1])
    assert passed > 40, told
    assert "failed" not in told


def test_it_costs_what_the_page_says(tree):
    wide, narrow = json.loads(run(tree, 1))
    for row in (wide, narrow):
        assert row["bytes_ratio"] == 1
        assert row["bank_conflicts"] == row["spills"] == 0
    assert (wide["bound"], wide["in_flight_kb"]) == ("latency", 8)
    assert round(narrow["sectors_ratio"], 2) == 1.41


MISTAKES = [
    ("    if (row >= rows) return;\n", ""),
    ("d < width;", "d <= width;"),
    ("total = 0.0f", "total = out[row]"),
    ("if (lane == 0) out", "out"),
    ("__shfl_xor_sync(FULL,", "__shfl_xor_sync(1,"),
    ("    for (int step", "    __syncthreads();\n    for (int step"),
]
SENTENCES = re.findall(r"^\| .*`.* \| (.* at row_squares.*) \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("mistake", "said"), [*zip(MISTAKES, SENTENCES, strict=True)])
def test_the_simulator_sees_each_mistake(tree, sim, monkeypatch, mistake, said):
    monkeypatch.setattr(kernel, "folder", lambda: tree / "kernels")
    text = kernel.source("row_squares.cu")
    assert text.count(mistake[0]) >= 1
    given = sim.asarray(np.ones((10, 40), np.float32)), sim.empty(10, np.float32)
    sizes = np.int64(10), np.int32(40)
    name = "row_squares_forward"
    right = sim.run(text, name, grid=2, block=256, args=(*given, *sizes))
    assert (right.faults, given[1].get().tolist()) == ([], [40.0] * 10)
    given = given[0], sim.empty(10, np.float32)
    wrong = sim.run(text.replace(*mistake), name, grid=2, block=256, args=(*given, *sizes))
    assert str(wrong.faults[0]) == f"{name}: {said}"


def test_the_method_that_is_replayed(sim):
    """The page shows it as the body of a class; its outputs are those of the plain one."""
    (body,) = blocks("python", WHOLE.split("## Graphs")[1])
    methods: dict = {"graphed": graphed}
    exec(compile(body, "kernels.md", "exec"), methods)
    layers = dict(
        bottom=nn.FusedMLP(2, (4,), 3), embedding=nn.MultiTableEmbedding(2, 3, seed=1),
        interaction=nn.FusedDotInteraction(), top=nn.FusedMLP(6, (), 1),
    )  # fmt: skip
    model = type("Model", (nn.Module,), {n: methods[n] for n in ("forward", "_towers")})()
    vars(model).update(layers)
    dense, ids = np.ones((5, 2), np.float32), np.arange(10).reshape(5, 2)
    plain = model(dense, ids).numpy()
    assert plain.shape == (5, 1)
    model.to("sim")
    for _ in range(4):
        out = model(sim.asarray(dense), sim.asarray(ids))
        np.testing.assert_allclose(out.numpy(), plain, 1e-5, 1e-6)
        out.sum().backward()
