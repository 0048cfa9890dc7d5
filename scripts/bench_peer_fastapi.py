"""The PyTorch side of bench_serving.py: an HTTP server as one writes it with FastAPI.

    BENCH_WEIGHTS=weights.npz python -m uvicorn bench_peer_fastapi:app

Requests and answers are those of the Open Inference Protocol, in JSON. All tables are one
`nn.Embedding`, whose rows are looked up in one call; ids are ready-made row numbers of each table.
"""

import os

import numpy as np
import torch
from fastapi import FastAPI
from pydantic import BaseModel
from torch import nn


class Values(BaseModel):
    name: str
    shape: list[int]
    datatype: str
    data: list  # torch.tensor sees what is in it: pydantic would take longer


class Request(BaseModel):
    inputs: list[Values]


class Answer(BaseModel):
    model_name: str
    outputs: list[Values]


class DLRM(nn.Module):
    """Naumov et al. 2019. dense (B, N) float32, ids (B, F) int64 -> probabilities (B,)."""

    def __init__(self, weights: dict[str, np.ndarray]) -> None:
        super().__init__()
        count, ids, width = weights["tables"].shape
        self.register_buffer("first", torch.arange(count) * ids)
        self.tables = nn.Embedding.from_pretrained(
            torch.from_numpy(weights["tables"].reshape(-1, width))
        )
        self.bottom, self.top = perceptron("bottom", weights), perceptron("top", weights)[:-1]
        features = count + 1
        self.register_buffer("pairs", torch.tril_indices(features, features, offset=-1))

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        dense = self.bottom(dense)
        x = torch.cat([dense[:, None], self.tables(ids + self.first)], dim=1)
        products = torch.bmm(x, x.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return torch.sigmoid(self.top(torch.cat([dense, products], dim=1)))[:, 0]


def perceptron(name: str, weights: dict[str, np.ndarray]) -> nn.Sequential:
    layers, i = [], 0
    while f"{name}.weights.{i}" in weights:
        weight = torch.from_numpy(weights[f"{name}.weights.{i}"])
        linear = nn.Linear(weight.shape[1], weight.shape[0])
        linear.weight.data = weight
        linear.bias.data = torch.from_numpy(weights[f"{name}.biases.{i}"])
        layers += [linear, nn.ReLU()]
        i += 1
    return nn.Sequential(*layers)


app = FastAPI()
if "BENCH_THREADS" in os.environ:
    torch.set_num_threads(int(os.environ["BENCH_THREADS"]))
with np.load(os.environ["BENCH_WEIGHTS"]) as arrays:
    model = DLRM(dict(arrays)).eval()


@app.post("/v2/models/dlrm/infer")
async def infer(request: Request) -> Answer:
    given = {values.name: values for values in request.inputs}
    dense, ids = given["dense"], given["ids"]
    with torch.inference_mode():
        x = torch.tensor(dense.data, dtype=torch.float32).reshape(dense.shape)
        probability = model(x, torch.tensor(ids.data, dtype=torch.int64).reshape(ids.shape))
    values = Values(
        name="probability", shape=[len(probability)], datatype="FP32", data=probability.tolist()
    )
    return Answer(model_name="dlrm", outputs=[values])
