"""What ``--device`` and ``--threads`` do, of all subcommands that compute."""

from __future__ import annotations

import argparse
import logging

import cupyrec
from cupyrec import arrays
from cupyrec.cli import UsageError
from cupyrec.parallel import world

__all__ = ["log_device", "set_device"]

logger = logging.getLogger("cupyrec")


def set_device(options: argparse.Namespace) -> None:
    """Choose the device: what was asked for, else the GPU if there is one."""
    if world().rank > 0:
        logger.setLevel(logging.ERROR)  # what all would warn of is told once
    try:
        arrays.module(options.device or "cuda")
        options.device = options.device or "cuda"
    except RuntimeError as error:
        if options.device:
            told = str(error).rstrip(".")
            raise UsageError(f"--{told}. `cupyrec doctor` tells what is missing.") from None
        options.device = "cpu"
    if options.threads:
        cupyrec.set_num_threads(options.threads)


def log_device(options: argparse.Namespace) -> None:
    """Say what the work is done on, once nothing is left to be refused."""
    threads = cupyrec.num_threads()
    ranks = f"{world().size} ranks, each " if world().size > 1 else ""
    logger.info("%sdevice %s, %d thread%s", ranks, options.device, threads, "s" * (threads > 1))
    if options.device == "sim":
        logger.info(
            "sim executes every thread of every kernel on the CPU, which takes seconds a step: "
            "it checks kernels, and is not for training"
        )
