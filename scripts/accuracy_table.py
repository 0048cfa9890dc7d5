"""Accuracy on real data: trains by committed presets, and holds what test says to its bars.

    CUPYREC_DATA=… python scripts/accuracy_table.py
    python scripts/accuracy_table.py --data census_income --folder DIR --measure valid

The folder holds a folder for each data set. Presets are scripts/configs/DATA.toml, or DATA/*.toml
where each model has its own; what they say was chosen on valid alone, by ``--measure valid``. A
table goes to stderr, and one JSON line ends stdout; the exit status is 1 if test is measured and a
bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import accuracy_models
import census_income

CONFIGS = Path(__file__).with_name("configs")


class Part(NamedTuple):
    """(folder of the data, preset, "valid" or "test", seeds) -> figures, among them "passed"."""

    compare: Callable[[Path, Path, str, list[int]], dict[str, Any]]
    preset: Path
    seeds: int


PARTS = {
    "criteo": Part(accuracy_models.compare_criteo, CONFIGS / "criteo", 3),
    "movielens_1m": Part(accuracy_models.compare_movielens_1m, CONFIGS / "movielens_1m", 3),
    "census_income": Part(census_income.compare, CONFIGS / "census_income.toml", 5),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--folder", default=os.environ.get("CUPYREC_DATA"))
    parser.add_argument("--measure", choices=["valid", "test"], default="test")
    parser.add_argument("--preset", type=Path, help="another than the committed one, to tune")
    parser.add_argument("--seeds", type=int, nargs="+", help="1 to 3, of census_income 1 to 5")
    options = parser.parse_args()
    if not options.folder:
        parser.error("give --folder, or set CUPYREC_DATA")
    if options.preset and options.measure == "test":
        parser.error("--preset is for --measure valid: test is measured by committed presets")
    figures = {}
    for name in options.data:
        part = PARTS[name]
        seeds = options.seeds or list(range(1, part.seeds + 1))
        preset, folder = options.preset or part.preset, Path(options.folder) / name
        figures[name] = part.compare(folder, preset, options.measure, seeds) | {"seeds": seeds}
    print(json.dumps({"measured": options.measure} | figures))
    passed = all(part["passed"] for part in figures.values())
    sys.exit(options.measure == "test" and not passed)


if __name__ == "__main__":
    main()
