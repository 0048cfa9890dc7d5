"""Optimizers and learning-rate schedules."""

from cupyrec.optim.gradient_scaler import GradientScaler
from cupyrec.optim.optimizer import Optimizer
from cupyrec.optim.optimizers import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    CatchUpAdam,
    RowWiseAdagrad,
)  # fmt: skip
from cupyrec.optim.parameter_group import ParameterGroup
from cupyrec.optim.schedules import Cosine, Plateau, StepDecay, WarmupPolynomial

__all__ = [
    "FTRL", "SGD", "Adagrad", "Adam", "AdamW", "CatchUpAdam", "Cosine", "GradientScaler",
    "Optimizer", "ParameterGroup", "Plateau", "RowWiseAdagrad", "StepDecay", "WarmupPolynomial",
]  # fmt: skip
