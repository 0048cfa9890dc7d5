"""Every snippet and command of docs works; of data.md, in the order of the page."""

import argparse
import dataclasses
import doctest
import inspect
import json
import re
import shlex
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import trial
from pyarrow import parquet
from safetensors.numpy import save_file
from test_oneembedding import Folder
from test_tsv import fnv1a

import cupyrec
from cupyrec import cli, config
from cupyrec.commands import _settings
from cupyrec.data import TSV, Bags, Column, Schema
from cupyrec.from_settings import MODELS
from cupyrec.hardware import Gpu, Host, Link, Ssd

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "data.md").read_text("utf-8")


def blocks(language: str, page: str = PAGE) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def commands(block: str) -> list[list[str]]:
    """The arguments of each ``cupyrec`` command in a block of shell."""
    lines = block.replace("\\\n", " ").splitlines()
    split = (shlex.split(line, comments=True) for line in lines)
    return [words[1:] for words in split if words[0] == "cupyrec"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the page's schema and rows, which this process is in."""
    monkeypatch.chdir(tmp_path)
    schema, rows = blocks("toml")[0], blocks("text")[0]
    Path("schema.toml").write_text(schema, "utf-8")
    Path("clicks.csv").write_text(rows, "utf-8")
    return tmp_path


def test_the_schema_says_what_each_column_is(folder):
    assert Schema.load("schema.toml") == Schema(
        (
            Column("click", "label"),
            Column("price", "numeric", transform="log", buckets=True),
            Column("user", "categorical", "integer"),
            Column("item", "categorical", "hex"),
            Column("city", "categorical", "string"),
            Column("comment", "ignore"),
        ),
        ",",
    )


def test_the_rows_are_what_the_page_says(folder):
    source, *_ = blocks("python")
    test = doctest.DocTestParser().get_doctest(source, {}, "data.md", None, 0)
    result = doctest.DocTestRunner().run(test)
    assert (result.failed, result.attempted) == (0, 6)


def test_the_file_with_header_quotes_and_bags(tmp_path):
    Path(tmp_path, "schema.toml").write_text(blocks("toml")[1], "utf-8")
    Path(tmp_path, "movies.csv").write_text(blocks("text")[1], "utf-8")
    data = TSV(tmp_path / "movies.csv", Schema.load(tmp_path / "schema.toml"))
    (batch,) = data.batches(9)
    assert batch.labels.ravel().tolist() == [1, 0]
    assert np.diff(batch.ids.offsets).tolist() == [1, 2, 1, 0]
    names = [b"Good, the Bad and the Ugly, The", b"Western", b"Adventure"]
    assert batch.ids.ids.tolist() == [*map(fnv1a, names), fnv1a(b'"Great Performances" Cats')]


def test_the_commands_on_a_log_of_ones_own(folder, capsys):
    for name in ("train", "valid", "test"):
        shutil.copy("clicks.csv", f"{name}.csv")
    lines = Path("clicks.csv").read_text("utf-8").splitlines(keepends=True)
    Path("new.csv").write_text("".join(line.partition(",")[2] for line in lines), "utf-8")
    assert [trial.command(*words) for words in commands(blocks("sh")[0])] == [0, 0, 0]
    assert len(parquet.read_table("clicks.parquet")) == 2

    (sentence,) = re.findall(r"^    cupyrec: (bad.csv.*)$", PAGE, re.MULTILINE)
    Path("bad.csv").write_text(lines[0] + "0,cheap" + lines[1][2:], "utf-8")
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        list(TSV("bad.csv", Schema.load("schema.toml")).batches(1))
    skip = ["--train", "bad.csv", "--schema", "schema.toml", "--set", "data.on_error=skip"]
    assert trial.command("train", *skip) == 0
    capsys.readouterr()


def test_the_model_of_ones_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    kinds = [Column("click", "label"), Column("sale", "label"), Column("price", "numeric")]
    kinds += [
        Column(name, "categorical", "integer", bag=name == "items") for name in "u items".split()
    ]
    Schema(kinds, ",").save("schema.toml")
    lines = [f"{i % 2},{i // 2 % 2},.5,{i % 2},{i // 2 % 2}|9\n" for i in range(200)]
    for name in ("train", "valid", "test"):
        Path(f"{name}.csv").write_text("".join(lines))
    _, source, _ = blocks("python")
    assert len(source.strip().splitlines()) <= 25
    names: dict = {}
    exec(source, names)
    click, sale = map(float, capsys.readouterr().out.split())
    assert (click, sale) == (names["metrics"]["auc_click"], names["metrics"]["auc_sale"])


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_ours_pools_bags_as_the_page_says(name):
    several = {"num_tasks": 1} if "num_tasks" in inspect.signature(MODELS[name]).parameters else {}
    cupyrec.manual_seed(0)
    model = MODELS[name](num_dense=1, num_tables=2, **several)
    model.embedding.pooling = "sum"
    dense, offsets = np.zeros((2, 1), np.float32), np.arange(0, 9, 2)
    pairs = model.eval()(dense, Bags(np.array([1, 2, 3, 4, 2, 1, 4, 3]), offsets, 2)).numpy()
    assert pairs[0] == pytest.approx(pairs[1])
    singles = model(dense, np.array([[1, 3], [2, 4]])).numpy()
    # The weights of logistic regression begin as zeros.
    assert name == "lr" or pairs[0] != pytest.approx(singles[0], abs=1e-9)


def test_the_commands_on_synthetic_data(folder, capsys):
    *_, synthetic, movielens = blocks("sh")
    assert [trial.command(*words) for words in commands(synthetic)] == [0, 0, 0]
    assert '"test_auc": 0.6' in capsys.readouterr().out
    made, trained = commands(movielens)  # its data is not ours to keep: the words alone
    assert cli._parser().parse_args(made).run == "data_movielens_100k"
    options = cli._parser().parse_args(trained)
    assert (ROOT / options.config).is_file()
    assert Path(options.schema).parent == Path(options.train[0]).parent == Path(made[-1])


def test_what_inspection_says(tmp_path, capsys):
    Path(tmp_path, "movies.csv").write_text(blocks("text")[2], "utf-8")
    assert trial.command("data", "inspect", tmp_path / "movies.csv") == 0
    assert capsys.readouterr().out == blocks("toml")[2]


def test_the_commands_on_other_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    table = pa.table({"item": [1, 2] * 20, "price": [0.5] * 39 + [1], "click": [0, 1] * 20})
    parquet.write_table(table, "clicks.parquet")
    for day in range(4):
        for part, array in (("dense", np.ones((9, 2))), ("sparse", np.ones((9, 3), int)),
                            ("labels", np.arange(9) % 2)):  # fmt: skip
            np.save(f"day_{day}_{part}.npy", array)
    _, inspection, terabyte, _, _ = blocks("sh")
    assert [trial.command(*words) for words in commands(inspection + terabyte)] == [0, 0]
    schema = Schema.load("schema.toml")
    *_, frames = blocks("python")
    names = {"cupyrec": cupyrec, "frame": table, "new": table.drop_columns("click"),
             "model": cupyrec.models.DLRM(schema.num_dense, schema.num_tables)}  # fmt: skip
    exec(frames, names)
    assert names["clicks"].shape == (40,)


def test_figures_of_the_page(folder):
    Path("x.csv").write_text("0,-1,1,ffffffffffffffff,,\n1,1.2e-3,1,FF,,\n0,.5,+1,a,,\n")
    (batch,) = TSV("x.csv", Schema.load("schema.toml")).batches(9)
    assert batch.ids[:, 1].tolist() == [-1, 255, 10]
    assert batch.ids[:, 2].tolist() == [-(2**63)] * 3
    assert batch.ids[:, 3].tolist() == [1, 2, 2]  # floor(2 ln 1.5) = 0
    np.testing.assert_allclose(batch.dense[:, 0], [-np.log(2), np.log(1.0012), np.log(1.5)], 1e-6)


@pytest.mark.parametrize(
    ("page", "examples"), [("embedding.md", 38), ("serving.md", 34), ("stores.md", 21)]
)
def test_the_pages_on_tables_and_serving(page, examples):
    """As ``python -m doctest`` runs them, to which a fence that follows output is more output."""
    result = doctest.testfile(str(ROOT / "docs" / page), module_relative=False)
    assert (result.failed, result.attempted) == (0, examples)


def test_the_page_on_exchange():
    """Its commands are those of README, under mpirun; their words are right."""
    page = ROOT / "docs" / "exchange.md"
    result = doctest.testfile(str(page), module_relative=False)
    assert (result.failed, result.attempted) == (0, 18)
    (shell,) = blocks("sh", page.read_text("utf-8"))
    lines = [line.partition(" cupyrec ") for line in shell.splitlines() if "mpirun" in line]
    told = [cli._parser().parse_args(shlex.split(words)).run for _, _, words in lines]
    assert told == ["train", "evaluate", "predict", "train"]


def test_the_page_on_checkpoints(tmp_path, monkeypatch, capsys):
    page = ROOT / "docs" / "checkpoints.md"
    result = doctest.testfile(str(page), module_relative=False)
    assert (result.failed, result.attempted) == (0, 31)
    monkeypatch.chdir(tmp_path)
    logs = trial.write_logs(tmp_path, rows=64)
    for run, seed in (("first", 1), ("second", 2)):
        assert trial.train(logs, tmp_path / "runs" / run, "--seed", seed) == 0
    words = [words for block in blocks("sh", page.read_text("utf-8")) for words in commands(block)]
    assert len(words) == 8
    codes = {tuple(words): trial.command(*words) for words in words}
    assert codes.pop(("checkpoint", "diff", "runs/first", "runs/second")) == 1
    assert set(codes.values()) == {0}
    assert '"imported": ' in capsys.readouterr().out


def test_the_page_on_migration(tmp_path, monkeypatch, capsys):
    """Its commands, on files such as they speak of."""
    page = ROOT / "docs" / "migration.md"
    result = doctest.testfile(str(page), module_relative=False)
    assert (result.failed, result.attempted) == (0, 26)
    monkeypatch.chdir(tmp_path)
    logs = trial.write_logs(tmp_path, rows=64)
    for run, *more in (
        ("first", "dlrm", "model.bottom=[16]"),
        ("deepfm", "deepfm", "model.deep=[8]"),
    ):
        words = [
            "--model",
            more[0],
            "--set",
            more[1],
            "--optimizer",
            "adagrad",
            "--out",
            f"runs/{run}",
        ]
        assert trial.command("train", *logs, *words) == 0
    numbers = np.ones((30, 32), np.float32)
    for rank in range(4):
        folder = Folder(tmp_path / "persistent" / f"{rank}-4", 32, page=4096)
        folder.put(np.arange(rank + 990, 1110, 4), numbers)
        folder.save("last")
    Path("dcn0_sparse_9.model").mkdir()
    for name, array in (
        ("key", 59990 + np.arange(30)), ("emb_vector", numbers[:, :16].copy()),
        ("slot_id", np.arange(30) // 10 + 1),
    ):  # fmt: skip
        array.tofile(Path("dcn0_sparse_9.model", name))
    names = ("embedding_dict.user.weight", "linear_model.embedding_dict.user.weight")
    arrays = numbers[:, :16].copy(), numbers[:, :1].copy()
    save_file(dict(zip(names, arrays, strict=True)), "model.safetensors")
    np.save("user.npy", np.arange(30))
    words = [words for block in blocks("sh", page.read_text("utf-8")) for words in commands(block)]
    imported = []
    for some in words:
        assert trial.command(*some, "--overwrite") == 0
        imported.append(json.loads(capsys.readouterr().out.splitlines()[-1])["imported"])
    assert imported == [120, 110, 10, 30]


def test_the_page_on_plans():
    """Its numbers are what `plan` says; its flags and its hardware's keys are all there are."""
    path = ROOT / "docs" / "plan.md"
    page = path.read_text("utf-8")
    result = doctest.testfile(str(path), module_relative=False)
    assert (result.failed, result.attempted) == (0, 35)
    told = [
        cli._parser().parse_args(words).run for b in blocks("sh", page) for words in commands(b)
    ]
    assert told == ["plan", "plan"]
    command = argparse.ArgumentParser()
    cli._add_plan(command)
    flags = {flag for action in command._actions for flag in action.option_strings}
    assert set(re.findall(r"--[a-z][-a-z]*", page)) == flags - {"-h", "--help"}
    keys = {field.name for kind in (Gpu, Host, Ssd, Link) for field in dataclasses.fields(kind)}
    assert set(re.findall(r"`(\w+)`", page.split("| section")[1].split("may be")[0])) == keys


def test_the_page_on_settings():
    """Each key with its default, no other; its example is one, and its flags are flags."""
    page = (ROOT / "docs" / "settings.md").read_text("utf-8")
    told: dict = {}
    for heading, text in re.findall(r"^##+ (.*?)$(.*?)(?=^##|\Z)", page, re.DOTALL | re.MULTILINE):
        rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \| (.+) \|$", text, re.MULTILINE)
        assert text.count("\n| `") == len(rows)
        defaults = {key: tomllib.loads(f"x = {value}")["x"] for key, value, _ in rows}
        told |= dict.fromkeys(heading.split(", "), defaults)
        for flag in re.findall(r"`(--[-\w]+)`", " ".join(meaning for *_, meaning in rows)):
            assert cli._parser().parse_args(["train", "--train", "x", flag, "1"])
    assert {f"[{section}]": keys for section, keys in config.DEFAULTS.items()} == {
        name: keys for name, keys in told.items() if name.startswith("[")
    }
    assert told.keys() - {f"[{section}]" for section in config.DEFAULTS} == set(MODELS)
    command = argparse.ArgumentParser()
    cli._add_train(command)
    (about,) = (action.help for action in command._actions if action.dest == "model")
    assert about.partition(";")[0].split(", ") == sorted(MODELS)
    for name, model in MODELS.items():
        parameters = inspect.signature(model).parameters.items()
        own = {key: p.default for key, p in parameters if not key.startswith("num_")}
        assert told[name] == {k: list(v) if isinstance(v, tuple) else v for k, v in own.items()}
    (example,) = blocks("toml", page)
    changes, flags = tomllib.loads(example), page.split("without a file is `")[1].split("`")[0]
    options = cli._parser().parse_args(["train", "--train", "x", *shlex.split(flags)])
    expected = _settings(options)
    options = cli._parser().parse_args(["train", "--train", "x"])
    options.set = [f"{s}.{k}={v}" for s, keys in changes.items() for k, v in keys.items()]
    assert _settings(options) == expected
