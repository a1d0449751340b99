import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import pytest


@pytest.fixture(autouse=True)
def _float64():
    """Compare in float64: rounding is 1e-16 there, and a wrong share 1e-2."""
    floatx = keras.config.floatx()
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(floatx)
