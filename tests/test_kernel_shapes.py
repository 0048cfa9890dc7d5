"""``--shape`` of the kernel bench: how it is read, and what each case makes of it."""

import json
import sys
from pathlib import Path

import numpy as np
import oracle
import pytest

pytest.importorskip("cupy", reason="CuPy brings NVRTC: pip install cupyrec[sim]")
sys.path.append(str(Path(__file__).parents[1] / "scripts"))

import bench_kernels
import kernel_shapes
from kernel_cases import CASES


def test_sizes_are_read_by_name():
    assert kernel_shapes.parsed("D=64, B=3") == {"D": 64, "B": 3}
    assert kernel_shapes.parsed("F=27") == {"F": 27}


NAMES = "'--shape' must name sizes among B, F and D, each once, as in B=256,D=64, got"
POSITIVE = "'--shape' must give B an integer of at least 1, got"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("X=3", f"{NAMES} 'X=3'."),
        ("b=3", f"{NAMES} 'b=3'."),
        ("", f"{NAMES} ''."),
        ("B=2,", f"{NAMES} 'B=2,'."),
        ("B=2,B=3", f"{NAMES} 'B=2,B=3'."),
        ("B=0", f"{POSITIVE} '0'."),
        ("D=1,B=-3", f"{POSITIVE} '-3'."),
        ("B=2.5", f"{POSITIVE} '2.5'."),
        ("B", f"{POSITIVE} ''."),
        ("B=²", f"{POSITIVE} '²'."),
    ],
)
def test_what_is_no_size_is_refused(text, rule):
    with pytest.raises(ValueError, match=oracle.sentence(f"bench_kernels: {rule}")):
        kernel_shapes.parsed(text)


@pytest.mark.parametrize(
    ("kernel", "asked", "rule"),
    [
        ("sgd_rows", {"F": 3, "B": 2}, "sgd_rows its own sizes alone, B and D, got F."),
        ("unique_keys", {"D": 3, "F": 2}, "unique_keys its own sizes alone, B, got D, F."),
        ("clip_scale", {"D": 3}, "clip_scale its own sizes alone, B, got D."),
    ],
)
def test_a_size_that_a_kernel_has_not_is_refused(kernel, asked, rule):
    text = f"bench_kernels: '--shape' must give {rule}"
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        kernel_shapes.shapes(kernel, asked, 256)


def test_shapes_are_the_cases_own_where_nothing_is_asked():
    assert kernel_shapes.shapes("sgd_rows", {}, 256) == [(256, 128, {}), (256, 16, {})]
    assert kernel_shapes.shapes("sgd_rows", {"B": 4}, 256) == [(4, 128, {}), (4, 16, {})]
    assert kernel_shapes.shapes("sgd_rows", {"D": 4}, 256) == [(256, 4, {})]
    assert kernel_shapes.shapes("unique_keys", {}, 256) == [(256, 0, {})]


def test_kernels_that_have_a_size():
    assert kernel_shapes.having([]) == list(CASES)
    assert kernel_shapes.having("F") == [
        "dot_interaction_forward", "dot_interaction_backward",
        "dot_interaction_16_forward", "dot_interaction_16_backward",
        "factorization_machine_forward", "factorization_machine_backward",
        "factorization_machine_16_forward", "factorization_machine_16_backward",
    ]  # fmt: skip
    assert kernel_shapes.having("B") == list(CASES)


@pytest.mark.parametrize(
    ("kernel", "asked", "shape"),
    [
        ("dot_interaction_forward", {"B": 3, "F": 5, "D": 9}, "B=3 F=5 D=9"),
        ("dot_interaction_backward", {"B": 3, "F": 2, "D": 9}, "B=3 F=2 D=9"),
        ("sgd_rows", {"B": 8, "D": 5}, "U=54 D=5"),
        ("bce", {"B": 300}, "B=300"),
        ("bce_and_gradient", {"B": 7}, "B=7"),
    ],
)
def test_a_case_has_the_shape_that_is_asked(sim, kernel, asked, shape):
    (one,) = kernel_shapes.shapes(kernel, asked, 256)
    row = bench_kernels.counted(kernel, one.batch, one.width, **one.more)
    assert row["shape"] == shape
    assert bench_kernels.agrees(kernel, sim, one.batch, one.width, **one.more) == "ok"
    assert CASES[kernel][0](np, one.batch, one.width, **one.more).shape == shape


def test_the_script_says_what_an_op_refuses(monkeypatch, capsys):
    arguments = ["--device", "sim", "--kernel", "dot_interaction_forward", "--shape", "B=2,F=65"]
    monkeypatch.setattr(sys, "argv", ["bench_kernels.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        bench_kernels.main()
    assert ended.value.code == 2
    assert "\nbench_kernels: dot_interaction: on a device there must be" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shape", "B=0"], "'--shape' must give B an integer of at least 1, got '0'."),
        (["--kernel", "sgd_dense", "--shape", "D=2"],
         "'--shape' must give sgd_dense its own sizes alone, B, got D."),
        (["--json", "none/k.json"],
         "'--json' must be a file in a folder that is there, got 'none/k.json'."),
        (["--html", "."], "'--html' must be a file in a folder that is there, got '.'."),
        (["--html", "k.html", "--device", "cuda"],
         "'--html' must be of '--device sim', got 'cuda'."),
    ],
)  # fmt: skip
def test_the_script_refuses_before_it_runs(monkeypatch, capsys, tmp_path, arguments, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench_kernels.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        bench_kernels.main()
    assert ended.value.code == 2
    assert capsys.readouterr() == ("", f"bench_kernels: {said}\n")


def test_the_script_takes_no_empty_list_of_kernels_for_all(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_kernels.py", "--device", "sim", "--kernel"])
    with pytest.raises(SystemExit) as ended:
        bench_kernels.main()
    assert ended.value.code == 2
    assert "--kernel: expected at least one argument" in capsys.readouterr().err


@pytest.mark.parametrize("case", ["no memory", "a full disk"])
def test_the_script_says_what_it_lacks_room_for(monkeypatch, capsys, case):
    def one_case(*_):
        if case == "no memory":
            raise MemoryError("Unable to allocate 6 TiB.")
        return dict.fromkeys(bench_kernels.COUNTED, "-") | {"kernel": "sgd_rows", "shape": "B=4"}

    monkeypatch.setattr(bench_kernels, "one_case", one_case)
    arguments = ["--device", "sim", "--kernel", "sgd_rows", "--shape", "B=4", "--json", "/dev/full"]
    monkeypatch.setattr(sys, "argv", ["bench_kernels.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        bench_kernels.main()
    said = capsys.readouterr()
    if case == "no memory":
        assert ended.value.code == 2
        assert "\nbench_kernels: Unable to allocate 6 TiB.\n" in said.err
    else:
        assert "bench_kernels: [Errno 28] No space left on device" in str(ended.value.code)
        assert json.loads(said.out)[0]["kernel"] == "sgd_rows"  # the figures aren't lost
