"""The updates that a `train_step` asks of optimizers, recorded instead of made."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from accumloop import _assigned, _attributes, _keras, _sums
from accumloop._shadow import shadowed


class Application(NamedTuple):
    """A call of an optimizer: `optimizer.<method>(gradients, variables)`."""

    optimizer: keras.optimizers.Optimizer
    variables: list[Any] | None
    with_pairs: bool  # apply_gradients(zip(gradients, variables)), else apply(...)
    ops_before: int  # in the graph, when it was asked for


def apply(applications: list[Application], gradients: list[list[Any]]) -> None:
    """Let each optimizer make its update, with the gradients of a whole batch."""
    for (optimizer, variables, with_pairs, _), own in zip(applications, gradients, strict=True):
        if variables is None:
            optimizer.apply(own)
        elif with_pairs:
            optimizer.apply_gradients(zip(own, variables, strict=True))
        else:
            optimizer.apply(own, variables)


@contextlib.contextmanager
def withheld(model: keras.Model) -> Iterator[list[tuple[Application, list[Any]]]]:
    """Record what optimizers are asked to apply, and refuse other updates of what is trained."""
    recorded: list[tuple[Application, list[Any]]] = []

    def record(optimizer: Any, gradients: Any, variables: Any, with_pairs: bool) -> None:
        gradients = list(gradients)
        variables = None if variables is None else list(variables)
        for gradient, variable in zip(gradients, variables or [], strict=variables is not None):
            _sums.set_static_shape(gradient, variable.shape)
        ops = 0 if tf.executing_eagerly() else len(_operations())
        recorded.append((Application(optimizer, variables, with_pairs, ops), gradients))

    def shadows_of(optimizer: Any) -> dict[str, Any]:
        def apply(grads: Any, trainable_variables: Any = None) -> None:
            record(optimizer, grads, trainable_variables, with_pairs=False)

        def apply_gradients(grads_and_vars: Any) -> Any:
            gradients, variables = zip(*grads_and_vars, strict=True)
            record(optimizer, gradients, variables, with_pairs=True)
            return optimizer.iterations

        return {"apply": apply, "apply_gradients": apply_gradients}

    def refusing(variable: Any) -> Callable[..., Any]:
        original = variable.assign

        def assign(value: Any) -> Any:
            if _keras.in_stateless_scope():
                return original(value)
            raise _assigned.assigned(model, variable.path)

        return assign

    owner = threading.get_ident()
    unseen_apply = keras.optimizers.Optimizer.apply

    def apply_unseen(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if threading.get_ident() == owner:
            raise _unseen(model, optimizer)
        unseen_apply(optimizer, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        for optimizer in _attributes.held(model, keras.optimizers.Optimizer):
            stack.enter_context(shadowed(optimizer, **shadows_of(optimizer)))
        for variable in model.trainable_variables:
            stack.enter_context(shadowed(variable, assign=refusing(variable)))
        # Its own class: what it inherits comes back when the name is deleted.
        keras.optimizers.Optimizer.apply = apply_unseen
        stack.callback(delattr, keras.optimizers.Optimizer, "apply")
        yield recorded


def after(applications: list[Application], tensors: dict[str, Any]) -> dict[str, Any]:
    """Return those tensors of a graph that were made after the last call of an optimizer."""
    if tf.executing_eagerly():
        return {}
    last = max((application.ops_before for application in applications), default=0)
    before = {operation.name for operation in _operations()[:last]}
    return {name: tensor for name, tensor in tensors.items() if tensor.op.name not in before}


def _operations() -> list[Any]:
    return tf.compat.v1.get_default_graph().get_operations()


def warn_of_repeated(applications: list[Application]) -> None:
    """Tell of a step that updates the same weights more than once, such as a critic in a loop."""
    seen: set[int] = set()
    for application in applications:
        own = {id(variable) for variable in application.variables or []}
        if own & seen:
            warnings.warn(
                "The `train_step` updates the same weights more than once. With accum > 1 all its "
                "gradients are taken at the weights from before the first update, other than "
                "under `model.fit`.",
                stacklevel=2,
            )
            return
        seen |= own


def _unseen(model: keras.Model, optimizer: Any) -> NotImplementedError:
    return NotImplementedError(
        f"`{type(model).__name__}.train_step` updates with an optimizer that is not an attribute "
        "of the model: with accum > 1 its updates cannot be put off to the end of a batch. "
        f"Make it one (`self.optimizer_2 = ...`), or use accum=1. Received: {optimizer!r}"
    )
