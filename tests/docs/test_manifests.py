"""The manifests of examples/kubernetes: their commands exist, the rights suffice and are used, the times fit."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
import pytest

import tenure
from tenure._cli.group import SOCKET_VARIABLE, group
from tests import warm
from tests.durations import PATIENCE, wait_until
from tests.servers import KubeApiserver, Kubernetes, private
from tests.servers.kubernetes import apis

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


# --- on an API server, or a double of it -----------------------------------------------------------------------------

API_PATHS = {
    "ServiceAccount": "/api/v1/namespaces/default/serviceaccounts",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/default/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/default/rolebindings",
    "Deployment": "/apis/apps/v1/namespaces/default/deployments",
}


class Pod:
    """One instance: the commands of the container, run here."""

    def __init__(self, name: str, environment: dict[str, str], sockets: Path) -> None:
        sockets.mkdir()
        self._environment = {**os.environ, **environment, SOCKET_VARIABLE: str(sockets)}
        options = [word.replace("$(POD_NAME)", name) for word in CONTAINER["command"]]
        command = ["sh", "-c", "echo $TENURE_TOKEN; exec sleep 3600"]
        self.process = self._start(*options[: options.index("--") + 1], *command)

    def _start(self, program: str, *arguments: str) -> warm.Process:
        assert program == "tenure"
        return warm.start(arguments, env=self._environment)

    def passes(self, probe: dict[str, Any]) -> bool:
        """Run a probe of the container."""
        process = self._start(*probe["exec"]["command"])
        process.communicate(timeout=PATIENCE)
        return process.returncode == 0

    def token(self) -> int:
        """Wait for the term, and return its token."""
        assert self.process.stdout is not None
        return int(self.process.stdout.readline() or self.errors())

    def errors(self) -> str:
        """End it, and return its messages, for a test that fails."""
        self.process.kill()
        return self.process.communicate()[1]


@contextmanager
def pods(environment: dict[str, str], count: int) -> Iterator[list[Pod]]:
    with ExitStack() as stack:
        place = Path(tempfile.mkdtemp(dir="/tmp", prefix="pods"))  # the path of a socket must be short
        stack.callback(shutil.rmtree, place)
        started = []
        for number in range(count):
            pod = Pod(f"pod-{number}", environment, place / f"{number}")
            stack.callback(pod.errors)
            wait_until(lambda pod=pod: pod.passes(READINESS), pod.errors)  # type: ignore[misc]
            started.append(pod)
        yield started


def grant_rights(server: Kubernetes | KubeApiserver) -> str:
    """Give the rights of the manifests to one user, and no others; return its token."""
    if isinstance(server, Kubernetes):
        roles = [{"verbs": rule["verbs"], "names": rule.get("resourceNames", [])} for rule in RULES]
        server.set(tokens={"token-of-the-pod": "pod"}, roles=roles)
        return "token-of-the-pod"
    for kind, manifest in MANIFESTS.items():
        status, applied = server.ask("POST", API_PATHS[kind], manifest)
        assert (status, list(dropped(manifest, applied))) == (201, [])
    user = {"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": "nobody"}
    binding = {**MANIFESTS["RoleBinding"], "metadata": {"name": "for-nobody"}, "subjects": [user]}
    assert server.ask("POST", API_PATHS["RoleBinding"], binding)[0] == 201
    return "token-of-nobody"


def dropped(sent: Any, applied: Any, path: str = "") -> Iterator[str]:
    """Yield the fields of a manifest that the API server doesn't know, or has changed."""
    if isinstance(sent, dict) and isinstance(applied, dict):
        for name, value in sent.items():
            yield from dropped(value, applied.get(name), f"{path}.{name}")
    elif isinstance(sent, list) and isinstance(applied, list) and len(sent) == len(applied):
        for number, value in enumerate(sent):
            yield from dropped(value, applied[number], f"{path}[{number}]")
    elif sent != applied:
        yield path


@pytest.mark.process
@pytest.mark.parametrize("kind", apis())
def test_instances_with_these_rights_lead_in_turn(kind: type[Kubernetes] | type[KubeApiserver]) -> None:
    with private(kind) as server:
        token = grant_rights(server)
        url = f"kubernetes://default?server={server.server}&token_env=POD_TOKEN"
        if server.authority is not None:
            url += f"&ca={server.authority.certificate}"
        with pods({"TENURE_URL": url, "POD_TOKEN": token}, 2) as (first, second):
            led = first.token()
            assert first.passes(LIVENESS)
            assert second.passes(LIVENESS)
            first.process.send_signal(signal.SIGTERM)
            assert first.process.wait(PATIENCE) == 128 + signal.SIGTERM
            assert second.token() > led
            wait_until(lambda: second.passes(READINESS), second.errors)
            if isinstance(server, Kubernetes):
                rights = {verb for rule in RULES for verb in rule["verbs"]}
                wait_until(
                    lambda: verbs(server) == rights, lambda: f"the rights are {rights}, used were {verbs(server)}"
                )
            second.process.send_signal(signal.SIGTERM)
            assert second.process.wait(PATIENCE) == 128 + signal.SIGTERM


def verbs(server: Kubernetes) -> set[str]:
    """Return the verbs of the instances' requests so far; all of them were allowed."""
    requests = [one for one in server.requests() if one["user"] == "pod"]
    assert [one for one in requests if one["status"] in (401, 403)] == []
    return {one["verb"] for one in requests}
