"""The manifests and the unit of a service: command lines, paths, ports and times fit the program and each other."""

from __future__ import annotations

import asyncio
import configparser
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from tenure import Stats
from tenure._cli.group import group
from tenure._cli.http_server import address
from tenure._cli.run import HOPELESS

yaml = pytest.importorskip("yaml")
httpx = pytest.importorskip("httpx")
pytest.importorskip("starlette")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
UNIT = EXAMPLES / "systemd" / "shop-worker.service"
KILL_AFTER = 5.0  # seconds from the end of --grace to KILL


def manifests() -> dict[str, Any]:
    """Return the manifests by their kind."""
    files = sorted((EXAMPLES / "kubernetes_service").glob("*.yaml"))
    found = [one for file in files for one in yaml.safe_load_all(file.read_text())]
    assert len({one["kind"] for one in found}) == len(found)
    return {one["kind"]: one for one in found}


MANIFESTS = manifests()
POD = MANIFESTS["Deployment"]["spec"]["template"]
(CONTAINER,) = POD["spec"]["containers"]
(PORT,) = CONTAINER["ports"]
(TRIGGER,) = MANIFESTS["ScaledObject"]["spec"]["triggers"]


def parameters(words: list[str]) -> dict[str, Any]:
    """Return the parameters of a line of ``tenure run``, as the command line reads them."""
    program, *arguments = words
    assert Path(program).name == "tenure"
    context = group.make_context("tenure", arguments)
    name, command, rest = group.resolve_command(context, [*context._protected_args, *context.args])
    assert name == "run"
    assert isinstance(command, click.Command)
    return command.make_context(name, rest, parent=context).params


def answered(path: str) -> int:
    """Return the code with which the endpoints answer to *path*, where all is well."""
    from tenure._http.app import make_app
    from tenure._http.source import Health, Source
    from tenure._telemetry.families import Snapshot

    class Well(Source):
        async def live(self) -> Health:
            return Health(True, "live")

        async def ready(self) -> Health:
            return Health(True, "ready")

        async def metrics(self) -> Snapshot:
            return {}

        async def stats(self) -> dict[str, Stats]:
            return {"orders": Stats(1, 2)}

    async def ask() -> int:
        transport = httpx.ASGITransport(app=make_app(Well(), None))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answer = await client.get(path)
        return int(answer.status_code)

    return asyncio.run(ask())


def test_the_command_line_of_the_container() -> None:
    found = parameters(CONTAINER["command"])
    host, port = found["http"]
    assert (host, port) == ("0.0.0.0", PORT["containerPort"])  # the kubelet comes from elsewhere
    assert POD["spec"]["terminationGracePeriodSeconds"] >= found["grace"] + KILL_AFTER
    assert found["number"] == (1, 1)
    assert not found["until_empty"]


@pytest.mark.parametrize("probe", ["startupProbe", "livenessProbe", "readinessProbe"])
def test_the_probes_ask_paths_that_exist(probe: str) -> None:
    asked = CONTAINER[probe]["httpGet"]
    assert asked["port"] == PORT["name"]
    assert answered(asked["path"]) == 200
    assert CONTAINER[probe]["timeoutSeconds"] > 2  # an answer may take as long as that


def test_only_liveness_restarts_a_pod_that_has_begun_and_does_not_ask_the_store() -> None:
    assert CONTAINER["livenessProbe"]["httpGet"]["path"] == "/live"
    assert CONTAINER["readinessProbe"]["httpGet"]["path"] == "/ready"


def test_prometheus_finds_the_metrics() -> None:
    annotations = POD["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(PORT["containerPort"])
    assert answered(annotations["prometheus.io/path"]) == 200


def test_all_parts_select_the_pods() -> None:
    labels = POD["metadata"]["labels"]
    assert MANIFESTS["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert MANIFESTS["Service"]["spec"]["selector"] == labels
    assert MANIFESTS["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert MANIFESTS["ScaledObject"]["spec"]["scaleTargetRef"]["name"] == MANIFESTS["Deployment"]["metadata"]["name"]


def test_keda_asks_for_a_number_that_the_endpoint_has() -> None:
    from tenure._http.app import backlog_of

    metadata = TRIGGER["metadata"]
    found = re.fullmatch(r"http://([\w-]+)\.default\.svc:(\d+)(/keda/v1/queues/orders)", metadata["url"])
    assert found is not None
    (port,) = MANIFESTS["Service"]["spec"]["ports"]
    assert (found[1], int(found[2])) == (MANIFESTS["Service"]["metadata"]["name"], port["port"])
    assert answered(found[3]) == 200
    assert (TRIGGER["type"], metadata["format"]) == ("metrics-api", "json")
    numbers = backlog_of("orders", Stats(30, 12, 5, 0, 1, 3.2))
    assert numbers[metadata["valueLocation"]] == 42
    assert float(metadata["targetValue"]) > 0
    assert all(isinstance(value, str) for value in metadata.values())  # KEDA reads texts only


def test_keda_has_the_token_of_the_container() -> None:
    (parameter,) = MANIFESTS["TriggerAuthentication"]["spec"]["secretTargetRef"]
    (token,) = (one for one in CONTAINER["env"] if one["name"] == "TENURE_HTTP_TOKEN")
    secret = token["valueFrom"]["secretKeyRef"]
    assert (TRIGGER["metadata"]["authMode"], parameter["parameter"]) == ("bearer", "token")
    assert (parameter["name"], parameter["key"]) == (secret["name"], secret["key"])
    assert TRIGGER["authenticationRef"]["name"] == MANIFESTS["TriggerAuthentication"]["metadata"]["name"]


def test_keda_never_ends_the_last_pod_and_keeps_all_while_the_store_is_away() -> None:
    spec = MANIFESTS["ScaledObject"]["spec"]
    assert 1 <= spec["minReplicaCount"] < spec["maxReplicaCount"]
    assert spec["fallback"]["behavior"] == "currentReplicas"


# --- systemd ---


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[method-assign,assignment]  # its names have capital letters
    parser.read(UNIT)
    return parser


def test_the_command_line_of_the_unit() -> None:
    service = unit()["Service"]
    found = parameters(shlex.split(service["ExecStart"]))
    assert found["number"] == (2, 6)
    assert found["http"] == address("127.0.0.1:9160")
    assert float(service["TimeoutStopSec"]) >= found["grace"] + KILL_AFTER
    assert {int(code) for code in service["RestartPreventExitStatus"].split()} == set(map(int, HOPELESS))


def test_systemd_can_read_the_unit(tmp_path: Path) -> None:
    if (systemd := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is not installed; it is in the package systemd")
    text = UNIT.read_text().replace("/srv/shop/.venv/bin/tenure", sys.executable)  # which exists here
    (tmp_path / UNIT.name).write_text(text)
    done = subprocess.run(
        [systemd, "verify", str(tmp_path / UNIT.name)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
