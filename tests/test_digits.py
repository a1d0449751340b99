"""The data set `digits`, prepared once into a folder of the test's own."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds
from sklearn.datasets import load_digits

import accumloop.digits

SPLITS = {"train": slice(0, 1500), "test": slice(1500, 1797)}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("digits"))
    tfds.builder("digits", data_dir=folder).download_and_prepare()
    return folder


def read(split, data_dir):
    """Return the images and the labels of a split, in the order in which TFDS reads them."""
    pairs = tfds.load("digits", split=split, as_supervised=True, data_dir=data_dir)
    images, labels = zip(*tfds.as_numpy(pairs), strict=True)
    return np.stack(images), np.stack(labels)


def sorted_rows(counts, labels):
    """Return rows of 64 pixel counts and a label, in an order that only depends on the rows."""
    rows = np.column_stack([np.reshape(counts, (len(labels), 64)), labels]).astype("int64")
    return rows[np.lexsort(rows.T)]


def assert_same_rows(rows, expected):
    assert rows.shape == expected.shape
    np.testing.assert_array_equal(rows, expected)


def test_builder_is_registered_under_its_name():
    assert isinstance(tfds.builder("digits"), accumloop.digits.Builder)


def test_features(data_dir):
    info = tfds.builder("digits", data_dir=data_dir).info
    assert set(info.features) == {"image", "label"}
    assert info.features["image"].shape == (8, 8, 1)
    assert info.features["image"].dtype == np.uint8
    assert info.features["label"].num_classes == 10
    assert info.supervised_keys == ("image", "label")
    assert {name: split.num_examples for name, split in info.splits.items()} == {
        "train": 1500,
        "test": 297,
    }


def test_texts_are_found():
    metadata = accumloop.digits.Builder.get_metadata()
    assert "round(pixel * 16 / 255)" in metadata.description
    assert "10.24432/C50P49" in metadata.citation
    assert set(metadata.tags) <= set(tfds.core.dataset_metadata.valid_tags())
    assert "ml.task.image-classification" in metadata.tags


@pytest.mark.parametrize("split", SPLITS)
def test_split_holds_the_rows_of_scikit_learn(split, data_dir):
    images, labels = read(split, data_dir)
    assert images.shape[1:] == (8, 8, 1)
    assert images.dtype == np.uint8
    assert labels.dtype == np.int64
    source = load_digits()
    assert_same_rows(
        sorted_rows(np.rint(images * (16 / 255)), labels),
        sorted_rows(source.images[SPLITS[split]], source.target[SPLITS[split]]),
    )


def test_images_use_the_whole_range_of_uint8(data_dir):
    images, _ = read("train", data_dir)
    assert images.min() == 0
    assert images.max() == 255
    assert len(np.unique(images)) == 17


def test_same_rows_can_differ():
    source = load_digits()
    images, labels = source.images[:10], source.target[:10]
    rows = sorted_rows(images, labels)
    assert_same_rows(sorted_rows(images[::-1], labels[::-1]), rows)
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        assert_same_rows(sorted_rows(images, labels[::-1]), rows)


@pytest.mark.parametrize("split", SPLITS)
def test_order_is_the_same_after_preparing_again(split, data_dir, tmp_path):
    tfds.builder("digits", data_dir=str(tmp_path)).download_and_prepare()
    for first, second in zip(read(split, data_dir), read(split, str(tmp_path)), strict=True):
        np.testing.assert_array_equal(first, second)


def test_prepared_digits_are_read_without_scikit_learn(data_dir):
    code = (
        "import sys; sys.modules['sklearn'] = None; "
        "import accumloop.digits; import tensorflow_datasets as tfds; "
        "print(len(list(tfds.load('digits', split='test', data_dir=sys.argv[1]))))"
    )
    root = str(Path(accumloop.__file__).parents[1])
    run = subprocess.run(
        [sys.executable, "-c", code, data_dir],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert run.stdout == "297\n", run.stderr
