"""The workflows on GitHub parse, and run what the Makefile and the matrix of versions have."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)


def jobs(path: Path) -> dict[str, Any]:
    jobs: dict[str, Any] = yaml.safe_load(path.read_text())["jobs"]
    return jobs


def made(job: dict[str, Any]) -> list[list[str]]:
    """What `make` is called with in a job: targets and settings."""
    lines = [line for step in job["steps"] for line in step.get("run", "").splitlines()]
    return [re.sub(r"\$\{\{.*?\}\}", "...", line).split()[1:] for line in lines if line.startswith("make ")]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_name_targets_and_settings_that_exist(path: Path) -> None:
    of_make = (ROOT / "Makefile").read_text()
    for name, job in jobs(path).items():
        runs = made(job)
        assert runs or "environment" in job, name  # publishing runs nothing of ours
        for target, *settings in runs:
            assert target in TARGETS
            for setting in settings:
                assert re.search(rf"^{setting.partition('=')[0]} \?=", of_make, re.MULTILINE), setting


def test_every_version_that_the_package_allows_is_in_a_matrix() -> None:
    matrix = {name: job["strategy"]["matrix"] for name, job in jobs(WORKFLOWS[-1]).items() if "strategy" in job}
    project, of_make = ((ROOT / name).read_text() for name in ("pyproject.toml", "Makefile"))
    for package, versions in (("torch", matrix["torch"]["torch"]), ("triton", matrix["compile-ahead"]["triton"])):
        oldest, newest = versions[0], versions[-1]
        assert f'"{package}>={oldest.removesuffix(".0")}' in project
        assert re.search(rf"^{package.upper()} \?= {re.escape(newest)}$", of_make, re.MULTILINE)
    assert matrix["wheel"]["torch"] == matrix["torch"]["torch"]
    assert f'requires-python = ">={matrix["torch"]["python"][0]}"' in project


def test_only_publishing_may_ask_for_an_identity() -> None:
    for path in WORKFLOWS:
        text = yaml.safe_load(path.read_text())
        assert text["permissions"] == {"contents": "read"}
        asks = [name for name, job in text["jobs"].items() if "id-token" in job.get("permissions", {})]
        assert asks == (["publish"] if path.stem == "release" else [])


@pytest.mark.slow
def test_what_is_published_is_what_was_tested() -> None:
    """One job builds the packages; the others take those, and run no target that builds them anew."""
    release = jobs(WORKFLOWS[0])
    (upload,) = (step for step in release["build"]["steps"] if "upload-artifact" in step.get("uses", ""))
    for name in ("test", "publish"):
        (download,) = (step for step in release[name]["steps"] if "download-artifact" in step.get("uses", ""))
        assert all(download["with"][key] == upload["with"][key] for key in ("name", "path"))
        for target, *settings in made(release[name]):
            dry = subprocess.run(
                ["make", "-n", target, *settings], cwd=ROOT, capture_output=True, text=True, check=True
            )
            assert "-m build" not in dry.stdout
            assert "dist/*.whl" in dry.stdout
    assert set(release["publish"]["needs"]) == {"build", "test"}
