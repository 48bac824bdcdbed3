"""The command `blocksparse`: its help, its exit statuses, and what users see when something goes wrong."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from types import SimpleNamespace

import pytest

import blocksparse
from blocksparse.check.validators import UserError
from blocksparse.tools.cli import main as command
from blocksparse.tools.cli.main import main
from blocksparse.tools.cli.options import extra

COMMANDS = ["demo", "bench", "inspect", "build"]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"blocksparse {blocksparse.__version__}\n"


def test_version_tells_all_that_a_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["demo", "--nonsense"], ["demo", "--tokens", "many"]])
def test_arguments_that_are_not_understood_exit_with_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("usage: blocksparse")


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
