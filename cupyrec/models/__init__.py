"""Models, each one file that reads like its paper."""

from cupyrec.models.dcn import DCN, DCNv2
from cupyrec.models.dlrm import DLRM

__all__ = ["DCN", "DLRM", "DCNv2"]
