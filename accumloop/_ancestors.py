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
    fetches = _before_side_effects(fetches)
    definition = concrete.graph.as_graph_def()
    nodes = _needed_nodes(definition, fetches)
    needed = {node.name for node in nodes}
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


def reads_arguments(concrete: Any, fetch: Any) -> bool:
    """Tell whether an output of a concrete function depends on its arguments."""
    nodes = _needed_nodes(concrete.graph.as_graph_def(), _before_side_effects([fetch]))
    captured = {inner.op.name for _, inner in concrete.graph.captures}
    arguments = {tensor.op.name for tensor in concrete.inputs} - captured
    return any(node.name in arguments for node in nodes)


def ops_of(concrete: Any, fetches: list[Any]) -> set[str]:
    """Return the types of the ops that outputs of a concrete function depend on."""
    definition = concrete.graph.as_graph_def()
    functions = {function.signature.name: function for function in definition.library.function}
    waiting = list(_needed_nodes(definition, _before_side_effects(fetches)))
    ops: set[str] = set()
    while waiting:
        node = waiting.pop()
        ops.add(node.op)
        for name in called(node):
            function = functions.pop(name, None)  # Once: it may call itself.
            waiting.extend([] if function is None else function.node_def)
    return ops


def called(node: Any) -> list[str]:
    """Return the names of the functions that a node of a graph calls."""
    names = [value.func.name for value in node.attr.values() if value.func.name]
    return names + [f.name for value in node.attr.values() for f in value.list.func]


def nodes_of(graph: Any) -> list[Any]:
    """Return the nodes of a graph and of the functions that it calls."""
    definition = graph.as_graph_def()
    # `library` is what TensorFlow calls those functions.
    called = [node for function in definition.library.function for node in function.node_def]
    return [*definition.node, *called]


def _before_side_effects(fetches: list[Any]) -> list[Any]:
    # An output is an identity that waits for all side effects of the function.
    return [tensor.op.inputs[0] for tensor in fetches]


def _needed_nodes(definition: Any, fetches: list[Any]) -> list[Any]:
    needed = _needed(definition, [tensor.op.name for tensor in fetches])
    return [node for node in definition.node if node.name in needed]


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
