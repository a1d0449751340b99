import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import pytest

# Compare in float64: rounding is 1e-16 there, and a wrong share 1e-2.
keras.config.set_floatx("float64")


@pytest.fixture(autouse=True)
def _float64():
    """Give each test float64, whatever the one before it has set."""
    yield
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
