"""A part of a traced function: some of its tensors, and only the ops that they depend on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def function_of(concrete: Any, fetches: list[Any]) -> Callable[..., list[Any]]:
    """Return `function(*arguments) -> fetches`, for tensors in the graph of a concrete function.

    What `fetches` do not depend on is not in it, whether it has side effects or not. Nothing is
    traced again. To be called in a graph.

    Args:
        concrete: A concrete function. It may have any arguments.
        fetches: Outputs of the function, symbolic tensors of `concrete.graph`.
    """
    # An output is an identity that waits for all side effects of the function.
    fetches = [tensor.op.inputs[0] for tensor in fetches]
    definition = concrete.graph.as_graph_def()
    needed = _needed(definition, [tensor.op.name for tensor in fetches])
    nodes = [node for node in definition.node if node.name in needed]
    del definition.node[:]
    definition.node.extend(nodes)
    captures = [outer for outer, _ in concrete.graph.captures]

    def function(*arguments: Any) -> list[Any]:
        given = tf.nest.flatten(arguments, expand_composites=True)
        given = [tensor for tensor in given if tensor is not None]
        inputs = zip(concrete.inputs, [*given, *captures], strict=True)
        # Through an identity: what belongs to an outer graph enters this one.
        feeds = {inner.name: tf.identity(t) for inner, t in inputs if inner.op.name in needed}
        names = [tensor.name for tensor in fetches]
        return list(tf.graph_util.import_graph_def(definition, feeds, names))

    return function


def nodes_of(graph: Any) -> list[Any]:
    """Return the nodes of a graph and of the functions that it calls."""
    definition = graph.as_graph_def()
    # `library` is what TensorFlow calls those functions.
    called = [node for function in definition.library.function for node in function.node_def]
    return [*definition.node, *called]


def _needed(definition: Any, names: list[str]) -> set[str]:
    """Return the names of nodes and of all that they depend on."""
    inputs = {node.name: node.input for node in definition.node}
    needed: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in needed:
            needed.add(name)
            # "name:1" is an output of a node, "^name" a node that has to run before.
            waiting.extend(given.lstrip("^").split(":")[0] for given in inputs[name])
    return needed
