"""The Python of docs/devices.md works, in the order of the page."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[1] / "docs" / "devices.md").read_text("utf-8")


def test_the_page_on_devices(sim, capsys):
    half, simulated = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    names: dict = {}
    exec(compile(half, "devices.md", "exec"), names)
    loss, scale = capsys.readouterr().out.split()
    assert float(loss) > 0
    assert float(scale) == names["optimizer"].scaler.loss_scale > 1
    exec(compile(simulated, "devices.md", "exec"), names)
    assert names["seen"].syncs == 2
    assert "'dot_interaction_forward'" in capsys.readouterr().out
