"""The PyTorch side of bench_train.py, bench_embedding.py and gpu_train.py: sparse table gradients.

Reads the data's path and the case from its arguments, then lines "step N" or "gemms N" from stdin,
and answers each with the mean seconds.
"""

import json
import sys
import time

import numpy as np
import torch
from torch import nn


class Tables(nn.Module):
    def __init__(self, case):
        super().__init__()
        self.tables = nn.ModuleList(
            nn.Embedding(case["ids"], case["width"], sparse=True) for _ in range(case["tables"])
        )

    def vectors(self, indices):
        return [table(indices[:, i]) for i, table in enumerate(self.tables)]


class DLRM(Tables):
    def __init__(self, case):
        super().__init__(case)
        bottom = [case["num_dense"], *case["bottom"], case["width"]]
        self.bottom = mlp(bottom, linear_output=False)
        features = case["tables"] + 1
        top = [case["width"] + features * (features - 1) // 2, *case["top"], 1]
        self.top = mlp(top, linear_output=True)
        self.register_buffer("pairs", torch.tril_indices(features, features, offset=-1))

    def forward(self, dense, indices):
        dense = self.bottom(dense)
        x = torch.stack([dense, *self.vectors(indices)], dim=1)
        products = torch.bmm(x, x.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([dense, products], dim=1))


class Concatenation(Tables):
    def __init__(self, case):
        super().__init__(case)
        self.top = mlp([case["tables"] * case["width"], *case["top"], 1], linear_output=True)

    def forward(self, dense, indices):
        return self.top(torch.cat(self.vectors(indices), dim=1))


MODELS = {"dlrm": DLRM, "concatenation": Concatenation}


def mlp(sizes, linear_output):
    layers = []
    for n, m in zip(sizes[:-1], sizes[1:], strict=True):
        layers += [nn.Linear(n, m), nn.ReLU()]
    return nn.Sequential(*layers[: -1 if linear_output else None])


def optimizers(model, name, lr):
    if name == "adam":  # which is not for sparse gradients
        tables = list(model.tables.parameters())
        dense = list(model.top.parameters())
        return [torch.optim.SparseAdam(tables, lr), torch.optim.Adam(dense, lr)]
    optimizer = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}[name]
    return [optimizer(model.parameters(), lr)]


class Training:
    """A step of a model on click logs."""

    def __init__(self, case, data):
        device = case.get("device", "cpu")
        self.dense, self.indices, self.labels = (
            torch.from_numpy(data[name]).to(device) for name in ("dense", "indices", "labels")
        )
        with torch.device(device):
            self.model = MODELS[case["model"]](case)
        self.forward = torch.compile(self.model) if case.get("compiled") else self.model
        self.optimizers = optimizers(self.model, case["optimizer"], case["lr"])
        self.loss = nn.BCEWithLogitsLoss()
        amp = getattr(torch, case.get("amp", "float32"))
        self.autocast = torch.autocast(device, amp, enabled=amp != torch.float32)
        self.scaler = torch.amp.GradScaler(device, enabled=amp == torch.float16)

    def step(self, at):
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        with self.autocast:
            logits = self.forward(self.dense[at], self.indices[at])
        loss = self.loss(logits.float(), self.labels[at])
        self.scaler.scale(loss).backward()
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()


class Bags:
    """A step of summed bags alone, whose gradients are ones."""

    def __init__(self, case, data):
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(case["ids"], case["width"], mode="sum", sparse=True)
            for _ in range(case["tables"])
        )
        self.optimizer = torch.optim.SGD(self.tables.parameters(), case["lr"])
        self.gradients = [torch.ones(case["batch"], case["width"])] * case["tables"]
        self.batches, at = [], 0
        for lengths in data["lengths"]:  # (B, F): each feature's bags as EmbeddingBag takes them
            parts = np.split(data["values"][at : at + lengths.sum()], lengths.cumsum()[:-1])
            at += lengths.sum()
            columns = [np.concatenate(parts[f :: case["tables"]]) for f in range(case["tables"])]
            starts = (lengths.cumsum(axis=0) - lengths).T.copy()
            pairs = zip(columns, starts, strict=True)
            self.batches.append([tuple(map(torch.from_numpy, pair)) for pair in pairs])

    def step(self, at):
        self.optimizer.zero_grad()
        batch = self.batches[at]
        bags = [table(*part) for table, part in zip(self.tables, batch, strict=True)]
        torch.autograd.backward(bags, self.gradients)
        self.optimizer.step()


def answer(kind):
    """Build the training of a kind, and time it as often as stdin asks for that."""
    data, case = np.load(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(case["threads"])
    torch.manual_seed(0)
    training = kind(case, data)
    at = 0

    def step():
        nonlocal at
        at = (at + 1) % case["batches"]
        training.step(at)

    layers = []
    for n, m in case.get("layers", []):
        x, w, dy = torch.randn(case["batch"], n), torch.randn(m, n), torch.randn(case["batch"], m)
        layers.append((x, w, dy, torch.empty_like(dy), torch.empty_like(w), torch.empty_like(x)))

    def gemms():
        for x, w, dy, y, dw, dx in layers:
            torch.mm(x, w.t(), out=y)
            torch.mm(dy.t(), x, out=dw)
            torch.mm(dy, w, out=dx)

    for line in sys.stdin:
        what, repeat = line.split()
        work = training.fit if what == "fit" else {"step": step, "gemms": gemms}[what]
        start = time.perf_counter()
        for _ in range(int(repeat)):
            work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        print((time.perf_counter() - start) / int(repeat), flush=True)


def main():
    answer(lambda case, data: (Bags if case["model"] == "bags" else Training)(case, data))


if __name__ == "__main__":
    main()
