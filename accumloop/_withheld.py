"""A model's own `train_step` on a micro-batch, with all it would update once a batch withheld.

What a `train_step` asks of optimizers, trackers and BatchNormalization is recorded, to be added
up over the micro-batches and done once. That serves the `train_step` of Keras and any other,
overridden `compute_loss` and `compute_metrics`, and several optimizers (a GAN).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from accumloop import _assigned, _cut, _functions, _keras, _moments, _optimizers, _shares, _trackers
from accumloop._shadow import shadowed

Logs = dict[str, Any]


class Parts(NamedTuple):
    """What one micro-batch adds to its batch, in structures of tensors."""

    gradients: list[list[Any]]  # of each call of an optimizer
    numbers: list[_trackers.Number]
    moments: list[_moments.Sums]
    logs: dict[str, Any]  # what the step returned, but for the results of metrics


class Outcome(NamedTuple):
    """What a micro-step returns."""

    parts: Parts
    divisors: list[Any]  # of the losses whose shares are not those of their rows, float64 scalars
    logs: dict[str, Any]  # tensors that the step logs and has made after its updates


class Plan:
    """What to do with the parts of a batch, as the trace of a micro-step has found it."""

    def __init__(self) -> None:
        self.applications: list[_optimizers.Application] = []
        self.trackers: list[_trackers.Tracker] = []
        self.moved: list[_moments.Moved] = []
        self.results: dict[str, Any] = {}  # log name: function that reads it, or None for a part
        self.dtypes: dict[str, Any] = {}
        self.paths: dict[str, tuple[str, ...]] = {}  # where a log is in what the step returns

    def parts(
        self,
        gradients: list[list[Any]],
        updates: list[_trackers.Update],
        moments: list[tuple[_moments.Moved, _moments.Sums]],
        logs: dict[str, Any],
        share: Any,
    ) -> Parts:
        """Return the parts of a micro-batch, and note whose they are."""
        self.trackers[:] = [update.tracker for update in updates]
        self.moved[:] = [moved for moved, _ in moments]
        numbers = [_trackers.part_of(update, share) for update in updates]
        return Parts(gradients, numbers, [sums for _, sums in moments], logs)

    def update_once(self, parts: Parts, rows: Any) -> None:
        """Move statistics and trackers by the parts of a whole batch."""
        for moved, sums in zip(self.moved, parts.moments, strict=True):
            _moments.move(moved, sums)
        for tracker, number in zip(self.trackers, parts.numbers, strict=True):
            _trackers.update_once(tracker, number, rows)

    def logs(self, parts: Parts, state: dict[str, Any]) -> Logs:
        """Return what the step logs of a batch, with the results of metrics after their update.

        `state` has what is read from variables alone, such as a learning rate, after it.
        """
        read: dict[int, Any] = {}  # A metric with several results is asked once.
        of_batch = {name: _cast(value, self.dtypes[name]) for name, value in parts.logs.items()}
        logs: Logs = {}
        for name, result in self.results.items():
            *outer, last = self.paths[name]
            within = functools.reduce(lambda nested, key: nested.setdefault(key, {}), outer, logs)
            within[last] = result(read) if result is not None else {**of_batch, **state}[name]
        return logs

    def apply(self, gradients: list[list[Any]]) -> None:
        """Let each optimizer make its update."""
        _optimizers.apply(self.applications, gradients)


def make_micro_step(model: keras.Model, plan: Plan) -> Callable[[Any, Any, Any], Outcome]:
    """Return `micro_step(batch, share, divisors)`: forward and backward pass, and no update.

    `share` is the share of the micro-batch by its rows, and `divisors` are those of the batch,
    both float64. `plan` is filled when it is traced.
    """
    scales_loss = not _keras.is_own(model, "train_step")
    trusted = scales_loss and not _keras.is_own(model, "compute_loss")

    def micro_step(batch: Any, share: Any, divisors: Any) -> Outcome:
        with (
            _functions.traced_anew(),
            _shares.losses_by_share(batch, share, divisors, trusted=trusted) as own_divisors,
            _optimizers.withheld(model) as applications,
            _trackers.withheld(model) as updates,
            _moments.withheld(model) as moments,
            _results(model) as results,
            # Cheaper than to scale gradients, which a step of its own may take from any loss.
            _scaled_loss(model, share) if scales_loss else contextlib.nullcontext(),
        ):
            logs = model.train_step(batch)
        asked = [gradients for _, gradients in applications]
        _refuse_hidden([asked, [update[1:] for update in updates], moments, own_divisors])
        plan.applications[:] = [application for application, _ in applications]
        _optimizers.warn_of_repeated(plan.applications)
        plan.results.clear()
        gradients = [
            own if scales_loss else [_scaled(gradient, share) for gradient in own]
            for _, own in applications
        ]
        own_logs = {}
        for path, value in _flat(_checked_logs(model, logs)):
            name = "/".join(path)
            plan.paths[name] = path
            plan.results[name] = results.get(id(value), (None, None))[1]
            if plan.results[name] is None:
                own_logs[name] = _log_tensor(name, value)
                plan.dtypes[name] = own_logs[name].dtype
        # Weighted by rows, as a loss is.
        of_rows = {name: tf.cast(value, tf.float64) * share for name, value in own_logs.items()}
        parts = plan.parts(gradients, updates, moments, of_rows, share)
        return Outcome(parts, own_divisors, _optimizers.after(plan.applications, own_logs))

    return micro_step


def make_look(
    model: keras.Model, plan: Plan, micro_step: Callable[[Any, Any, Any], Outcome]
) -> Callable[[Any], None]:
    """Return `look(element_spec)`: trace a micro-step, whose trace is thrown away.

    It creates the variables of a model with a `train_step` of its own and of its optimizers:
    before there are all of them they cannot all be withheld, and a `LossScaleOptimizer` that is
    not built scales by a constant. It also refuses what the step assigns to by itself, before it
    does.
    """

    def look(element_spec: Any) -> None:
        scalar = tf.TensorSpec([], tf.float64)
        specs = [_cut.without_optionals_of(element_spec), scalar, tf.TensorSpec([None], tf.float64)]
        function = tf.function(tf.autograph.experimental.do_not_convert(micro_step))
        try:
            graph = function.get_concrete_function(*specs).graph
        except Exception:  # Whatever a model that is meant to run eagerly raises in a graph.
            if not model.run_eagerly:
                raise
            return
        for optimizer, variables, *_ in plan.applications:
            if not optimizer.built and variables is not None:
                # In the scope in which its first update would have built it.
                with keras.name_scope(optimizer.name, caller=optimizer):
                    optimizer.build(variables)
        _assigned.refuse_or_warn(model, graph)

    return look


@contextlib.contextmanager
def _results(model: keras.Model) -> Iterator[dict[int, tuple[Any, Callable[..., Any]]]]:
    """Record which tensor is the result of which metric: it is asked again after its update."""
    results: dict[int, tuple[Any, Callable[..., Any]]] = {}  # The tensor is kept: ids are reused.

    def recorder(metric: keras.metrics.Metric) -> Callable[[], Any]:
        result = metric.result

        def again(read: dict[int, Any]) -> Any:
            if id(metric) not in read:
                read[id(metric)] = result()
            return read[id(metric)]

        def recording() -> Any:
            values = result()
            if not isinstance(values, dict):
                results.setdefault(id(values), (values, again))
                return values
            for key, value in values.items():
                results[id(value)] = (value, lambda read, key=key: again(read)[key])
            return values

        return recording

    with contextlib.ExitStack() as stack:
        for metric in {id(metric): metric for metric in model.metrics}.values():
            stack.enter_context(shadowed(metric, result=recorder(metric)))
        yield results


@contextlib.contextmanager
def _scaled_loss(model: keras.Model, share: Any) -> Iterator[None]:
    optimizer = model.optimizer
    scale_loss = optimizer.scale_loss

    def scaled(loss: Any) -> Any:
        return scale_loss(loss * tf.cast(share, loss.dtype))

    with shadowed(optimizer, scale_loss=scaled):
        yield


def _scaled(gradient: Any, share: Any) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = _scaled(gradient.values, share)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(share, gradient.dtype)


def _checked_logs(model: keras.Model, logs: Any) -> Logs:
    if logs is not None and not isinstance(logs, dict):
        raise TypeError(
            f"`{type(model).__name__}.train_step` must return a dict of logs, as `model.fit` "
            f"expects it. Received: {logs!r}"
        )
    return logs or {}


def _flat(logs: Logs, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the logs and where they are: the compiled metrics are one, whose result is a dict."""
    for name, value in logs.items():
        if isinstance(value, dict):
            yield from _flat(value, (*path, name))
        else:
            yield (*path, name), value


def _log_tensor(name: str, value: Any) -> Any:
    try:
        return tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            "What a `train_step` logs must be numbers or tensors of them with accum > 1. "
            f"Received: {name}={value!r}"
        ) from error


def _cast(value: Any, dtype: tf.DType) -> Any:
    return tf.cast(value if dtype.is_floating else tf.round(value), dtype)


def _refuse_hidden(recorded: Any) -> None:
    """Refuse what was recorded inside a function of its own, where it cannot be taken out of."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    for tensor in tf.nest.flatten(recorded, expand_composites=True):
        if tf.is_symbolic_tensor(tensor) and tensor.graph is not graph:
            raise NotImplementedError(
                "With accum > 1, a `tf.function` or control flow (`tf.cond`, `tf.while_loop`) of "
                "its own must not hold a call of an optimizer, an update of a "
                "`keras.metrics.Mean`, a BatchNormalization in training, or a masked or weighted "
                "loss: what they do once a batch cannot be taken out of it. "
                f"Call them outside, or use accum=1. Received: {tensor.name} in {tensor.graph}"
            )
