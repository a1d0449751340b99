"""The examples in docstrings run."""

import doctest
import importlib
import pkgutil

import pytest

import accumloop

MODULES = [
    name
    for _, name, _ in pkgutil.iter_modules(accumloop.__path__, "accumloop.")
    if name != "accumloop.__main__"
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    results = doctest.testmod(importlib.import_module(name))
    assert results.failed == 0


def test_train_has_an_example():
    results = doctest.testmod(importlib.import_module("accumloop._train"))
    assert results.attempted > 0
