"""Predictions for others: over HTTP, and read-only models that are replaced while they serve."""
