import html.parser
import json
import re
import sys

import numpy as np
import pytest

import cupyrec
from cupyrec import cli, models
from cupyrec.report import write_report
from cupyrec.run_folder import RunFolder

pytest.importorskip("matplotlib")


class Page(html.parser.HTMLParser):
    """The text of a page, the cells of its tables, and all that it would fetch."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.fetched, self.open, self.text = [], [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        for name, value in attributes:
            if name in ("src", "href", "xlink:href") and not value.startswith("#"):
                self.fetched.append(value)

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data):
        self.text += data
        if self.rows and {"td", "th"} & set(self.open[-2:]):
            self.rows[-1].append(data)


def table(ids, **more):
    zeros = [0] * len(ids)
    return (
        dict(ids=ids, bytes=zeros, load=zeros, unique_ratio=[None] * len(ids), inserted=zeros)
        | more
    )


LINES = [
    {"step": 20, "epoch": 0, "loss": 0.6, "lr": 0.1, "bytes_sent": {"rows": 300, "keys": 100}},
    {"step": 25, "valid_auc": None, "valid_logloss": 0.55},
    {"step": 25, "tables": {"embedding": table([5, 1234567])}},
    {"step": 40, "epoch": 0, "loss": 0.5, "lr": 0.05, "bytes_sent": {"rows": 500, "keys": 100},
     "quantization_error": {"rows": 0.004}},
    {"step": 40, "valid_auc": 0.71, "valid_logloss": 0.5,
     "valid_reliability": [[10, 0.1, 0.12], [10, 0.4, 0.38]]},
]  # fmt: skip


def page_of(folder, lines, tail=""):
    text = "".join(json.dumps(line) + "\n" for line in lines) + tail
    (folder / "metrics.jsonl").write_text(text)
    path = write_report(folder)
    assert path == folder / "report.html"
    return Page(path.read_text())


def test_a_run_that_is_going_on(tmp_path):
    page = page_of(tmp_path, LINES, tail='{"step": 60, "lo')
    assert "Not finished: metrics up to step 40." in page.text
    for heading in ("Loss and AUC", "Learning rate", "Calibration", "Embedding tables",
                    "Bytes exchanged between ranks"):  # fmt: skip
        assert heading in page.text
    assert ["1", "1,234,567", "0", "0", "–"] in page.rows
    assert ["rows", "800", "80.0 %"] in page.rows
    assert "1,000 bytes from all ranks to others, 25 a step." in page.text
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []


def test_what_is_less_than_a_thousandth_of_the_bytes_is_one_row(tmp_path):
    sent = {"rows": 9_000, "keys": 990, "norm": 9, "errors": 2, "host": 1}
    page = page_of(tmp_path, [LINES[0] | {"bytes_sent": sent}])
    names = [row[0] for row in page.rows if row[-1].endswith("%")]
    assert names == ["rows", "keys", "3 others"]
    assert ["3 others", "12", "0.1 %"] in page.rows
    page = page_of(tmp_path, [LINES[0] | {"bytes_sent": {"rows": 9_000, "norm": 2}}])
    assert ["norm", "2", "0.0 %"] in page.rows  # one alone keeps its name


def test_without_matplotlib_it_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'cupyrec\[plot\]'"):
        page_of(tmp_path, LINES)


def test_it_needs_nothing_beside_it(tmp_path):
    page = page_of(tmp_path, LINES)
    assert page.fetched == []
    assert "<script" not in (tmp_path / "report.html").read_text()


def test_the_same_metrics_give_the_same_bytes(tmp_path):
    page_of(tmp_path, LINES)
    before = (tmp_path / "report.html").read_bytes()
    page_of(tmp_path, LINES)
    assert (tmp_path / "report.html").read_bytes() == before


def test_sections_without_metrics_are_left_away(tmp_path):
    page = page_of(tmp_path, [{"step": 3, "loss": 0.6}, {"steps": 3, "test_auc": 0.7, "x": None}])
    assert "test auc" in page.text and "0.70000" in page.text
    for heading in ("Calibration", "Embedding tables", "Bytes", "Learning rate", "Settings"):
        assert heading not in page.text


def test_names_are_escaped(tmp_path):
    folder = tmp_path / "a<b>&"
    folder.mkdir()
    (folder / "config.toml").write_text('name = "<script>"\n')
    page = page_of(folder, LINES)
    assert "a<b>&" in page.text and 'name = "<script>"' in page.text


def test_the_command_draws_what_fit_has_logged(tmp_path, capsys):
    rng = np.random.default_rng(0)
    data = (rng.random((64, 1), np.float32), rng.integers(0, 9, (64, 2)), rng.integers(0, 2, 64))
    run = RunFolder(tmp_path / "run")
    cupyrec.fit(models.DLRM(1, 2), data, data, batch_size=16, run=run)
    assert cli.main(["report", str(run.path)]) == 0
    assert json.loads(capsys.readouterr().out) == {"report": str(run.path / "report.html")}
    page = Page((run.path / "report.html").read_text())
    (total,) = [row for row in page.rows if row[0] == "all"]
    assert total[1] == str(len({*data[1][:, 0]}) + len({*data[1][:, 1]}))
    assert "Calibration" in page.text
    assert "Bytes exchanged" not in page.text  # of one rank


def test_curves_of_several_tasks(tmp_path):
    line = {"step": 9, "valid_auc": 0.6, "valid_auc_click": 0.7, "valid_auc_buy": 0.5}
    bins = {f"valid_reliability_{task}": [[4, 0.2, 0.25]] for task in ("click", "buy")}
    page = page_of(tmp_path, [line | bins])
    for task in ("click", "buy"):
        assert page.text.count(task) == 2


def test_a_dollar_in_a_tasks_name_begins_no_formula(tmp_path):
    page = page_of(tmp_path, [{"step": 9, "valid_auc": 0.6, "valid_auc_$_{x$": 0.7}])
    assert "$_{x$" in page.text


@pytest.mark.parametrize("content", [None, "", '{"st'])
def test_no_run(tmp_path, content, capsys):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    assert cli.main(["report", str(tmp_path)]) == 1
    rule = r"must be a run's folder, got no metrics\.jsonl|must have metrics, got none yet\.$"
    assert re.search(rule, capsys.readouterr().err)
    assert not (tmp_path / "report.html").exists()
