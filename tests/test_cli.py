"""The command `blocksparse`, its exit statuses and errors, and `blocksparse bench`."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import blocksparse
from blocksparse import TritonExecutor, pbs_attn
from blocksparse.check.validators import UserError
from blocksparse.tools.bench import Crossover, Row, Shape, crossovers, run, table
from blocksparse.tools.cli import main as command
from blocksparse.tools.cli.main import main
from blocksparse.tools.cli.options import extra
from tests.specs import not_none

COMMANDS = ["demo", "bench", "inspect", "build"]


def test_version_tells_all_that_a_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"blocksparse {blocksparse.__version__}\n"
    assert main(["--version", "--verbose"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"blocksparse {blocksparse.__version__}\nPython {platform.python_version()} on ")
    assert f"\ntorch {importlib.metadata.version('torch')}\n" in printed
    assert re.search(r"^CPU: .*\d threads\n  auto\(\), 1024 tokens, \S+: \w+Executor runs", printed, re.M)
    assert re.search(r"^GPU", printed, re.M)
    assert "Error" not in printed


def test_help_lists_the_commands_and_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = capsys.readouterr().out
    assert all(f"\n    {name}" in printed for name in COMMANDS)
    assert "exit status: 0" in printed


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_teaches_by_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each example is one that the command's own parser takes."""
    with pytest.raises(SystemExit) as left:
        main([name, "--help"])
    assert left.value.code == 0
    printed = capsys.readouterr().out
    assert "--json" in printed or name == "build"  # which has no results
    assert "None" not in printed
    _, examples = printed.split("examples:\n")
    lines = [line.strip() for line in examples.strip().splitlines()]
    assert lines
    assert all(line.startswith(f"blocksparse {name}") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "name a command, one of demo, "),
        ("nonsense", "'nonsense'"),
        ("demo --nonsense", "unrecognized arguments: --nonsense"),
        ("demo --tokens many", "argument --tokens: invalid int value: 'many'"),
        ("tune model --strategy best", "argument --strategy: invalid choice: 'best'"),
        ("bench --lengths 1024,,2", "argument --lengths: it must be a whole number, at least 1: "),
        ("bench --heads 0", "argument --heads: it must be a whole number, at least 1: 0"),
        ("bench --seconds nan", "argument --seconds: it must be a number of seconds, at least 0: nan"),
        (f"bench --seed {2**63}", f"argument --seed: it must be a whole number from 0 to 2**63 - 1: {2**63}"),
    ],
)
def test_arguments_that_are_not_understood_exit_with_2(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments.split())
    assert left.value.code == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("usage: blocksparse")
    assert said in err


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        (UserError("this cannot be, do that"), 1, "blocksparse some: this cannot be, do that\n"),
        (KeyboardInterrupt(), 130, "blocksparse some: interrupted\n"),
        (OSError(28, "No space left", "x"), 1, "blocksparse some: [Errno 28] No space left: 'x'\n"),
    ],
)
def test_what_users_cause_has_a_status_and_no_traceback(
    raised: BaseException,
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(_: object) -> int:
        raise raised

    parsed = SimpleNamespace(run=fail, command="some", version=False, verbose=False)
    monkeypatch.setattr(command, "_parser", lambda: SimpleNamespace(parse_args=lambda _: parsed))
    assert main([]) == status
    assert capsys.readouterr() == ("", said)


def test_a_package_that_is_missing_is_named_with_its_extra() -> None:
    with (
        pytest.raises(UserError, match=r"^nowhere is not installed: pip install -e '\.\[demo\]' in a checkout$"),
        extra("demo"),
    ):
        import nowhere  # type: ignore[import-not-found]  # noqa: F401


SMALL = ["--heads", "2", "--kv-heads", "1", "--head-dim", "16", "--device", "cpu", "--seconds", "0"]


def rows(*speed_ups: float | None, first: int = 1024) -> list[Row]:
    """Of a method `p` at lengths that double from `first` on; None is a length at which it cannot run."""
    found = []
    for i, faster in enumerate(speed_ups):
        found.append(Row(first << i, "dense", ms=10.0, spread=0.0, speed_up=1.0, density=1.0))
        ms = None if faster is None else 10.0 / faster
        found.append(
            Row(first << i, "p", ms=ms, speed_up=faster, density=0.5, why=None if ms else "out of memory")
        )
    return found


@pytest.mark.parametrize(
    ("speed_ups", "tokens", "at_most"),
    [
        ((0.5, 2.0), 1024 * math.sqrt(2), False),  # as far below as above: half-way between the logarithms
        ((0.5, 0.5, 1.0, 4.0), 4096.0, False),
        ((0.5, 4.0), 1024 * 2 ** (1 / 3), False),
        ((2.0, 0.5, 2.0), 2048 * math.sqrt(2), False),  # only where it stays faster
        ((2.0, 3.0), 1024.0, True),
        ((0.1, 0.9), None, False),
        ((2.0, 0.9), None, False),
        ((None, 0.5, 2.0, None), 2048 * math.sqrt(2), False),  # where it ran
        ((None, None), None, False),
    ],
)
def test_crossover_is_where_the_preset_becomes_faster_for_good(
    speed_ups: tuple[float | None, ...], tokens: float | None, at_most: bool
) -> None:
    found = Crossover.of(rows(*speed_ups), "p")
    assert found.at_most is at_most
    assert found.tokens == (None if tokens is None else pytest.approx(tokens))


@pytest.mark.parametrize(
    ("speed_ups", "sentence"),
    [
        ((0.5, 2.0), "p is faster than dense attention from about 1,500 tokens on"),
        ((0.98, 2.0), "p is faster than dense attention from about 1,100 tokens on"),  # 1,045: at 1,000 it is not
        ((2.0, 2.0), "p is faster than dense attention at every length measured, from 1,024 tokens on"),
        ((0.5, 0.5), "p is not faster than dense attention at 2,048 tokens, the longest length measured"),
        ((0.5, None), "p is not faster than dense attention at 1,024 tokens, the longest length at which it ran"),
        ((None, None), "p ran at no length"),
    ],
)
def test_crossover_is_stated_in_a_sentence(speed_ups: tuple[float | None, ...], sentence: str) -> None:
    assert crossovers(rows(*speed_ups)) == sentence


def test_table_has_a_line_per_length_and_method() -> None:
    lines = [" ".join(line.split()) for line in table(rows(0.5, None)).splitlines()]
    assert lines == [
        "tokens method time speed-up density",
        "1,024 dense 10.0 ms 1.00x 100.0%",
        "p 20.0 ms 0.50x 50.0%",
        "2,048 dense 10.0 ms 1.00x 100.0%",
        "p - - 50.0% out of memory",
    ]


def test_who_cannot_run_has_a_row_that_says_why() -> None:
    shape = Shape(2, 1, 16, torch.float64, torch.device("cpu"))
    dense, bad, good = run(
        shape, [100], {"bad": pbs_attn(executor=TritonExecutor()), "good": pbs_attn()}, seconds=0, seed=0
    )
    assert bad.ms is None
    assert "float64" in str(bad.why)
    assert dense.speed_up == 1.0
    assert good.speed_up == pytest.approx(not_none(dense.ms) / not_none(good.ms))
    assert "CpuExecutor" in str(good.executor)


def test_random_numbers_of_the_caller_are_left_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    run(Shape(1, 1, 16, torch.float32, torch.device("cpu")), [40], {}, seconds=0, seed=0)
    assert torch.equal(torch.rand(3), expected)


def test_json_has_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--lengths", "300,200", "--preset", "mean_pooling", "--preset", "pbs_attn(0.5)", "--json"]
    assert main(["bench", *SMALL, *options]) == 0
    printed, progress = capsys.readouterr()
    found = json.loads(printed)
    assert [(row["tokens"], row["method"]) for row in found["rows"]] == [
        (tokens, method) for tokens in (200, 300) for method in ("dense", "mean_pooling", "pbs_attn(0.5)")
    ]
    assert all(row["ms"] > 0 for row in found["rows"])
    assert set(found["crossover"]) == {"mean_pooling", "pbs_attn(0.5)"}
    assert found["dtype"] == "float32"
    assert progress.splitlines() == [f"timing {n} tokens: dense, mean_pooling, pbs_attn(0.5)" for n in (200, 300)]


def test_table_goes_to_stdout_and_progress_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *SMALL, "--lengths", "200", "--preset", "mean_pooling"]) == 0
    printed, progress = capsys.readouterr()
    assert printed.startswith("2 heads, 1 KV heads, head dim 16, float32, on CPU, ")
    assert "\nmean_pooling is " in printed
    assert progress == "timing 200 tokens: dense, mean_pooling\n"
    assert "\x1b" not in printed + progress


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("bench --kv-heads 3", "'--heads' must be a multiple of '--kv-heads' (3): 32"),
        ("bench --head-dim 257", "'--head-dim' must be at most 256: 257"),
        ("bench --preset nonsense", "'--preset' must be one of auto, pbs_attn"),
        ("build --for-wheel /nowhere", "'--for-wheel' must be the folder of the package's source: /nowhere"),
        *([] if torch.cuda.is_available() else [("bench --device cuda", "'--device cuda' needs a GPU")]),
    ],
)
def test_refusals_are_one_sentence(arguments: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 1
    printed, error = capsys.readouterr()
    assert not printed
    assert error.startswith(f"blocksparse {arguments.split()[0]}: {sentence}")
    assert error.count("\n") == 1


def process(*options: str, **streams: Any) -> subprocess.Popen[str]:
    root = str(Path(__file__).parents[1] / "src")
    return subprocess.Popen(
        [sys.executable, "-m", "blocksparse.tools.cli.main", "bench", *SMALL, *options],
        env={**os.environ, "PYTHONPATH": root},
        stderr=subprocess.PIPE,
        text=True,
        # A test run in the background of a shell ignores Ctrl-C, and hands that on to its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **streams,
    )


@pytest.mark.slow
def test_ctrl_c_ends_it_without_a_traceback() -> None:
    with process("--lengths", "256,16384", "--preset", "pbs_attn", stdout=subprocess.DEVNULL) as running:
        assert running.stderr is not None
        assert running.stderr.readline().startswith("timing 256 tokens")
        running.send_signal(signal.SIGINT)
        rest = running.stderr.read()
    assert running.returncode == 130
    assert rest.endswith("blocksparse bench: interrupted\n")
    assert "Traceback" not in rest


@pytest.mark.slow
def test_a_reader_that_leaves_early_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        with process("--lengths", "64", "--preset", "mean_pooling", stdout=write) as running:
            said = not_none(running.stderr).read()
    finally:
        os.close(write)
    assert said == "timing 64 tokens: dense, mean_pooling\n"
    assert running.returncode == 0
