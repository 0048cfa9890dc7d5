"""cupyrec: train and serve recommender models with embeddings keyed by raw 64-bit ids.

The namespace is NumPy-like: ops, `Tensor`, the packages `nn`, `models`, `optim`, `data`, and what a
run needs: `fit`, `RunFolder`, `checkpoint`. Names are loaded when they are first used, so that
``cupyrec --help`` answers at once.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

#: Public name -> module that defines it. A new op adds its name here.
_HOME = {
    **dict.fromkeys(["Function", "no_grad"], "autograd"),
    "graphed": "graph",
    **dict.fromkeys(["manual_seed"], "random"),
    **dict.fromkeys(["num_threads", "set_num_threads"], "cpu"),
    **dict.fromkeys(
        ["exp", "log", "maximum", "relu", "sigmoid", "sqrt", "tanh", "where"], "ops.elementwise"
    ),
    **dict.fromkeys(  # Tensor from where it has all its operators and methods
        [
            "Tensor", "concatenate", "from_dlpack", "matmul", "mean", "reshape", "softmax",
            "stack", "sum", "transpose",
        ],
        "ops.array_functions",
    ),
    "batch_norm": "ops.batch_norm",
    "bce_with_logits": "ops.bce_with_logits",
    "cast": "ops.cast",
    "compressed_interaction": "ops.compressed_interaction",
    "cross_matrix": "ops.cross_matrix",
    "cross_vector": "ops.cross_vector",
    "dot_interaction": "ops.dot_interaction",
    "factorization_machine": "ops.factorization_machine",
    "fused_mlp": "ops.fused_mlp",
    **dict.fromkeys(["int8_decode", "int8_encode"], "ops.int8_codec"),
    "layer_norm": "ops.layer_norm",
    "relu_dropout": "ops.relu_dropout",
    "RunFolder": "run_folder",
    "Progress": "progress",
    **dict.fromkeys(["evaluate", "predict"], "inference"),
    **dict.fromkeys(["fit", "train_step"], "training"),
}  # fmt: skip
_MODULES = [
    "checkpoint", "data", "embedding", "metrics", "models", "nn", "ops", "optim",
    "tensorboard", "testing",
]  # fmt: skip

__all__ = [*_HOME, *_MODULES]

if TYPE_CHECKING:
    from cupyrec import (
        checkpoint, data, embedding, metrics, models, nn, ops, optim, tensorboard, testing,
    )  # fmt: skip
    from cupyrec.autograd import Function, no_grad
    from cupyrec.cpu import num_threads, set_num_threads
    from cupyrec.graph import graphed
    from cupyrec.inference import evaluate, predict
    from cupyrec.ops.array_functions import (
        Tensor, concatenate, from_dlpack, matmul, mean, reshape, softmax, stack, sum, transpose,
    )  # fmt: skip
    from cupyrec.ops.batch_norm import batch_norm
    from cupyrec.ops.bce_with_logits import bce_with_logits
    from cupyrec.ops.cast import cast
    from cupyrec.ops.dot_interaction import dot_interaction
    from cupyrec.ops.elementwise import exp, log, maximum, relu, sigmoid, sqrt, tanh, where
    from cupyrec.ops.factorization_machine import factorization_machine
    from cupyrec.ops.fused_mlp import fused_mlp
    from cupyrec.ops.int8_codec import int8_decode, int8_encode
    from cupyrec.ops.compressed_interaction import compressed_interaction
    from cupyrec.ops.cross_matrix import cross_matrix
    from cupyrec.ops.cross_vector import cross_vector
    from cupyrec.ops.layer_norm import layer_norm
    from cupyrec.ops.relu_dropout import relu_dropout
    from cupyrec.progress import Progress
    from cupyrec.random import manual_seed
    from cupyrec.run_folder import RunFolder
    from cupyrec.training import fit, train_step


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"cupyrec.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'cupyrec' has no attribute '{name}'.")
    value = getattr(importlib.import_module(f"cupyrec.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
