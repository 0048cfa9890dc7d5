import copy
import math
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import sentence

from cupyrec.config import DEFAULTS, override, parse_setting, read, to_toml


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("a.b=1", 1),
        ("a.b = 1.5", 1.5),
        ("a.b=1e-3", 0.001),
        ("a.b=true", True),
        ("a.b=[64, 32]", [64, 32]),
        ("a.b=[]", []),
        ('a.b="1"', "1"),
        ("a.b=adam", "adam"),
        ("a.b=x=y", "x=y"),
        ("a.b=", ""),
        ("a.b=True", "True"),  # TOML's is lower case; the type check tells
    ],
)
def test_a_setting_is_toml_or_else_a_string(setting, value):
    assert parse_setting(setting) == {"a": {"b": value}}


@pytest.mark.parametrize("setting", ["", "a", "a.b", "a=1", ".b=1", "a.=1", "=1", "a b"])
def test_what_is_no_setting(setting):
    text = f"config: a setting must be SECTION.KEY=VALUE, got '{setting}'."
    with pytest.raises(ValueError, match=sentence(text)):
        parse_setting(setting)


def test_later_changes_win_and_defaults_stay():
    before = copy.deepcopy(DEFAULTS)
    changes = [
        {"optimizer": {"lr": 1, "name": "sgd"}, "training": {"epochs": 5}},
        {"optimizer": {"lr": 0.5}},
        {},
        {"training": {}},
    ]
    got = override(DEFAULTS, changes)
    assert before == DEFAULTS
    assert got["optimizer"] == DEFAULTS["optimizer"] | {"lr": 0.5, "name": "sgd"}
    assert got["training"] == DEFAULTS["training"] | {"epochs": 5}
    whole = override(DEFAULTS, changes[:1])["optimizer"]["lr"]
    assert (whole, type(whole)) == (1.0, float)
    assert override({"m": {"top": (64,)}}, [{"m": {"top": [1, 2]}}]) == {"m": {"top": [1, 2]}}
    with pytest.raises(
        TypeError, match=sentence("config: [m] top must be a list such as [64], got 3.")
    ):
        override({"m": {"top": (64,)}}, [{"m": {"top": 3}}])


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (
            {"optimiser": {}}, ValueError,
            "config: a section must be known (did you mean 'optimizer'?), got 'optimiser'.",
        ),
        (
            {"xyz": {}}, ValueError,
            "config: a section must be known "
            "(data, embedding, evaluation, "
            "exchange, model, optimizer, training), got 'xyz'.",
        ),
        (
            {"training": {"epoch": 1}}, ValueError,
            "config: a key of [training] must be known (did you mean 'epochs'?), got 'epoch'.",
        ),
        (
            {"optimizer": {"factor": 1}}, ValueError,
            "config: a key of [optimizer] must be known (did you mean 'decay_factor'?), "
            "got 'factor'.",
        ),
        (
            {"training": 3}, TypeError,
            "config: 'training' must be a section [training], got 3.",
        ),
        (
            {"training": {"epochs": 1.0}}, TypeError,
            "config: [training] epochs must be an integer such as 1, got 1.0.",
        ),
        (
            {"training": {"epochs": True}}, TypeError,
            "config: [training] epochs must be an integer such as 1, got true.",
        ),
        (
            {"optimizer": {"lr": "fast"}}, TypeError,
            'config: [optimizer] lr must be a number such as 0.02, got "fast".',
        ),
        (
            {"data": {"on_error": ["skip"]}}, TypeError,
            'config: [data] on_error must be a string such as "raise", got ["skip"].',
        ),
        (
            {"data": {"buckets": 1}}, TypeError,
            "config: [data] buckets must be true or false, got 1.",
        ),
        (
            {"training": {"patience": -1}}, ValueError,
            "config: [training] patience must be finite and not negative, got -1.",
        ),
        (
            {"optimizer": {"lr": math.inf}}, ValueError,
            "config: [optimizer] lr must be finite and not negative, got inf.",
        ),
        (
            {"optimizer": {"clip_norm": math.nan}}, ValueError,
            "config: [optimizer] clip_norm must be finite and not negative, got nan.",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(change, error, text):
    with pytest.raises(error, match=sentence(text)):
        override(DEFAULTS, [change])


numbers = st.integers(0, 2**62) | st.floats(0, 1e300) | st.booleans()
values = numbers | st.text('aé€😀 #=[]"\\\n\t') | st.lists(st.integers(-5, 5))


@given(st.dictionaries(st.sampled_from("abc"), st.dictionaries(st.sampled_from("xyz"), values)))
def test_toml_comes_back(settings):
    assert tomllib.loads(to_toml(settings)) == settings


def test_defaults_come_back_from_a_file(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(to_toml(DEFAULTS), "utf-8")
    assert override(DEFAULTS, [read(path)]) == DEFAULTS


def test_a_file_that_is_no_toml(tmp_path):
    path = tmp_path / "c.toml"
    for content in (b"[a\n", b"a = 1\na = 2\n", b"\xff\xfe"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"^config: '{path}' must be TOML, got .*\\.$"):
            read(path)
    path = tmp_path / "none.toml"
    text = sentence(f"config: '{path}' must be a file, found nothing there.")
    with pytest.raises(FileNotFoundError, match=text):
        read(path)


def test_a_folder_is_no_configuration(tmp_path):
    text = f"config: '{tmp_path}' must be a file, found a folder there."
    with pytest.raises(IsADirectoryError, match=sentence(text)):
        read(tmp_path)
