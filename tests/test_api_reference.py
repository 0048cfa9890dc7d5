"""The API reference is made without a complaint, and leaves no public name out."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "api_reference.sh"
NAMED = re.findall(r"cupyrec[.\w]*", SCRIPT.read_text("utf-8").partition("--output-directory")[2])


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The folder of the reference."""
    folder = tmp_path_factory.mktemp("reference") / "api"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    command = ["bash", SCRIPT, folder]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    return folder


def page_of(folder: Path, module: str) -> str:
    return (folder / f"{module.replace('.', '/')}.html").read_text("utf-8")


def test_every_public_name_has_its_place(pages):
    namespace = importlib.import_module("cupyrec")
    modules = [*NAMED, *(f"cupyrec.{name}" for name in namespace._MODULES)]
    for module in modules:
        page = page_of(pages, module)
        names = getattr(importlib.import_module(module), "__all__", ())
        told = set(re.findall(r' id="([\w.]+)"', page)) | set(re.findall(r"/(\w+)\.html", page))
        assert set(names) - told == set(), module


def test_the_index_leads_to_every_module(pages):
    index = (pages / "index.html").read_text("utf-8")
    assert {f"{name.replace('.', '/')}.html" for name in NAMED} <= set(
        re.findall(r'href="(?:\./)?([\w/]+\.html)"', index)
    )


def test_formulas_examples_and_arguments_look_as_they_are_meant(pages):
    page = page_of(pages, "cupyrec.ops.cross_matrix")
    assert "<pre><code>z = x @ weight.T + bias\ny = x0 * z + x\n" in page
    assert "<strong>weight</strong> ((N, N) array or Tensor of the same dtype):" in page
    assert re.search(
        r'class="pdoc-code codehilite">\s*<pre><span></span><code><span class="gp">', page
    )


def test_named_tuples_tell_each_field_once(pages):
    assert "Alias for field number" not in page_of(pages, "cupyrec.embedding")
