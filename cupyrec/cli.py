"""The command ``cupyrec``: arguments, exit codes.

The work of subcommands stands in `commands`, `checkpoint_commands`, `data_commands`,
`plan_commands` and `serve_commands`.

Results go to stdout, all else to stderr: with --quiet nothing but warnings and errors. Of several
ranks the first to fail ends all, and mpirun returns its exit code; of one that was killed, 128 and
the signal's number.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import math
import os
import sys
import time
from typing import Any

import cupyrec
from cupyrec import config
from cupyrec.interruption import ending

__all__ = ["main"]


_CODES = (
    "Exit codes: 0 done, 1 failed or stalled, 2 wrong usage, 130 interrupted by Ctrl-C, 143 ended "
    "by SIGTERM. 'checkpoint diff' returns 1 if there is a difference, 'doctor' if something is "
    "wrong; 'serve' 0 after a signal. A training that a signal ends saves a checkpoint first."
)
_MOMENT = 2.0  # seconds in which rank 0 says what is wrong


class UsageError(Exception):
    """What the user asked for can't be meant: exit code 2."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit code.

    Examples
    --------
    >>> main(["--version"])
    Traceback (most recent call last):
        ...
    SystemExit: 0
    """
    options = _parsed(arguments)
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("cupyrec").setLevel(logging.WARNING if options.quiet else logging.INFO)
    try:
        if options.command == "checkpoint":
            from cupyrec import checkpoint_commands as commands
        elif options.command == "data":
            from cupyrec import data_commands as commands
        elif options.command == "doctor":
            from cupyrec import doctor as commands
        elif options.command == "plan":
            from cupyrec import plan_commands as commands
        elif options.command == "serve":
            from cupyrec import serve_commands as commands
        else:
            from cupyrec import commands

        work = getattr(commands, options.run)
        if options.command in ("checkpoint", "data", "plan", "report"):
            _refuse_ranks(options.command)
        elif options.command == "doctor":
            if _launched_rank() != "0":
                return 0  # one tells, and starts no MPI, which may be what is broken
        else:
            return work(options) or 0
        with ending():  # several ranks end by a signal in their own way
            return work(options) or 0
    except UsageError as error:
        return _fail(error, 2)
    except (KeyboardInterrupt, SystemError) as error:
        interrupt = _interrupt(error)
        if interrupt is None:
            raise
        code = getattr(interrupt, "code", 130)
        if interrupt.args:  # by `fit`, in the same step on every rank
            from cupyrec.parallel import world

            return code if world().rank else _say(interrupt, code)
        return _fail("interrupted", code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except RuntimeError as error:
        parallel = sys.modules.get("cupyrec.parallel")
        if parallel is None or not isinstance(error, parallel.OtherRankError):
            raise
        return _fail(error, 1)
    except (
        ValueError, TypeError, OSError, FloatingPointError, MemoryError, ImportError,
    ) as error:  # fmt: skip
        logging.getLogger("cupyrec").debug("", exc_info=error)
        return _fail(_with_help(error), 1)


def _parsed(arguments: list[str] | None) -> argparse.Namespace:
    """What the command line asks for; of several ranks the first alone says what is wrong with it.

    Usage needs no MPI, so the rank is the one that launchers tell.
    """
    if _launched_rank() == "0":
        return _parser().parse_args(arguments)
    nothing = io.StringIO()
    with contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
        try:
            return _parser().parse_args(arguments)
        except SystemExit as exit:
            if exit.code:
                time.sleep(_MOMENT)  # the first to end ends the others
            raise


def _interrupt(error: BaseException | None) -> KeyboardInterrupt | None:
    """What an error goes back to: in a compiled loop, calls from C to Python wrap it one by one."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error


def _launched_rank() -> str:
    names = "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"
    return next((os.environ[name] for name in names if name in os.environ), "0")


def _refuse_ranks(command: str) -> None:
    from cupyrec.parallel import world

    if (ranks := world().size) > 1:
        raise UsageError(f"{command}: must run as one process, got {ranks} ranks.")


def _say(error: object, code: int) -> int:
    print(f"cupyrec: {error}", file=sys.stderr)
    return code


def _fail(error: object, code: int) -> int:
    if (parallel := sys.modules.get("cupyrec.parallel")) is not None:
        parallel.failed(error, code)  # of several ranks: says so, and ends them all
    return _say(error, code)


def _with_help(error: Exception) -> object:
    """An error, and who tells more of it if it is not one of our sentences."""
    ours = type(error) is ModuleNotFoundError and error.name is None
    if ours or not isinstance(error, ImportError):
        return error
    return f"{error}. `cupyrec doctor` tells what is missing or broken."


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {text!r}")
    return value


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text!r}")
    return value


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be an integer of 0 to 65535, got {text!r}")
    return int(text)


def _unseen(text: str) -> str | int:
    if text in ("initial", "zero"):
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be initial, zero or an integer, got {text!r}"
        ) from None


class _Parser(argparse.ArgumentParser):
    """Of the command or of a subcommand, with what all of them take."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        about = "no progress, only results, warnings and errors"
        self.add_argument("--quiet", action="store_true", default=argparse.SUPPRESS, help=about)


def _parser() -> argparse.ArgumentParser:
    about = "Train and serve recommender models with raw 64-bit ids."
    parser = _Parser(prog="cupyrec", description=about, epilog=_CODES)
    parser.set_defaults(quiet=False)
    parser.add_argument("--version", action="version", version=cupyrec.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_train(commands.add_parser("train", help="train a model on click logs"))
    for name, about in [
        ("evaluate", "AUC and logloss of a checkpoint"),
        ("predict", "probabilities by a checkpoint, one a row"),
    ]:
        command = commands.add_parser(name, help=about)
        command.set_defaults(run=name)
        command.add_argument("checkpoint", metavar="CKPT", help="checkpoint, or a run's folder")
        logs = "click logs" if name == "evaluate" else "click logs, with or without their labels"
        command.add_argument("--data", nargs="+", required=True, metavar="F", help=logs)
        command.add_argument("--batch-size", type=_positive, default=4096, metavar="B",
                             help="rows at a time; by default 4096")  # fmt: skip
        _add_device(command)
        if name == "predict":
            command.add_argument("--output", required=True, metavar="F.{npy,parquet,csv}")
            command.add_argument("--overwrite", action="store_true", help="replace the output")
    doctor = commands.add_parser("doctor", help="what is there, what is missing, how to get it")
    doctor.set_defaults(run="doctor")
    _add_plan(commands.add_parser("plan", help="whether and how a training fits into hardware"))
    _add_serve(commands.add_parser("serve", help="answer requests by a checkpoint, over HTTP"))
    report = commands.add_parser("report", help="draw a run: one page, report.html in its folder")
    report.set_defaults(run="report")
    report.add_argument("folder", metavar="RUN", help="a run's folder, which may still be trained")
    _add_data(commands.add_parser("data", help="look into click logs, make some"))
    _add_checkpoint(commands.add_parser("checkpoint", help="look into checkpoints, rewrite them"))
    return parser


def _add_train(command: argparse.ArgumentParser) -> None:
    command.set_defaults(run="train")
    model, training, optimizer = (config.DEFAULTS[s] for s in ("model", "training", "optimizer"))
    add = command.add_argument
    names = "dcn, dcn_v2, deepfm, dlrm, fm, lr, mmoe, pnn, shared_bottom, wide_deep, xdeepfm"
    add("--model", metavar="M", help=f"{names}; by default {model['name']}")
    add("--train", nargs="+", required=True, metavar="F", help="click logs, read in this order")
    add("--valid", nargs="+", metavar="F", help="logs by which the best step is chosen")
    add("--test", nargs="+", metavar="F", help="logs that the result is measured on")
    add("--schema", metavar="S.toml", help="the columns; Criteo's by default")
    add("--config", metavar="T.toml", help="settings, see docs/settings.md and scripts/configs")
    add("--set", action="append", default=[], metavar="SECTION.KEY=VALUE",
        help="one setting; docs/settings.md lists them")  # fmt: skip
    add("--out", metavar="DIR", help="metrics and checkpoints; without it nothing is written")
    add("--resume", metavar="DIR", help="go on with the run in this folder")
    about = "begin with what this checkpoint, or a run's best, has learnt"
    add("--from", dest="start", metavar="CKPT", help=about)
    add("--overwrite", action="store_true", help="replace an earlier run in --out")
    _add_device(command)
    about = f"of all that is drawn: weights, rows, dropout; by default {training['seed']}"
    add("--seed", type=int, metavar="N", help=about)
    about = f"how often the log is read; by default {training['epochs']}"
    add("--epochs", type=_positive, metavar="N", help=about)
    about = f"rows a step, of all ranks together; by default {training['batch_size']}"
    add("--batch-size", type=_positive, metavar="B", help=about)
    about = f"what is multiplied in: float32, float16, bfloat16; by default {training['amp']}"
    add("--amp", metavar="TYPE", help=about)
    add("--lr", type=float, metavar="X", help=f"learning rate; by default {optimizer['lr']}")
    names = "sgd, adagrad, rowwise_adagrad, adam, adamw, catch_up_adam, ftrl"
    add("--optimizer", metavar="O", help=f"{names}; by default {optimizer['name']}")
    about = "width of embedding rows; by default the model's, 16"
    add("--embedding-dim", type=_positive, metavar="D", help=about)
    about = "of rows and gradients between ranks: none (the default), fp16, bf16, int8"
    add("--codec", metavar="C", help=about)
    about = "metrics for TensorBoard, of a resumed run in the same folder; it needs an extra"
    add("--tensorboard", metavar="DIR", help=about)
    add("--trace", metavar="F.json", help="what each rank does when, for Chrome's trace viewer")
    about = "seconds without progress on any rank that end the job, 300 by default; inf: never"
    add("--stall-timeout", type=_seconds, default=300.0, metavar="S", help=about)


def _add_plan(command: argparse.ArgumentParser) -> None:
    command.set_defaults(run="plan")
    add = command.add_argument
    add("--schema", required=True, metavar="S.toml", help="the columns")
    add("--ids", type=_number, metavar="N", help="of all tables that --ids-per-table doesn't name")
    add("--ids-per-table", nargs="+", default=[], metavar="TABLE=N", help="of tables by name")
    add("--config", metavar="T.toml", help="settings, see docs/settings.md")
    add("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="one setting")
    add("--batch-size", type=_positive, metavar="B", help="rows a step, of all ranks together")
    add("--ranks", type=_positive, default=1, metavar="N", help="GPUs or processes; by default 1")
    add("--zipf", type=_number, default=1.05, metavar="S", help="exponent of ids; by default 1.05")
    add("--bag-size", type=_number, default=1.0, metavar="L", help="ids of a bag; by default 1")
    source = command.add_mutually_exclusive_group(required=True)
    about = "what there is, see docs/plan.md and scripts/configs/hardware"
    source.add_argument("--hardware", metavar="H.toml", help=about)
    about = "measure this machine's CPU, and the SSD of a folder, if one is named"
    source.add_argument("--measure", nargs="?", const="", metavar="DIR", help=about)
    about = "cuda by default where the hardware has a GPU, else cpu"
    add("--device", choices=["cpu", "cuda"], help=about)


def _add_device(command: argparse.ArgumentParser) -> None:
    about = "cpu, cuda, or sim to check kernels; cuda by default where there is a GPU, else cpu"
    command.add_argument("--device", choices=["cpu", "cuda", "sim"], help=about)
    about = "all cores by default; any number gives the same bits"
    command.add_argument("--threads", type=_positive, metavar="N", help=about)


def _add_serve(command: argparse.ArgumentParser) -> None:
    command.set_defaults(run="serve")
    add = command.add_argument
    add("checkpoint", metavar="CKPT", help="checkpoint, or a run's folder, whose newer ones follow")
    about = "address to listen at; by default 127.0.0.1, for this machine alone; 0.0.0.0: for all"
    add("--host", default="127.0.0.1", metavar="A", help=about)
    add("--port", type=_port, default=8000, metavar="N", help="by default 8000; 0: any free one")
    add("--name", metavar="M", help="the model's in paths; by default its own")
    _add_device(command)
    tiers = ["memory", "cached_host", "cached_ssd"]
    add("--tier", choices=tiers, default="memory", help="where rows lie; see docs/stores.md")
    add("--cache-mb", type=_number, metavar="MB", help="of the cache of such a tier; by default 64")
    add("--tables", metavar="DIR", help="where files of cached_ssd lie; the system's by default")
    types = ["float32", "float16", "bfloat16", "int8"]
    add("--dtype", choices=types, help="of tables' vectors; by default as saved")
    about = "what ids without a row get: their initial vectors (initial), zeros, or an id's row"
    add("--unseen", type=_unseen, default="initial", metavar="initial|zero|ID", help=about)
    about = "rows computed together, and of a request; by default 4096"
    add("--max-batch", type=_positive, default=4096, metavar="B", help=about)
    about = "milliseconds that requests wait for others at most; by default 5"
    add("--max-delay", type=_number, default=5.0, metavar="MS", help=about)
    about = "rows that may wait, beyond which requests are refused; by default 16384"
    add("--max-queue", type=_positive, default=16384, metavar="B", help=about)
    add("--max-body", type=_number, default=16.0, metavar="MB", help="of a request; by default 16")
    add("--max-connections", type=_positive, default=512, metavar="N", help="by default 512")
    about = "seconds for a client to send a request, take its answer, begin another; by default 30"
    add("--timeout", type=_seconds, default=30.0, metavar="S", help=about)
    about = "seconds at the end for requests under way; by default 30"
    add("--drain", type=_number, default=30.0, metavar="S", help=about)
    about = "seconds from one look for a newer checkpoint to the next; by default 0, never"
    add("--watch", type=_number, default=0.0, metavar="S", help=about)
    add("--access-log", action="store_true", help="log each request")


def _add_data(command: argparse.ArgumentParser) -> None:
    kinds = command.add_subparsers(dest="kind", required=True, metavar="KIND")
    inspect = kinds.add_parser("inspect", help="what a log's columns seem to be, as a schema")
    inspect.set_defaults(run="data_inspect")
    inspect.add_argument("file", metavar="FILE", help="text, .parquet or .npy")
    inspect.add_argument("--rows", type=_positive, default=10_000, metavar="N",
                         help="how many are looked at; by default 10000")  # fmt: skip
    inspect.add_argument("--out", metavar="S.toml", help="where to write it; stdout by default")
    inspect.add_argument("--overwrite", action="store_true", help="replace the output")
    movielens = kinds.add_parser("movielens-100k", help="MovieLens-100k out of a recbole wheel")
    movielens.set_defaults(run="data_movielens_100k")
    movielens.add_argument("--wheel", required=True, metavar="F.whl")
    movielens.add_argument("--out", required=True, metavar="DIR")
    synthetic = kinds.add_parser("synthetic", help="a click log in Criteo's layout, of any size")
    synthetic.set_defaults(run="data_synthetic")
    synthetic.add_argument("--rows", type=_positive, required=True, metavar="N")
    synthetic.add_argument("--out", required=True, metavar="F.tsv[.gz|.zst]")
    synthetic.add_argument("--seed", type=int, default=0, metavar="N", help="of the rows alone")
    synthetic.add_argument("--overwrite", action="store_true", help="replace the output")
    synthetic.add_argument("--ids-per-table", type=_positive, default=100_000, metavar="N")
    synthetic.add_argument("--zipf", type=float, default=1.2, metavar="S", help="exponent of ids")
    synthetic.add_argument("--missing", type=float, default=0.1, metavar="P", help="share left out")


def _add_checkpoint(command: argparse.ArgumentParser) -> None:
    kinds = command.add_subparsers(dest="kind", required=True, metavar="KIND")

    def add(name: str, about: str) -> argparse.ArgumentParser:
        kind = kinds.add_parser(name, help=about)
        kind.set_defaults(run=name)
        return kind

    def read(kind: argparse.ArgumentParser, name: str, metavar: str) -> None:
        kind.add_argument(name, metavar=metavar, help="checkpoint, or a run's folder")

    def write(kind: argparse.ArgumentParser, what: str) -> None:
        read(kind, "checkpoint", "CKPT")
        kind.add_argument("out", metavar="OUT", help=f"folder of the new {what}")
        kind.add_argument("--overwrite", action="store_true", help=f"replace the {what} in OUT")

    about = "what is in it: model, tables, shards, optimizer, progress"
    read(add("inspect", about), "checkpoint", "CKPT")
    about = "whether every file is whole and every id there once"
    read(add("verify", about), "checkpoint", "CKPT")
    about = "how two differ, whatever their shards; exit code 0 if they don't, 1 if they do"
    diff = add("diff", about)
    read(diff, "a", "A")
    read(diff, "b", "B")
    about = "where tables of more than 512 MB are split; the system's folder for such by default"
    diff.add_argument("--scratch", metavar="DIR", help=about)
    write(add("compact", "write what deltas say as one that holds all rows"), "checkpoint")
    reshard = add("reshard", "write it anew in another number of shards")
    write(reshard, "checkpoint")
    reshard.add_argument("--shards", type=_positive, required=True, metavar="N")
    export = add("export", "ids and vectors of tables as files that others read")
    write(export, "export")
    export.add_argument("--format", choices=["parquet", "npy"], default="parquet")
    about = "names of tables, as the schema has them too, or numbers; all by default"
    export.add_argument("--table", nargs="+", default=[], metavar="T", help=about)
    export.add_argument("--states", action="store_true", help="optimizer's state of rows, too")
    imported = add("import", "write it anew with vectors of a file in a table")
    imported.set_defaults(run="import_table")
    about = "F.parquet with columns id and vector, or F.ids.npy beside F.vectors.npy"
    imported.add_argument("file", metavar="FILE", help=about)
    write(imported, "checkpoint")
    about = "the table's name, as the schema has it too, or number"
    imported.add_argument("--table", required=True, metavar="T", help=about)
    about = "which ids of FILE are taken: from FIRST on, below STOP"
    imported.add_argument("--ids", type=int, nargs=2, metavar=("FIRST", "STOP"), help=about)
    about = "what is taken off the ids of FILE"
    imported.add_argument("--offset", type=int, default=0, metavar="N", help=about)
    _add_systems(imported)


def _add_systems(imported: argparse.ArgumentParser) -> None:
    systems = imported.add_argument_group("what other systems saved (docs/migration.md)")
    about = "whose FILE it is: a folder of OneEmbedding's or HugeCTR's, F.safetensors or F.npz"
    names = ["oneembedding", "hugectr", "weights"]
    systems.add_argument("--from", dest="system", choices=names, help=about)
    about = "oneembedding: the snapshot's name"
    systems.add_argument("--snapshot", metavar="NAME", help=about)
    about = "oneembedding: numbers of a row, if not those of vector and states"
    systems.add_argument("--storage-dim", type=_positive, metavar="N", help=about)
    about = "oneembedding: the state behind each vector, taken too: sum, m v or momentum"
    systems.add_argument("--states", nargs="+", metavar="NAME", help=about)
    about = "oneembedding, hugectr: int64 by default, uint64, int32 or uint32"
    systems.add_argument("--key-type", metavar="TYPE", help=about)
    about = "hugectr: whose keys are taken; those of all by default"
    systems.add_argument("--slot", type=int, metavar="N", help=about)
    about = "weights: the matrix's name; of several, whose rows are put side by side"
    systems.add_argument("--weight", nargs="+", metavar="NAME", help=about)
    about = "weights: F.npy, the id that each row is of; its number by default"
    systems.add_argument("--vocabulary", metavar="F", help=about)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)
