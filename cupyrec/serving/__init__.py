"""Predictions for others: over HTTP, and read-only models that are replaced while they serve."""

from cupyrec.serving.predictor import Predictor

__all__ = ["Predictor"]
