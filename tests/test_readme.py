"""The README is a program: its Python blocks run, from top to bottom."""

import os
import pathlib
import re

import keras
import tensorflow_datasets as tfds

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_python_blocks_run():
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    names = {}
    with tfds.testing.mock_data(num_examples=300):
        for block in blocks("python"):
            exec(block, names)
    assert len(names["history"].epoch) in (1, 2, 3)
    assert set(names["history"].history) == {"loss", "accuracy", "val_loss", "val_accuracy"}


def test_it_is_short():
    assert len(README.splitlines()) <= 150


def test_every_test_it_names_exists():
    named = set(re.findall(r"`(test_\w+\.py)`", README))
    assert named
    assert named <= set(os.listdir(ROOT / "tests"))


def test_every_file_it_links_exists():
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_test_command_is_where_ci_looks_for_it():
    commands = [block for block in blocks("bash") if block.startswith("# run the tests\n")]
    assert len(commands) == 1
    assert "pytest" in commands[0].splitlines()[1]
