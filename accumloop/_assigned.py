"""Variables that a step assigns to by itself, as its graph shows: once a micro-batch, not a batch.

What is withheld is not in the graph. What is left are metrics and seeds, which move with each
micro-batch as they should, and the state of layers and of a step's own, which `fit` moves once
a batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from accumloop import _ancestors, _attributes, _keras

_ASSIGNS = ("Assign", "ResourceScatter", "ResourceStridedSliceAssign", "ResourceApply")


class _Assignment(NamedTuple):
    handle: Any  # the eager resource tensor of the variable
    in_layer: bool  # or in a loss: within a name scope
    floating: bool


def refuse_or_warn(model: keras.Model, graph: Any) -> None:
    """Refuse a step that assigns to variables by itself, and warn of layers that do.

    Args:
        model: The model.
        graph: The graph of its micro-step.

    Raises:
        NotImplementedError: If the step, and no layer, assigns to what is not a metric.
    """
    allowed = {id(handle) for handle in _handles(_moving_with_micro_batches(model))}
    named = {id(_handle(v)): _path(v) for v in _attributes.held(model, tf.Variable)}
    named |= {id(_handle(v)): v.path for v in model.weights}
    updated = {id(handle): path for handle, path in _updated(model)}
    in_layers = set()
    for handle, in_layer, floating in _assignments(graph):
        if id(handle) in allowed:
            continue
        if id(handle) in updated:
            raise assigned(model, updated[id(handle)])
        name = named.get(id(handle))
        if name is None and not floating:
            continue  # A seed generator that the model does not list.
        if not in_layer:
            raise assigned(model, name or "a variable that the model does not list")
        in_layers.add(name or "a variable that the model does not list")
    own_step = _keras.is_own(model, "train_step")
    listed = set() if own_step else {v.path for v in model.non_trainable_weights}
    if in_layers - listed:  # What is listed has been warned of in the trial.
        warnings.warn(
            f"Each forward pass in training updates {sorted(in_layers - listed)}. With accum > 1 "
            "that is once a micro-batch, and not once a batch as in `model.fit`.",
            stacklevel=2,
        )


def assigned(model: keras.Model, name: str) -> NotImplementedError:
    """Return the refusal of a step that assigns to a variable by itself."""
    return NotImplementedError(
        f"`{type(model).__name__}`, or a layer of it, assigns to a variable by itself, which with "
        "accum > 1 would happen once a micro-batch and cannot be put off. Let an optimizer update "
        f"it, assign to it in a callback, or use accum=1. Received: an assignment to '{name}'"
    )


def _moving_with_micro_batches(model: keras.Model) -> list[Any]:
    weights = {id(variable) for variable in model.weights}
    metrics = _attributes.held(model, keras.metrics.Metric)
    seeds = [variable for variable in model.variables if id(variable) not in weights]
    seeds += _keras.global_seed_variables()
    return [*seeds, *model.metrics_variables, *(v for metric in metrics for v in metric.variables)]


def _updated(model: keras.Model) -> Iterator[tuple[Any, str]]:
    """Yield the handles of what optimizers update, and of their own state."""
    for optimizer in _attributes.held(model, keras.optimizers.Optimizer):
        for variable in optimizer.variables:
            yield _handle(variable), variable.path
    for variable in model.trainable_variables:
        yield _handle(variable), variable.path


def _handles(variables: list[Any]) -> list[Any]:
    return [_handle(variable) for variable in variables]


def _handle(variable: Any) -> Any:
    return (variable.value if isinstance(variable, keras.Variable) else variable).handle


def _path(variable: tf.Variable) -> str:
    return variable.name.split(":")[0]


def _assignments(graph: Any) -> Iterator[_Assignment]:
    """Yield the assignments of a graph and of the functions that it calls."""
    definition = graph.as_graph_def()
    functions = {function.signature.name: function for function in definition.library.function}
    outer = {inner.op.name: handle for handle, inner in graph.captures}
    yield from _in_nodes(definition.node, outer, functions, in_layer=None)


def _in_nodes(
    nodes: Any, known: dict[str, Any], functions: dict[str, Any], in_layer: bool | None
) -> Iterator[_Assignment]:
    known = dict(known)  # names of tensors to the variables that they are handles of
    for node in nodes:
        inputs = [name.split(":")[0] for name in node.input if not name.startswith("^")]
        scoped = "/" in node.name if in_layer is None else in_layer
        if node.op == "Identity" and inputs and inputs[0] in known:
            known[node.name] = known[inputs[0]]
        if node.op.startswith(_ASSIGNS) and inputs[0] in known:
            floating = tf.as_dtype(node.attr["dtype"].type or tf.float32).is_floating
            yield _Assignment(known[inputs[0]], scoped, floating)
        for name in _ancestors.called(node):
            arguments = [argument.name for argument in functions[name].signature.input_arg]
            given = inputs[len(inputs) - len(arguments) :]  # A condition comes before.
            inner = {
                argument: known[tensor]
                for argument, tensor in zip(arguments, given, strict=True)
                if tensor in known
            }
            if inner:
                yield from _in_nodes(functions[name].node_def, inner, functions, scoped)
