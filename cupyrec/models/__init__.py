"""Models, each one file that reads like its paper."""

from cupyrec.models.dcn import DCN, DCNv2
from cupyrec.models.deepfm import DeepFM
from cupyrec.models.dlrm import DLRM
from cupyrec.models.fm import FM
from cupyrec.models.lr import LR
from cupyrec.models.mmoe import MMoE, SharedBottom
from cupyrec.models.pnn import PNN
from cupyrec.models.wide_deep import WideDeep
from cupyrec.models.xdeepfm import XDeepFM

__all__ = [
    "DCN", "DLRM", "FM", "LR", "PNN", "DCNv2", "DeepFM", "MMoE", "SharedBottom", "WideDeep",
    "XDeepFM",
]  # fmt: skip
