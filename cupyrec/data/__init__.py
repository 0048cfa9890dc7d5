"""Click logs in, batches out."""

from cupyrec.data.batch import Batch
from cupyrec.data.frame import Frame
from cupyrec.data.in_memory import Arrays
from cupyrec.data.numpy_files import NumPyFiles
from cupyrec.data.open_dataset import open_dataset
from cupyrec.data.parquet import Parquet
from cupyrec.data.prefetch import prefetch
from cupyrec.data.rank_slices import RankSlices
from cupyrec.data.schema import Column, Schema, criteo_schema
from cupyrec.data.shuffled import Shuffled
from cupyrec.data.tsv import TSV
from cupyrec.ragged import Bags

__all__ = [
    "TSV",
    "Arrays",
    "Bags",
    "Batch",
    "Column",
    "Frame",
    "NumPyFiles",
    "Parquet",
    "RankSlices",
    "Schema",
    "Shuffled",
    "criteo_schema",
    "open_dataset",
    "prefetch",
]
