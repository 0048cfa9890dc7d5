"""What scripts/quickstart.sh fetches and trains; it takes minutes, so that its text is read."""

import re
import shlex
from pathlib import Path

from cupyrec import cli
from cupyrec.data import movielens

TEXT = (Path(__file__).parents[1] / "scripts" / "quickstart.sh").read_text()


def test_it_fetches_what_the_command_takes():
    assert re.findall(r"^hash=(\w+)$", TEXT, re.MULTILINE) == [movielens._SHA256]


def test_it_trains_on_two_ranks():
    command = r"^\.venv/bin/mpirun -n 2 (.*?) \.venv/bin/cupyrec (.*?)$"
    ((mpirun, words),) = re.findall(command, TEXT.replace("\\\n   ", ""), re.MULTILINE)
    options = cli._parser().parse_args(shlex.split(words))
    assert (options.command, options.model, options.codec) == ("train", "dlrm", "int8")
    assert mpirun.split() == ["--oversubscribe"]  # on one core too
    assert "\ninstall plot,mpi,serve\n" in TEXT
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):  # in a container
        assert re.search(rf"^export .*\b{name}=1", TEXT, re.MULTILINE)
