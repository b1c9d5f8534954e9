"""The manifests of examples/kubernetes: their commands exist, the rights suffice and are used, the times fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

import tenure
from tenure._cli.group import SOCKET_VARIABLE, group

yaml = pytest.importorskip("yaml")

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "kubernetes"

LEAD_OPTIONS = ("ttl", "renew_every", "retry_every", "grace")


def manifests() -> dict[str, Any]:
    """Return the manifests by their kind."""
    found = [one for file in sorted(FOLDER.glob("*.yaml")) for one in yaml.safe_load_all(file.read_text())]
    assert len({one["kind"] for one in found}) == len(found)
    return {one["kind"]: one for one in found}


MANIFESTS = manifests()
POD = MANIFESTS["Deployment"]["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
VARIABLES = {one["name"]: one.get("value", "from a field") for one in CONTAINER["env"]}
LIVENESS, READINESS = CONTAINER["livenessProbe"], CONTAINER["readinessProbe"]
RULES = MANIFESTS["Role"]["rules"]


def parsed(words: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[str, dict[str, Any]]:
    """Return the command that a line calls, and its parameters, as the command line reads them in the container."""
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    program, *arguments = words
    assert program == "tenure"
    context = group.make_context("tenure", arguments)
    name, command, rest = group.resolve_command(context, [*context._protected_args, *context.args])
    assert isinstance(command, click.Command)
    assert name is not None
    return name, command.make_context(name, rest, parent=context).params


def test_the_command_line_of_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    name, options = parsed(CONTAINER["command"], monkeypatch)
    assert (name, options["url"], options["argv"]) == (
        "lead",
        VARIABLES["TENURE_URL"],
        ("python", "-m", "nightly_report"),
    )
    assert options["label"] == "$(POD_NAME)"  # put in by Kubernetes
    (pod_name,) = (one for one in CONTAINER["env"] if one["name"] == "POD_NAME")
    assert pod_name["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"


@pytest.mark.parametrize(("probe", "ready"), [(LIVENESS, False), (READINESS, True)])
def test_the_command_lines_of_the_probes(probe: dict[str, Any], ready: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    led, leading = parsed(CONTAINER["command"], monkeypatch)
    name, options = parsed(probe["exec"]["command"], monkeypatch)
    assert (led, name, options["name"]) == ("lead", "status", leading["name"])
    assert (options["me"], options["ready"]) == (True, ready)
    assert options["socket_dir"] == leading["socket_dir"] == VARIABLES[SOCKET_VARIABLE]
    assert options["wait"] + 1.0 < probe["timeoutSeconds"] <= probe["periodSeconds"]


def test_the_place_of_the_sockets_can_be_written() -> None:
    assert CONTAINER["securityContext"]["readOnlyRootFilesystem"]
    volumes = {one["name"]: one for one in POD["volumes"]}
    mounted = {one["mountPath"]: volumes[one["name"]] for one in CONTAINER["volumeMounts"]}
    assert "emptyDir" in mounted[VARIABLES[SOCKET_VARIABLE]]


def test_the_kubelet_waits_until_the_lease_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    _, options = parsed(CONTAINER["command"], monkeypatch)
    timing = tenure.Timing(**{key: options[key] for key in LEAD_OPTIONS if options[key] is not None})
    needed = options["stop_timeout"] + timing.grace + timing.ttl + timing.retry_every
    assert needed <= POD["terminationGracePeriodSeconds"] <= needed + 5


def test_the_rights_are_those_of_the_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    account = MANIFESTS["ServiceAccount"]["metadata"]["name"]
    assert POD["serviceAccountName"] == account
    binding = MANIFESTS["RoleBinding"]
    assert binding["roleRef"]["name"] == MANIFESTS["Role"]["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account}]
    labels = MANIFESTS["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert MANIFESTS["Deployment"]["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_the_rights_are_about_the_lease_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    _, options = parsed(CONTAINER["command"], monkeypatch)
    for rule in RULES:
        assert (rule["apiGroups"], rule["resources"]) == (["coordination.k8s.io"], ["leases"])
        if rule["verbs"] != ["create"]:  # that can't be limited to a name
            assert rule["resourceNames"] == [options["name"]]
