"""Every kernel's source opens by saying what it does, who does it, and what was tried."""

import re

import pytest

from cupyrec import kernel

HEADINGS = ["What", "Who does what", "Assumes", "Moves", "Tried"]


def headings(text: str) -> list[str]:
    """Complaints on the comment at the top: each heading once, in order, with something behind."""
    top = re.match(r"(//.*\n)*", text)[0]
    found = re.findall(rf"^// ({'|'.join(HEADINGS)}): *\S", top, re.MULTILINE)
    return [] if found == HEADINGS else [f"opens with {found}, not {HEADINGS}"]


def test_kernels_explain_themselves():
    files = sorted(kernel.folder().glob("*.cu"))
    assert len(files) >= 10
    complaints = [f"{f.name}: {c}" for f in files for c in headings(f.read_text())]
    assert not complaints, "\n".join(complaints)


GOOD = "// What: a\n// Who does what: b\n//   c\n// Assumes: d\n// Moves: e\n// Tried: f\n"


def test_good_headings():
    assert headings(GOOD + '#include "common.cuh"\n') == []


@pytest.mark.parametrize(
    "text",
    [
        GOOD.replace("// Tried: f\n", ""),
        GOOD.replace("Assumes", "Supposes"),
        GOOD.replace("// Moves: e\n// Tried: f\n", "// Tried: f\n// Moves: e\n"),
        GOOD.replace(": d", ":"),
        GOOD + "// Tried: g\n",
        "\n" + GOOD,
        "",
    ],
)
def test_bad_headings(text):
    assert len(headings(text)) == 1
