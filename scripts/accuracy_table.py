"""Accuracy on real data: trains by committed presets, and holds what test says to its bars.

    CUPYREC_DATA=… python scripts/accuracy_table.py --data census_income
    python scripts/accuracy_table.py --data census_income --folder DIR --measure valid

The folder holds a folder for each data set. Presets are scripts/configs/DATA.toml; what they say
was chosen on valid alone, by ``--measure valid``. A table goes to stderr, and one JSON line ends
stdout; the exit status is 1 if test is measured and a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import census_income

CONFIGS = Path(__file__).with_name("configs")
#: By data set: (its folder, its preset, "valid" or "test", seeds) -> figures, among them "passed".
PARTS: dict[str, Callable[[Path, Path, str, list[int]], dict[str, Any]]] = {
    "census_income": census_income.compare,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--folder", default=os.environ.get("CUPYREC_DATA"))
    parser.add_argument("--measure", choices=["valid", "test"], default="test")
    parser.add_argument("--preset", type=Path, help="another than the committed one, to tune")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    options = parser.parse_args()
    if not options.folder:
        parser.error("give --folder, or set CUPYREC_DATA")
    if options.preset and options.measure == "test":
        parser.error("--preset is for --measure valid: test is measured by committed presets")
    figures = {}
    for name in options.data:
        preset = options.preset or CONFIGS / f"{name}.toml"
        folder = Path(options.folder) / name
        figures[name] = PARTS[name](folder, preset, options.measure, options.seeds)
    print(json.dumps({"measured": options.measure, "seeds": options.seeds} | figures))
    passed = all(part["passed"] for part in figures.values())
    sys.exit(options.measure == "test" and not passed)


if __name__ == "__main__":
    main()
