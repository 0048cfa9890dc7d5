"""What NVRTC and ptxas say of a source, in a process of its own: NVRTC compiles one at a time."""

import logging

from cupyrec import nvrtc


def assembled(source, arch, file):
    """(resources of each kernel by name, what was said)."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("cupyrec")
    logger.addHandler(handler)
    try:
        return nvrtc.ptxas(nvrtc.ptx(source, arch=arch, file=file), arch), said
    finally:
        logger.removeHandler(handler)
