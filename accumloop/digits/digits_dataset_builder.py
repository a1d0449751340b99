"""The builder of the data set `digits`."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

_TRAIN_ROWS = 1_500
_SOURCE_MAXIMUM = 16


class Builder(tfds.core.GeneratorBasedBuilder):
    """1,797 handwritten digits of 8 x 8 pixels, read from the installed scikit-learn.

    The name must be `Builder`: TFDS takes the data set's name, `digits`, from the module's.
    """

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "Initial release."}  # noqa: RUF012 - TFDS names and reads it so

    def _info(self) -> tfds.core.DatasetInfo:
        """Return the features, with the texts that lie beside this file."""
        return self.dataset_info_from_configs(
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(8, 8, 1), dtype=np.uint8),
                    "label": tfds.features.ClassLabel(num_classes=10),
                }
            ),
            supervised_keys=("image", "label"),
            homepage="https://archive.ics.uci.edu/dataset/80",
        )

    def _split_generators(
        self, dl_manager: tfds.download.DownloadManager
    ) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
        """Return the examples of both splits; nothing is downloaded."""
        del dl_manager
        return {
            "train": self._generate_examples(slice(None, _TRAIN_ROWS)),
            "test": self._generate_examples(slice(_TRAIN_ROWS, None)),
        }

    def _generate_examples(self, rows: slice) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield `(row, example)` for some rows of scikit-learn's file.

        Args:
            rows: The rows of the split, in the order of the file.

        Yields:
            The number of the row within the split, which TFDS takes as the key of its fixed
            shuffle, and the example: `image`, uint8 of shape `(8, 8, 1)`, and `label`, an int.
        """
        # Imported here because a data set that is prepared is read without scikit-learn.
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = np.rint(digits.images[rows] * (255 / _SOURCE_MAXIMUM)).astype(np.uint8)
        for row, (image, label) in enumerate(zip(images, digits.target[rows], strict=True)):
            yield row, {"image": image[:, :, np.newaxis], "label": int(label)}
