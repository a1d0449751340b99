"""`model.fit` on batches that do not fit in memory.

```python
import accumloop

ds = tf.data.Dataset.from_tensor_slices((x, y)).batch(256)
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
history = accumloop.train(model, ds, accum=8, epochs=3)  # the updates of model.fit(ds, epochs=3)
```
"""

from accumloop._accumulate import Accumulate
from accumloop._accumulator import GradientAccumulator
from accumloop._backup import BackupAndRestore
from accumloop._train import train
from accumloop._version import __version__

__all__ = ["Accumulate", "BackupAndRestore", "GradientAccumulator", "__version__", "train"]
