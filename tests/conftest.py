"""Hypothesis tries the same examples in every run, and waits for Numba to compile."""

from hypothesis import settings

settings.register_profile("cupyrec", deadline=None, derandomize=True)
settings.load_profile("cupyrec")
