"""The handwritten digits that scikit-learn ships, as a TensorFlow Datasets builder.

Importing this package registers the builder, so that `tfds.load` finds it by its name.

Example:
    ```python
    import accumloop.digits
    import tensorflow_datasets as tfds

    train = tfds.load("digits", split="train", as_supervised=True)
    ```
"""

from accumloop.digits.digits_dataset_builder import Builder

__all__ = ["Builder"]
