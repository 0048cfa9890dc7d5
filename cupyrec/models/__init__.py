"""Models, each one file that reads like its paper."""

from cupyrec.models.dlrm import DLRM

__all__ = ["DLRM"]
