"""Optimizers and learning-rate schedules."""

from cupyrec.optim.optimizer import SGD, Adagrad, Adam, Optimizer
from cupyrec.optim.schedules import WarmupPolynomial

__all__ = ["SGD", "Adagrad", "Adam", "Optimizer", "WarmupPolynomial"]
