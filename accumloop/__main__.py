"""The demonstration: `python -m accumloop`.

Trains a small convolutional network on 8 x 8 handwritten digits twice, from the same weights and
on the same batches: with `model.fit`, and with `accumloop.train`, which cuts each batch into
micro-batches. Then prints how well both did, how far apart their weights are, and how much memory
each of them took.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from accumloop._demo import Outcome, relative_difference, run_apart

_FIT = "model.fit"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demonstration.

    Args:
        arguments: The arguments of the command; those of the process by default.

    Returns:
        The exit status: 0, or 1 where a package of the extra `demo` is missing.
    """
    options = _parse(arguments)
    try:
        _import_extra(plot=options.plot is not None)
    except ImportError as error:
        missing = (error.name or str(error)).partition(".")[0]
        print(
            f"python -m accumloop needs {missing}, which is not installed. "
            'Run: pip install "accumloop[demo]"',
            file=sys.stderr,
        )
        return 1

    # Read where TensorFlow is imported anew: in the processes of the two trainings.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with tempfile.TemporaryDirectory(prefix="accumloop-") as scratch:
        settings = {
            "batch_size": options.batch_size,
            "epochs": options.epochs,
            "data_dir": _prepare(scratch),
        }
        print(f"\n{_FIT}, batches of {options.batch_size}", flush=True)
        fit = run_apart(None, **settings)
        print(f"\n{_train(options.accum)}, batches of {options.batch_size}", flush=True)
        train = run_apart(options.accum, **settings)

    print(_table(fit, train, options.accum))
    if options.plot is not None:
        _plot(fit, train, options.accum, options.plot)
        print(f"\nBoth histories are drawn in {options.plot}")
    return 0


def _train(accum: int) -> str:
    """Return what the output calls the training with accumloop."""
    return f"accumloop.train, accum={accum}"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, or exit as argparse does."""
    parser = argparse.ArgumentParser(
        prog="python -m accumloop",
        description="Train a small network on handwritten digits with model.fit and with "
        "accumloop.train, and compare accuracy, weights and memory.",
    )
    parser.add_argument(
        "--accum",
        type=_positive,
        default=8,
        help="how many micro-batches a batch is cut into (default: %(default)s)",
    )
    parser.add_argument(
        "--batch-size", type=_positive, default=256, help="rows of a batch (default: %(default)s)"
    )
    parser.add_argument(
        "--epochs", type=_positive, default=3, help="passes over the data (default: %(default)s)"
    )
    parser.add_argument(
        "--plot", type=_png, metavar="FILE.png", help="draw both histories into this file"
    )
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    """Return the whole number of at least 1 that an argument stands for."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1. Received: {text}")
    return number


def _png(text: str) -> Path:
    """Return the path of a PNG file in a folder that exists, judged before the training starts."""
    path = Path(text)
    if path.suffix.lower() != ".png":
        raise argparse.ArgumentTypeError(f"must end in .png. Received: {text}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must lie in a folder that exists. Received: {text}")
    return path


def _import_extra(*, plot: bool) -> None:
    """Import what the extra `demo` installs, so that what is missing shows before the training."""
    import sklearn.datasets  # noqa: F401 - the digits are read from it

    import accumloop.digits  # noqa: F401 - needs tensorflow-datasets

    if plot:
        import matplotlib.figure  # noqa: F401 - draws the histories


def _prepare(scratch: str) -> str | None:
    """Prepare the digits in the folder of TFDS, or in another where that cannot be written.

    Args:
        scratch: The other folder.

    Returns:
        The folder to load the digits from; None for the folder of TFDS.
    """
    import tensorflow_datasets as tfds

    from accumloop.digits import Builder

    tfds.disable_progress_bar()
    try:
        Builder().download_and_prepare()
    except OSError:
        Builder(data_dir=scratch).download_and_prepare()
        return scratch
    return None


def _table(fit: Outcome, train: Outcome, accum: int) -> str:
    """Return what the demonstration found, as lines of text."""
    both = (fit, train)
    rows = [
        ("", _FIT, _train(accum)),
        ("validation accuracy", *(f"{run.history['val_accuracy'][-1]:.4f}" for run in both)),
        ("peak memory above rest", *(_mebibytes(run.peak) for run in both)),
    ]
    lines = [f"{name:<24}{left:>12}  {right:>28}".rstrip() for name, left, right in rows]
    difference = relative_difference(train.weights, fit.weights)
    return "\n".join(
        [
            "",
            *lines,
            "",
            f"largest relative difference of the weights: {difference:.1e}",
            f"(max|a - b| / max|b| of a variable; b is from {_FIT})",
        ]
    )


def _mebibytes(peak: int | None) -> str:
    """Return a number of bytes as the table shows it."""
    return "n/a" if peak is None else f"{peak / 2**20:.0f} MiB"


def _plot(fit: Outcome, train: Outcome, accum: int, path: Path) -> None:
    """Draw both histories over each other into a PNG file: the loss, and beside it the accuracy."""
    # The figure itself, not pyplot, which would choose a window system.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, metric in zip(figure.subplots(1, 2), ("loss", "accuracy"), strict=True):
        epochs = range(1, len(fit.history[metric]) + 1)
        for key, part, color in (
            (metric, "training", "tab:blue"),
            (f"val_{metric}", "validation", "tab:orange"),
        ):
            # Broad and pale below, thin and dashed above: where they agree, both are seen.
            below = {"color": color, "alpha": 0.35, "linewidth": 7, "marker": "o", "markersize": 13}
            above = {"color": color, "linestyle": "--", "marker": "o"}
            axes.plot(epochs, fit.history[key], label=f"{part}, {_FIT}", **below)
            axes.plot(epochs, train.history[key], label=f"{part}, {_train(accum)}", **above)
        axes.set(xlabel="epoch", ylabel=metric)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
