"""GitHub's workflows: they call the tools and have no commands of their own."""

import os
import re

import pytest
import yaml

from tests.support.checkout import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def steps_of(workflow):
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_the_tools_and_has_no_commands_of_its_own(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"} and workflow["name"]
    assert True in workflow, "`on`, which YAML reads as a bool"
    for step in steps_of(workflow):
        assert ("run" in step) != ("uses" in step), step
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"]), "a tag can be moved: name a commit"
            if step["uses"].startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False
        else:
            program = step["run"].split()[0]
            assert re.fullmatch(r"(tools|\.ci)/\w+", program) and "\n" not in step["run"]
            assert os.access(ROOT / program, os.X_OK), program
    assert all("timeout-minutes" in job for job in workflow["jobs"].values())
    needed = {name for job in workflow["jobs"].values() for name in job.get("needs", "").split()}
    assert needed <= set(workflow["jobs"])


def test_the_workflows_are_tests_docs_and_a_release_by_trusted_publishing():
    assert [path.stem for path in WORKFLOWS] == ["docs", "release", "tests"]
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    publish = release["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"} and publish["needs"] == "build"
    assert not any("password" in step.get("with", {}) for step in publish["steps"])


def test_the_suite_runs_on_each_supported_python():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    versions = re.findall(r"Python :: (3\.\d+)", (ROOT / "setup.cfg").read_text())
    assert workflow["jobs"]["suite"]["strategy"]["matrix"]["python"] == versions
