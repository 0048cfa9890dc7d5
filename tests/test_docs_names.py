"""Files, headings, functions and modules that the documentation names are there."""

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from test_structure import HEIGHT

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text("utf-8")


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("https://", "mailto:")):
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            assert file.exists(), target
            assert not anchor or anchor in anchors(file), target


def found(name: str, *modules: Any) -> bool:
    """Whether one of some modules has ``function``, ``Class`` or ``Class.method``."""
    for thing in modules:
        for part in name.split("."):
            thing = getattr(thing, part, None)
        if thing is not None:
            return True
    return False


def module_of(file: str) -> Any:
    return importlib.import_module(file.removesuffix(".py").replace("/", "."))


def test_the_steps_of_the_architecture_are_where_it_says():
    rows = re.findall(r"^\|.*\|.*\|(.*)\|(.*\]\(\.\./cupyrec.*)\|$", ARCHITECTURE, re.MULTILINE)
    assert len(rows) > 20
    for functions, files in rows:
        modules = [module_of(file) for file in re.findall(r"\(\.\./(cupyrec/[\w/]+\.py)\)", files)]
        for name in re.findall(r"`([\w.]+)`", functions):
            assert found(name, *modules), name
        told = [name for _, name in re.findall(r"\[(\w+\.py)\]\(\S*?(\w+\.py)\)", files)]
        assert told == re.findall(r"\[(\w+\.py)\]", files)


def test_what_else_the_architecture_names_is_there():
    names = set(re.findall(r"`((?:\w+\.)+\w+)`", ARCHITECTURE)) - {"numpy.ndarray", "cupy.ndarray"}
    assert len(names) > 30
    for name in names:
        name = name.removeprefix("cupyrec.")
        file, _, rest = name.partition(".")
        if found(name, importlib.import_module("cupyrec")):
            continue
        if (ROOT / "cupyrec" / f"{file}.py").exists() or (ROOT / "cupyrec" / file).is_dir():
            module = importlib.import_module(f"cupyrec.{file}")
            assert not rest or found(rest, module), name
        else:  # a class of some module
            for file in re.findall(r"\(\.\./(cupyrec/[\w/]+\.py)\)", ARCHITECTURE):
                module_of(file)
            loaded = [sys.modules[m] for m in sorted(sys.modules) if m.startswith("cupyrec.")]
            assert found(name, *loaded), name


def test_layers_stand_in_their_order():
    rows = re.findall(r"^\| ((?:`\w+` ?)+) \| .* \|$", ARCHITECTURE.split("## Layers")[1], re.M)
    layers = [re.findall(r"\w+", row) for row in rows]
    end = next(i for i, names in enumerate(layers) if "cli" in names)
    heights = [[HEIGHT[name] for name in names] for names in layers[: end + 1]]
    assert len(heights) >= 15
    for lower, upper in zip(heights, heights[1:], strict=False):
        assert max(lower) < min(upper)
