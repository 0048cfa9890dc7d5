"""Hypothesis tries the same examples in every run, and waits for Numba to compile."""

import pytest
from hypothesis import settings

import cupyrec

settings.register_profile("cupyrec", deadline=None, derandomize=True)
settings.load_profile("cupyrec")


@pytest.fixture(autouse=True)
def seeded():
    """No test depends on those before it."""
    cupyrec.manual_seed(0)
