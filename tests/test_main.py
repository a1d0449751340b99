"""The demonstration, as a command and in its parts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import accumloop
from accumloop import __main__ as command
from accumloop import _demo

MEBIBYTE = 2**20
HAS_PROC = Path("/proc/self/clear_refs").exists()


def python(*arguments, **environment):
    """Run Python in a process of its own, where this accumloop is found."""
    root = str(Path(accumloop.__file__).parents[1])
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": root, **environment},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("demonstration")


@pytest.fixture(scope="module")
def finished(folder):
    """One run of the whole command, short, with a folder of its own for the data set."""
    return python(
        *("-m", "accumloop", "--epochs", "1", "--plot", str(folder / "both.png")),
        TFDS_DATA_DIR=str(folder / "data"),
    )


def numbers(output, row):
    """Return the numbers in a row of the command's table."""
    (line,) = re.findall(f"^{row}(.*)$", output, flags=re.MULTILINE)
    return [float(number) for number in re.findall(r"\d[\d.e+-]*", line)]


def test_command_succeeds(finished):
    assert finished.returncode == 0, finished.stderr
    assert "Traceback" not in finished.stderr


def test_command_shows_the_progress_of_both(finished):
    assert finished.stdout.count("val_accuracy: ") == 2
    assert "\nmodel.fit, batches of 256\n" in finished.stdout
    assert "\naccumloop.train, accum=8, batches of 256\n" in finished.stdout


def test_both_trainings_validate_alike(finished):
    fit, train = numbers(finished.stdout, "validation accuracy")
    assert fit == pytest.approx(train, abs=1 / 297)
    assert fit > 0.2  # twice what guessing reaches: there is something to agree about


def test_both_trainings_end_at_the_same_weights(finished):
    (difference,) = numbers(finished.stdout, "largest relative difference of the weights:")
    assert difference < 1e-4


@pytest.mark.skipif(not HAS_PROC, reason="the system does not tell the peak of a process")
def test_micro_batches_take_less_memory(finished):
    fit, train = numbers(finished.stdout, "peak memory above rest")
    assert 0 < train < fit / 2


def test_plot_is_a_png(finished, folder):
    assert (folder / "both.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert f"Both histories are drawn in {folder / 'both.png'}" in finished.stdout


def test_data_set_stays_prepared(finished, folder):
    assert (folder / "data" / "digits" / "1.0.0" / "dataset_info.json").is_file()


def test_data_set_falls_back_to_another_folder(tmp_path):
    """A folder below a file can be made by nobody, not even by root."""
    file = tmp_path / "file"
    file.touch()
    code = "import sys; from accumloop.__main__ import _prepare; print(_prepare(sys.argv[1]))"
    scratch = tmp_path / "scratch"
    run = python("-c", code, str(scratch), TFDS_DATA_DIR=str(file / "data"))
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == str(scratch)
    assert (scratch / "digits" / "1.0.0" / "dataset_info.json").is_file()


def test_help(capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        command.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("usage: python -m accumloop ")
    for option in (
        "--accum ACCUM how many micro-batches a batch is cut into (default: 8)",
        "--batch-size BATCH_SIZE rows of a batch (default: 256)",
        "--epochs EPOCHS passes over the data (default: 3)",
        "--plot FILE.png draw both histories into this file",
    ):
        assert option in text


@pytest.mark.parametrize("option", ["--accum", "--batch-size", "--epochs"])
@pytest.mark.parametrize("value", ["0", "-1", "1.5", "many", ""])
def test_numbers_must_be_whole_and_positive(option, value, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        command.main([f"{option}={value}"])
    assert (
        f"argument {option}: must be a whole number of at least 1. Received: {value}"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        ("both.pdf", "must end in .png"),
        ("both", "must end in .png"),
        ("no such folder/both.png", "must lie in a folder that exists"),
    ],
    ids=["other_suffix", "no_suffix", "no_folder"],
)
def test_plot_must_be_a_png_in_a_folder(value, rule, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        command.main(["--plot", value])
    assert f"argument --plot: {rule}. Received: {value}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("package", "arguments"),
    [
        ("tensorflow_datasets", []),
        ("sklearn", []),
        ("matplotlib", ["--plot", "both.png"]),
    ],
    ids=["tensorflow-datasets", "scikit-learn", "matplotlib"],
)
def test_missing_package_is_named(package, arguments):
    code = (
        f"import runpy, sys; sys.modules[{package!r}] = None; "
        f"sys.argv[1:] = {arguments!r}; runpy.run_module('accumloop', run_name='__main__')"
    )
    run = python("-c", code)
    assert run.returncode == 1
    assert run.stdout == ""
    assert "Traceback" not in run.stderr
    assert run.stderr.splitlines()[-1] == (
        f"python -m accumloop needs {package}, which is not installed. "
        'Run: pip install "accumloop[demo]"'
    )


def outcome(accuracy, weight, peak):
    return _demo.Outcome({"val_accuracy": [0.0, accuracy]}, [np.array([1.0, weight])], peak)


def test_table():
    fit, train = outcome(0.5, 2.0, 300 * MEBIBYTE), outcome(0.625, 2.5, 40 * MEBIBYTE)
    assert command._table(fit, train, 8).splitlines() == [
        "",
        "                           model.fit      accumloop.train, accum=8",
        "validation accuracy           0.5000                        0.6250",
        "peak memory above rest       300 MiB                        40 MiB",
        "",
        "largest relative difference of the weights: 2.5e-01",
        "(max|a - b| / max|b| of a variable; b is from model.fit)",
    ]


def test_table_without_memory():
    unknown = outcome(0.5, 2.0, None)
    (line,) = re.findall("^peak.*$", command._table(unknown, unknown, 8), flags=re.MULTILINE)
    assert line.split()[-2:] == ["n/a", "n/a"]


def test_relative_difference_is_that_of_the_worst_variable():
    reference = [np.array([1.0, -4.0]), np.array([[0.5]])]
    weights = [np.array([1.5, -4.0]), np.array([[0.75]])]
    assert _demo.relative_difference(reference, reference) == 0
    assert _demo.relative_difference(weights, reference) == 0.5


def test_relative_difference_needs_the_same_variables():
    with pytest.raises(ValueError, match="shorter than argument 1"):
        _demo.relative_difference([np.ones(2), np.ones(3)], [np.ones(2)])


@pytest.mark.skipif(not HAS_PROC, reason="the system does not tell the peak of a process")
def test_peak_counts_what_was_freed_again():
    size, peak = _demo.measure_peak(lambda: len(np.ones(200 * MEBIBYTE, "uint8")))
    assert size == 200 * MEBIBYTE
    assert 190 * MEBIBYTE < peak < 260 * MEBIBYTE


@pytest.mark.skipif(not HAS_PROC, reason="the system does not tell the peak of a process")
def test_peak_does_not_count_what_came_before():
    np.ones(200 * MEBIBYTE, "uint8")
    _, peak = _demo.measure_peak(lambda: None)
    assert peak < 50 * MEBIBYTE


def test_peak_is_unknown_without_proc(monkeypatch):
    def refuse(*_):
        raise FileNotFoundError("no /proc here")

    monkeypatch.setattr(Path, "write_text", refuse)
    assert _demo.measure_peak(lambda: "result") == ("result", None)
