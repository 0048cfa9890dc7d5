"""Every command of README and docs is one that its program takes: words, flags and files."""

import argparse
import configparser
import contextlib
import inspect
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from cupyrec import cli, config
from cupyrec.from_settings import MODELS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SHELL = {"export", ".", "curl", "kill", "apt-get", "sleep", "jupyter", "cd", "git"}


class Parsed(Exception):
    """A script has read its arguments, and need not do what they ask for."""


@pytest.fixture
def script(monkeypatch):
    """A function that lets a Python script read its arguments."""
    original = argparse.ArgumentParser.parse_args

    def parse(self, *arguments):
        original(self, *arguments)
        raise Parsed

    def run(file, *words):
        monkeypatch.setattr(sys, "argv", [str(file), *words])
        with monkeypatch.context() as patch, pytest.raises((Parsed, SystemExit)) as end:
            patch.setattr(argparse.ArgumentParser, "parse_args", parse)
            runpy.run_path(str(ROOT / file), run_name="__main__")
        if "must be installed" in str(end.value):  # by an extra that tests do without
            check_mention([file, *words])
        else:
            assert end.type is Parsed, [file, *words]

    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return run


def blocks(text: str) -> list[list[str]]:
    """The words of each command in fenced shell."""
    commands = []
    for language, block in re.findall(r"^ *```(\w*)\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE):
        starts = *SHELL, "cupyrec", "python", "pip", "bash", "mpirun"
        if language == "sh" or (language == "" and block.lstrip().startswith(starts)):
            told = ""
            for line in block.replace("\\\n", " ").splitlines():
                told += line + "\n"
                with contextlib.suppress(ValueError):  # a text in quotes goes on in the next line
                    commands.append(shlex.split(told, comments=True))
                    told = ""
    return [words for words in commands if words]


def mentions(text: str) -> list[list[str]]:
    """The words of each command within a line of prose; what it is given may be missing."""
    prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    starts = "cupyrec ", "python scripts/", "bash scripts/", "scripts/", "mpirun ", "pytest "
    found = [line for line in re.findall(r"`([^`]+)`", prose) if line.startswith(starts)]
    return [shlex.split(line) for line in found if " | " not in line]


def flags_of(words: list[str]) -> set[str]:
    """The flags of a subcommand of ``cupyrec``."""
    parser = cli._parser()
    for word in words:
        inner = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        if not inner or word.startswith("-") or word.isupper():  # any of them
            break
        assert word in inner[0].choices, words
        parser = inner[0].choices[word]
    return {flag for action in parser._actions for flag in action.option_strings}


def extras() -> set[str]:
    told = configparser.ConfigParser()
    told.read(ROOT / "setup.cfg", "utf-8")
    return set(told["options.extras_require"])


def check(words: list[str], script) -> None:
    """Fail where a command is not what its program takes."""
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    if "&" in words:  # in the background
        words = words[: words.index("&")]
    program, *words = words
    if program == "mpirun":
        at = next(i for i, word in enumerate(words) if word in ("cupyrec", "python"))
        assert set(words[:at]) - {"-n", "--oversubscribe"} <= set("N123456789"), words
        check(words[at:], script)
    elif program == "cupyrec":
        assert cli._parser().parse_args(words).command
    elif program == "pip":
        for name in re.findall(r"\[([\w,]+)\]", " ".join(words)):
            assert set(name.split(",")) <= extras(), name
    elif program == "python" and words[0] == "-m":
        assert words[1] in ("pip", "pytest", "doctest"), words
    elif program == "python":
        script(*words)
    elif program == "bash" or program.endswith(".sh"):
        assert (ROOT / (words[0] if program == "bash" else program)).is_file(), words
    elif program == "pytest":
        files = [word for word in words if word.startswith("tests/")]
        assert all((ROOT / file).is_file() for file in files), words
    else:
        assert program in SHELL, [program, *words]


def check_mention(words: list[str]) -> None:
    """Fail where a program, a subcommand or a flag is none."""
    told = {word.partition("=")[0].rstrip(",") for word in words if word.startswith("--")}
    if "cupyrec" in words:
        words = words[words.index("cupyrec") + 1 :]
        assert told - {"--oversubscribe"} <= flags_of(words), words
        return
    file = next((word for word in words if "/" in word), None)
    if file is not None:
        assert any(ROOT.glob(file)), words
        source = (ROOT / file).read_text("utf-8") if told else ""
        assert all(f'"{flag}"' in source for flag in told), words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_what_their_programs_take(page, script):
    text = page.read_text("utf-8")
    for words in blocks(text):
        check(words, script)
    for words in mentions(text):
        check_mention(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_are_settings(page):
    names = re.findall(r"--set\s+([a-z]+)\.(\w+)=", page.read_text("utf-8"))
    models = [set(inspect.signature(model).parameters) for model in MODELS.values()]
    for section, key in names:
        known = set(config.DEFAULTS[section])
        assert key in (known.union(*models) if section == "model" else known), (section, key)


def test_wrong_commands_are_seen(script):
    wrong = (
        "cupyrec trian", "cupyrec train --rows 3", "python scripts/chaos.py --run x", "rm -r /",
        "pip install '.[doc]'", "bash scripts/none.sh", "pytest tests/test_none.py",
    )  # fmt: skip
    for command in wrong:
        with pytest.raises((AssertionError, SystemExit)):
            check(shlex.split(command), script)
    for command in ("cupyrec trian", "cupyrec train --rows", "python scripts/chaos.py --kill"):
        with pytest.raises(AssertionError):
            check_mention(shlex.split(command))


def test_commands_are_found():
    page = (
        "```python\nx\n```\n`cupyrec data\nx` `--y`\n"
        "```sh\nexport A=1\ncupyrec train \\\n  --x # it's no\ncurl '{\n}'\n```"
    )
    curl = ["curl", "{\n}"]
    assert blocks(page) == [["export", "A=1"], ["cupyrec", "train", "--x"], curl]
    assert mentions(page) == [["cupyrec", "data", "x"]]


def test_every_bench_is_told():
    page = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    parts = "bench_peer_", "bench_exchange_ranks"  # which others start
    names = {path.name for path in (ROOT / "scripts").glob("bench_*.py")}
    told = set(re.findall(r"scripts/(bench_\w+\.py)", page))
    assert told == {name for name in names if not name.startswith(parts)}
