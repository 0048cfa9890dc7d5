"""The DeepCTR-Torch side of bench_train.py: as bench_peer_torch.py, but for models of its own."""

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


class Training:
    """A step of DeepCTR-Torch's model, as its `fit` does it, without its loader and its metrics."""

    def __init__(self, case, data):
        columns = [
            SparseFeat(f"table_{i}", case["ids"], case["width"]) for i in range(case["tables"])
        ]
        options = dict(dnn_hidden_units=case["top"], l2_reg_linear=0, l2_reg_embedding=0)
        if case["model"] == "deepfm":
            self.model = DeepFM(columns, columns, **options)
        elif case["model"] == "dcn":
            options |= dict(l2_reg_cross=0, cross_num=case["crosses"])
            self.model = DCN(columns, columns, **options)
        else:
            self.model = xDeepFM(columns, columns, cin_layer_size=case["maps"], **options)
        self.model.train()
        self.optimizer = torch.optim.Adam(self.model.parameters(), case["lr"])
        self.indices, self.labels = (
            torch.from_numpy(data[name].astype(np.float32)) for name in ("indices", "labels")
        )

    def step(self, at):
        probabilities = self.model(self.indices[at])
        self.optimizer.zero_grad()
        nn.functional.binary_cross_entropy(probabilities, self.labels[at]).backward()
        self.optimizer.step()


if __name__ == "__main__":
    answer(Training)
