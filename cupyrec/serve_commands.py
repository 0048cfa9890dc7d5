"""What the subcommand ``cupyrec serve`` does."""

from __future__ import annotations

import argparse
import contextlib
import re
import signal
import tempfile

from cupyrec import config, interruption
from cupyrec.cli import UsageError
from cupyrec.device_flags import log_device, set_device
from cupyrec.embedding import CachedHost, CachedSSD, Memory, Tier
from cupyrec.parallel import world

try:
    from cupyrec.serving import Predictor
    from cupyrec.serving.server import ENDS, bind, run
    from cupyrec.serving.sharded import Front, follow
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"serve: the package '{error.name}' must be installed, by: pip install 'cupyrec[serve]'."
    ) from None

__all__ = ["serve"]


def serve(options: argparse.Namespace) -> int:
    """Serve a checkpoint by the flags of ``cupyrec serve``; return the exit code."""
    ranks = world()  # from here on what is wrong is told once
    if options.name is not None and not re.fullmatch(r"(?!\.+$)[\w.-]+", options.name, re.ASCII):
        raise UsageError(
            f"serve: --name must be letters, digits, _ . -, not dots alone, got '{options.name}'."
        )
    if options.tables is not None and options.tier != "cached_ssd":
        raise UsageError(f"serve: --tables must come with --tier cached_ssd, got {options.tier}.")
    if options.cache_mb is not None and options.tier == "memory":
        raise UsageError("serve: --cache-mb must come with a --tier that has a cache, got memory.")
    max_body = int(options.max_body * 2**20)
    if not max_body:
        raise UsageError(f"serve: --max-body must be at least a byte, got {options.max_body:g} MB.")
    set_device(options)
    with contextlib.ExitStack() as stack:
        if ranks.rank == 0:
            before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it serves, and at the end
            stack.callback(signal.signal, signal.SIGHUP, before)
            stack.enter_context(interruption.ending())
            listening = stack.enter_context(bind(options.host, options.port))
        else:
            for number in (*ENDS, signal.SIGHUP):  # sent to all: rank 0 says what is to be done
                signal.signal(number, signal.SIG_IGN)
        predictor = Predictor(
            options.checkpoint, device=options.device, tier=_tier(options), dtype=options.dtype,
            unseen=options.unseen,
        )  # fmt: skip
        if ranks.rank > 0:
            return follow(predictor, ranks)
        log_device(options)
        if ranks.size > 1:
            predictor = Front(predictor, ranks)
        stack.callback(predictor.close)
        return run(
            predictor, options.checkpoint, listening,
            name=options.name, max_batch=options.max_batch, max_delay=options.max_delay / 1e3,
            max_queue=options.max_queue, max_body=max_body,
            max_connections=options.max_connections, timeout=options.timeout,
            drain=options.drain, watch=options.watch, access_log=options.access_log,
        )  # fmt: skip


def _tier(options: argparse.Namespace) -> Tier:
    size = config.DEFAULTS["embedding"]["cache_mb"]
    size = size if options.cache_mb is None else options.cache_mb
    match options.tier:
        case "cached_host":
            return CachedHost(cache_mb=size)
        case "cached_ssd":
            return CachedSSD(path=options.tables or tempfile.gettempdir(), cache_mb=size)
    return Memory()
