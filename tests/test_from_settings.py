import inspect

import numpy as np
import oracle
import pytest

from cupyrec import config, optim, training
from cupyrec.data import Column, Schema
from cupyrec.from_settings import (
    MODELS,
    OPTIMIZERS,
    build_model,
    build_optimizer,
    default_settings,
    fit_options,
    group_field,
)

SCHEMA = Schema(
    [
        Column("click", "label"),
        Column("price", "numeric", transform="log", buckets=True),
        Column("item", "categorical", "hex"),
    ]
)


def changed(name, *words):
    return config.override(default_settings(name), map(config.parse_setting, words))


@pytest.mark.parametrize("name", MODELS)
def test_default_settings_are_those_of_the_models_class(name):
    settings = default_settings(name)["model"]
    assert settings["name"] == name
    parameters = inspect.signature(MODELS[name]).parameters
    for key in settings.keys() - config.DEFAULTS["model"].keys():
        assert settings[key] == parameters[key].default
    assert not [key for key in settings if key.startswith("num_")]


def test_a_model_is_that_of_its_settings():
    settings = changed(
        "dlrm", "model.bottom=[5]", "model.initial_range=0.5", "training.amp=bfloat16",
        "training.seed=3", "exchange.forward=int8", "exchange.backward=fp16",
    )  # fmt: skip
    model, again = (build_model(settings, SCHEMA, "cpu") for _ in range(2))
    assert [w.shape for w in model.bottom.weights] == [(5, 1), (16, 5)]
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(value, again.state_dict()[name])
    assert model.amp == "bfloat16"
    ((_, group),) = model.named_groups()
    vectors = model.embedding(np.arange(200).reshape(100, 2)).numpy()
    assert 0.45 < np.abs(vectors).max() <= 0.5
    exchange = group.exchange
    codecs = exchange.forward, exchange.evaluation, exchange.backward
    assert codecs == ("int8", "int8", "fp16")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_is_that_of_its_settings(name):
    words = ["optimizer.momentum=0.5"] if name == "sgd" else []
    settings = changed(
        "lr", f"optimizer.name={name}", "optimizer.lr=0.25", "optimizer.weight_decay=0.125",
        "optimizer.clip_norm=2", "optimizer.warmup_steps=4", "training.amp=float16", *words,
    )  # fmt: skip
    optimizer = build_optimizer(settings, build_model(settings, SCHEMA, "cpu"))
    assert type(optimizer) is OPTIMIZERS[name]
    assert (optimizer.lr, optimizer.clip_norm) == (0.25, 2)
    assert {share.weight_decay for share in optimizer.parameter_groups} == {0.125}
    assert optimizer.scaler is not None
    assert [optimizer.schedule(step) for step in (1, 4)] == [
        optim.WarmupPolynomial(4, 0, 0, 2.0)(step) for step in (1, 4)
    ]


def test_embeddings_may_have_l2_of_all_rows():
    settings = changed("deepfm", "model.dense_updates=true", "optimizer.embedding_l2=0.01")
    model = build_model(settings, SCHEMA, "cpu")
    dense, tables = build_optimizer(settings, model).parameter_groups
    assert ((dense.l2, dense.tables), (tables.l2, tables.parameters)) == ((0, []), (0.01, []))
    assert tables.tables == [model.embedding.group]
    assert len(dense.parameters) == len(list(model.named_parameters()))
    assert model.embedding.group.dense_updates


def test_a_plateau_is_that_of_its_settings():
    words = "schedule=plateau", "decay_factor=0.5", "decay_patience=3", "decay_threshold=0.25"
    settings = changed("lr", *(f"optimizer.{word}" for word in (*words, "decay_min=0.125")))
    optimizer = build_optimizer(settings, build_model(settings, SCHEMA, "cpu"))
    assert optimizer.schedule == optim.Plateau(0.5, 3, threshold=0.25, min_factor=0.125)
    assert (
        build_optimizer(
            changed("lr", "optimizer.schedule=plateau"), build_model(settings, SCHEMA, "cpu")
        ).schedule
        == optim.Plateau()
    )


def test_what_fit_is_told():
    settings = changed(
        "mmoe", "training.epochs=3", "training.positive_weight=2", "training.task_weights=[0.5]",
        "evaluation.group=price bucket",
    )  # fmt: skip
    told = fit_options(settings, SCHEMA)
    assert (told["epochs"], told["positive_weight"], told["task_weights"]) == (3, 2, [0.5])
    assert told["group"] == 1
    assert told.keys() <= inspect.signature(training.fit).parameters.keys()
    del settings["evaluation"]  # runs before version 0.3 don't have it
    assert group_field(settings, SCHEMA) is None


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["embedding_l2=0.5"], "embedding_l2 must be 0 without model.dense_updates, got 0.5."),
        (["name=adamw"], "weight_decay must be positive for adamw, got 0."),
        (["name=adam", "momentum=0.5"], "momentum must be 0 but for sgd, got 0.5."),
        (["schedule=plateau", "warmup_steps=3"], "warmup_steps must be 0 for plateau, got 3."),
        (
            ["schedule=linear"],
            "[optimizer] schedule must be polynomial, cosine, step or plateau, got 'linear'.",
        ),
    ],
)
def test_refuses(words, text):
    settings = changed("lr", *(f"optimizer.{word}" for word in words))
    model = build_model(settings, SCHEMA, "cpu")
    with pytest.raises(ValueError, match=oracle.sentence(f"config: {text}")):
        build_optimizer(settings, model)
