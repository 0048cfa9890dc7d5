"""The DeepCTR-Torch side of bench_train.py: as bench_peer_torch.py, but for models of its own."""

import contextlib
import io
import sys
from types import SimpleNamespace

import numpy as np
import torch
from bench_peer_torch import answer
from torch import nn

# The package would ask the Python Package Index for news of itself, and print.
sys.modules["deepctr_torch.utils"] = SimpleNamespace(check_version=lambda version: None)

from deepctr_torch.inputs import SparseFeat  # noqa: E402
from deepctr_torch.models import DCN, DeepFM, xDeepFM  # noqa: E402


def build(case, **options):
    """DeepCTR-Torch's model of a case."""
    columns = [SparseFeat(f"table_{i}", case["ids"], case["width"]) for i in range(case["tables"])]
    options |= dict(dnn_hidden_units=case["top"])
    if case["model"] == "deepfm":
        return DeepFM(columns, columns, **options)
    if case["model"] == "dcn":
        return DCN(columns, columns, l2_reg_cross=0, cross_num=case["crosses"], **options)
    return xDeepFM(columns, columns, cin_layer_size=case["maps"], **options)


class Training:
    """A step of DeepCTR-Torch's model without its penalties, loader and metrics; or its `fit`."""

    def __init__(self, case, data):
        self.case = case
        self.model = build(case, l2_reg_linear=0, l2_reg_embedding=0)
        self.model.train()
        self.optimizer = torch.optim.Adam(self.model.parameters(), case["lr"])
        self.as_shipped = build(case)  # with its penalties
        adam = torch.optim.Adam(self.as_shipped.parameters(), case["lr"])
        self.as_shipped.compile(adam, "binary_crossentropy")
        self.indices, self.labels = (
            torch.from_numpy(data[name].astype(np.float32)) for name in ("indices", "labels")
        )

    def fit(self):
        """Train on all batches once."""
        indices, labels = (x.reshape(-1, x.shape[-1]).numpy() for x in (self.indices, self.labels))
        with contextlib.redirect_stdout(io.StringIO()):
            columns = list(indices.T)
            self.as_shipped.fit(columns, labels, batch_size=self.case["batch"], verbose=0)

    def step(self, at):
        probabilities = self.model(self.indices[at])
        self.optimizer.zero_grad()
        nn.functional.binary_cross_entropy(probabilities, self.labels[at]).backward()
        self.optimizer.step()


if __name__ == "__main__":
    answer(Training)
