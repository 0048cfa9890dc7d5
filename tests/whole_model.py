"""What every model must show: gradients in float64, and one training on all devices."""

import functools

import numpy as np
import oracle

import cupyrec
from cupyrec import arrays, nn, optim
from cupyrec.data import Batch
from cupyrec.testing import gradcheck

f32 = np.float32
DENSE, TABLES = 3, 4


def batches(steps, rows=32, tasks=1):
    """Some ids come again, others are new in every batch."""
    generator = np.random.default_rng(2)
    for _ in range(steps):
        dense = generator.standard_normal((rows, DENSE)).astype(f32)
        ids = generator.zipf(1.3, (rows, TABLES)) % 50 - 20
        yield Batch(dense, ids, (generator.random((rows, tasks)) < 0.3).astype(f32))


def tasks_of(model: nn.Module) -> int:
    return getattr(model, "num_tasks", 1)


def mlp(layer: nn.FusedMLP, x: np.ndarray) -> np.ndarray:
    """The output of a FusedMLP without dropout, in float64."""
    weights, biases = [w.data for w in layer.weights], [b.data for b in layer.biases]
    ones, zeros = [1] * len(weights), [0] * len(weights)
    return oracle.mlp(x, weights, biases, ones, zeros, layer.skip_final_activation)[-1]


def check_gradient(model: nn.Module, rows: int = 7) -> None:
    """Compare with differences the gradient of the vectors and of all parameters, in float64."""
    places, values = [], []
    for name, parameter in model.named_parameters():
        *path, last = name.split(".")
        place = functools.reduce(
            lambda at, key: at[int(key)] if key.isdigit() else getattr(at, key), path, model
        )
        places.append((place, last))
        values.append(np.float64(parameter.data))
    for _, buffer in model.named_buffers():
        buffer.data = np.float64(buffer.data)
    width = model.embedding.group.width
    values.append(oracle.normals((rows, TABLES, width), np.float64))
    dense = oracle.normals((rows, DENSE), np.float64, seed=1)

    def towers(*tensors):
        *parameters, vectors = tensors
        for (place, name), tensor in zip(places, parameters, strict=True):
            if isinstance(place, list):
                place[int(name)] = tensor
            else:
                setattr(place, name, tensor)
        return model._towers(dense, vectors)

    assert gradcheck(towers, values)


def train(make, device, amp=None, steps=3):
    """Losses, and by name the parameters and vectors at the end."""
    cupyrec.manual_seed(1)
    model = make().to(device)
    model.amp = amp
    # Adam would make a step of full size of a gradient that is all rounding.
    optimizer = optim.SGD(model.parameters(), lr=0.5)
    given = batches(steps, tasks=tasks_of(model))
    losses = [cupyrec.train_step(model, batch, optimizer).item() for batch in given]
    found = {name: arrays.to_host(p.data) for name, p in model.named_parameters()}
    for name, group in model.named_groups():
        found[name] = group.store.export_rows(0, len(group.store)).vectors
    return losses, found


def check_devices_agree(xp, make, amp=None) -> None:
    eps = {None: 1e-5, "float16": 2.0**-11, "bfloat16": 2.0**-8}[amp]
    losses, values = train(make, "cpu", amp)
    theirs, others = train(make, arrays.name(xp), amp)
    np.testing.assert_allclose(theirs, losses, rtol=eps)
    for name, value in values.items():
        np.testing.assert_allclose(
            others[name], value, rtol=0, atol=eps * np.abs(value).max(), err_msg=name
        )


def check_few_rows(model: nn.Module) -> None:
    for rows in (0, 1):
        shape = rows, tasks_of(model)
        batch = next(batches(1, rows))
        logits = model(batch.dense, batch.ids)
        assert logits.shape == shape
        logits.backward(np.ones(shape, f32))
        assert model.eval()(batch.dense, batch.ids).shape == shape
        model.train()


def check_it_replays_what_it_does(xp, make) -> None:
    """The dense part is captured in the third step; then nothing may differ from the CPU's."""
    losses, _ = train(make, arrays.name(xp), steps=4)
    expected, _ = train(make, "cpu", steps=4)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)


def count(model: nn.Module, rows: int) -> int:
    """Numbers that are learnt, of `rows` ids in all tables together."""
    dense = sum(parameter.size for _, parameter in model.named_parameters())
    return dense + rows * model.embedding.group.width


def samples(model: nn.Module, num_dense: int, rows: int = 9):
    """Yield of each sample its logit, and in float64 dense features, vectors and sum of weights.

    Of models whose rows have an id's vector and its weight; the dense features' weights are set.
    """
    if num_dense:
        weight = model.first_order.weight
        weight.data[...] = oracle.normals(weight.shape, seed=3)
    batch = next(batches(1, rows))
    logits = model(batch.dense, batch.ids).numpy()
    found = model.embedding(batch.ids).numpy().astype(np.float64)
    for b in range(rows):
        dense = batch.dense[b].astype(np.float64) if num_dense else np.empty(0)
        first = found[b, :, -1].sum()
        if num_dense:
            first += dense @ weight.data[:, 0]
        yield logits[b, 0], dense, found[b, :, :-1], first
