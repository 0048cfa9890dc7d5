"""The notebook is one, and its cells run in order and show what their text says.

They are plain Python, so they run in this process, each as a notebook runs it: its last expression
is what it shows.
"""

import ast
import functools
import sys
from pathlib import Path

import matplotlib
import nbformat
import numpy as np
import pytest

from cupyrec import nvrtc

NOTEBOOK = nbformat.read(Path(__file__).parents[1] / "scripts" / "tour.ipynb", as_version=4)
CODE = [cell.source for cell in NOTEBOOK.cells if cell.cell_type == "code"]


def run(source, names):
    """Run a cell; return what it shows."""
    tree = ast.parse(source)
    shown = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "tour.ipynb", "exec"), names)
    if shown is not None:
        return eval(compile(ast.Expression(shown.value), "tour.ipynb", "eval"), names)  # noqa: S307
    return None


@pytest.fixture
def figures():
    """The figures that cells have drawn, as files would hold them."""
    from matplotlib import pyplot

    with matplotlib.rc_context({"backend": "Agg"}):
        yield lambda: [pyplot.figure(number) for number in pyplot.get_fignums()]
        pyplot.close("all")


def test_it_is_a_notebook_without_outputs():
    nbformat.validate(NOTEBOOK)
    kinds = [cell.cell_type for cell in NOTEBOOK.cells]
    assert kinds == ["markdown", "code"] * len(CODE) + ["markdown"]  # a text before each cell
    assert all(not cell.outputs for cell in NOTEBOOK.cells if cell.cell_type == "code")
    assert all(cell.execution_count is None for cell in NOTEBOOK.cells if "outputs" in cell)
    assert max(source.count("\n") for source in CODE) < 18


def test_the_tour(sim, figures, capsys):
    names = {}
    shown = iter([run(source, names) for source in CODE])
    assert next(shown) is None
    positive, sums = next(shown)
    np.testing.assert_array_equal(positive, [[1, 0, 0.5], [3, 4, 0]])
    np.testing.assert_allclose(sums, 1, rtol=1e-6)
    assert next(shown) == (2, 4 + 5 * 4 // 2)
    loss, gradient = next(shown)
    errors = np.array([[1, -2, 0.5], [3, 4, -1]]) @ [0.5, 0.25, 1] - 1
    assert loss == pytest.approx((errors**2).mean())
    np.testing.assert_allclose(gradient, errors @ [[1, -2, 0.5], [3, 4, -1]], rtol=1e-6)
    assert next(shown) is True  # gradcheck
    shape, ids = next(shown)
    assert (shape, ids.tolist()) == ((3, 2, 4), [2, 2])
    vectors, ids = next(shown)
    assert (vectors.shape, ids.tolist()) == ((1, 2, 4), [2, 2])
    assert [next(shown), next(shown)] == [None, None]  # clicks, a model
    auc, steps = next(shown)
    assert (auc > 0.8, steps) == (True, 5 * 118)
    assert next(shown) is None
    assert next(shown) == ((300,), (300, 8), True)
    assert next(shown) == [32 * (stride + 1) for stride in (1, 2, 4, 8)]
    assert list(shown) == [None, None]
    assert "out of bounds at kernel.cu:3" in capsys.readouterr().out

    curves, bars = figures()
    (loss,), (auc,) = (axes.lines for axes in curves.axes)
    assert loss.get_ydata()[0] > loss.get_ydata()[-1]
    assert auc.get_ydata()[0] < auc.get_ydata()[-1]
    assert len(bars.axes[0].patches) == 4


def test_without_the_simulators_compiler_it_says_so(monkeypatch, figures, capsys):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(nvrtc, "_cupy", functools.cache(nvrtc._cupy.__wrapped__))
    names = {}
    for source in (CODE[0], *CODE[-3:]):
        run(source, names)
    assert "the simulator needs NVIDIA's compiler: " in capsys.readouterr().out
    assert names["sectors"] == []
