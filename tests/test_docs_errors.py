"""docs/troubleshooting.md quotes errors as they are: what it quotes stands in the source."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
#: Each list item that is a sentence in code.
QUOTES = [quote for _, quote in re.findall(r"^- (``?)(?!`)(.+)\1$", PAGE, re.MULTILINE)]


def said(tree: ast.AST) -> Iterator[str]:
    """The texts in a source; ``…`` stands for what is put into them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
            yield "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%[-\d.]*[a-z]", "…", node.value)


@pytest.fixture(scope="module")
def texts():
    files = sorted((ROOT / "cupyrec").rglob("*.py"))
    texts = {text for file in files for text in said(ast.parse(file.read_text("utf-8")))}
    shell = (ROOT / "scripts" / "venv.sh").read_text("utf-8")
    strings = re.findall(r'"((?:[^"\\]|\\.)*)"', shell)
    return texts | {re.sub(r"\$\((?:[^()]|\([^()]*\))*\)|\$\w+", "…", text) for text in strings}


def is_said(quote: str, texts: set[str]) -> bool:
    """Whether a text has the quote's parts, one behind the other, or ends as it does.

    A rule such as "must be a finite number" stands by itself, and where it is put into a sentence.
    """
    parts = [part.strip(" .:,") for part in quote.split("…")]
    parts = [part for part in parts if len(part) > 3]
    assert parts, quote
    joined = re.compile(".*?".join(map(re.escape, parts)), re.DOTALL)
    if any(joined.search(text) for text in texts):
        return True
    rule = max((part.removesuffix(", got") for part in parts), key=len)
    return any(text == rule for text in texts)


@pytest.mark.parametrize("quote", QUOTES)
def test_a_quoted_error_is_one(texts, quote):
    assert is_said(quote, texts)


def test_many_are_quoted():
    assert len(QUOTES) > 60
    assert len(set(QUOTES)) == len(QUOTES)


def test_what_is_not_said_is_seen(texts):
    assert is_said("fit: 'optimizer' must update parameters of 'model', got none of them.", texts)
    assert is_said("RunFolder: '…' must have one writer, got another", texts)
    assert not is_said("fit: 'optimizer' must update parameters of the model", texts)
    assert not is_said("RunFolder: '…' must have two writers", texts)
    assert not is_said("…: must be a finite integer, got ….", texts)
