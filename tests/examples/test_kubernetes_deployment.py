"""The project kubernetes_deployment: its files fit each other, and its pods, as processes here, lead in turn."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import tenure
import tenure.sync
from tests.durations import PATIENCE, wait_until
from tests.examples.project_pages import PROJECTS, blocks, commands, files_listed, files_of
from tests.ports import ports_held
from tests.servers import Kubernetes, Redis, private

yaml = pytest.importorskip("yaml")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

PROJECT = PROJECTS / "kubernetes_deployment"
PAGE = PROJECT / "README.md"
WORKER = PROJECT / "worker.py"
TIMING = tenure.Timing(ttl=15.0)
A_MOMENT = 5.0
"""Seconds on a busy machine for the requests of an election and the first order of the leader."""
UVICORN_REQUESTS = "--timeout-graceful-shutdown"

pytestmark = pytest.mark.timeout(240)


# --- the files -------------------------------------------------------------------------------------------------------


def manifests() -> dict[str, Any]:
    """Return the manifests by their kind."""
    found = [one for file in sorted(PROJECT.glob("*.yaml")) for one in yaml.safe_load_all(file.read_text())]
    assert len({one["kind"] for one in found}) == len(found)
    return {one["kind"]: one for one in found}


MANIFESTS = manifests()
POD = MANIFESTS["Deployment"]["spec"]["template"]
(CONTAINER,) = POD["spec"]["containers"]
(PORT,) = CONTAINER["ports"]
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
RULES = MANIFESTS["Role"]["rules"]
VERBS = {verb for rule in RULES for verb in rule["verbs"]}


def instructions(name: str) -> list[str]:
    """Return what the instructions of one kind in the Dockerfile say, in their order."""
    return re.findall(rf"(?m)^{name} (.*)$", (PROJECT / "Dockerfile").read_text())


def command() -> list[str]:
    """Return the command of the image, which is in exec form: without a shell, it gets the signals itself."""
    (found,) = instructions("CMD")
    words = json.loads(found)
    assert all(isinstance(word, str) for word in words)
    return [str(word) for word in words]


def options() -> dict[str, str]:
    return dict(word.split("=", 1) for word in command() if "=" in word)


@pytest.mark.parametrize("kind", sorted(MANIFESTS))
def test_the_manifests_have_no_field_that_kubernetes_does_not_know(kind: str) -> None:
    client = pytest.importorskip("kubernetes").client.ApiClient()
    read = client._ApiClient__deserialize(MANIFESTS[kind], f"V1{kind}")
    assert client.sanitize_for_serialization(read) == MANIFESTS[kind]  # an unknown field would be missing


def test_nothing_names_a_namespace() -> None:
    assert "namespace" not in [key for one in MANIFESTS.values() for key in one["metadata"]]


def test_all_parts_select_the_pods() -> None:
    labels = POD["metadata"]["labels"]
    assert MANIFESTS["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert MANIFESTS["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    (spread,) = POD["spec"]["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"] == labels


def test_a_drain_leaves_pods_that_serve_and_can_lead() -> None:
    spec = MANIFESTS["Deployment"]["spec"]
    assert spec["replicas"] - MANIFESTS["PodDisruptionBudget"]["spec"]["maxUnavailable"] == 2
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


def test_the_image_and_the_pod_agree() -> None:
    assert (PORT["containerPort"], options()["--host"]) == (int(options()["--port"]), "0.0.0.0")
    assert instructions("EXPOSE") == [options()["--port"]]
    assert instructions("USER") == [str(POD["spec"]["securityContext"]["runAsUser"])]
    assert POD["spec"]["securityContext"]["runAsNonRoot"]
    assert "command" not in CONTAINER
    assert "args" not in CONTAINER
    copied = {words.split()[0] for words in instructions("COPY")}
    assert {one for one in copied if one != "dist/"} == {WORKER.name}
    extras = re.search(r"\[([\w,]+)\]", instructions("RUN")[0])
    assert extras is not None
    assert set(extras[1].split(",")) == {"http", "kubernetes", "redis"}


def test_prometheus_finds_the_metrics() -> None:
    annotations = POD["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(PORT["containerPort"])
    assert annotations["prometheus.io/path"] == "/metrics"


def test_the_probes_give_the_process_time() -> None:
    for probe in PROBES:
        asked = CONTAINER[probe]
        assert asked["httpGet"]["port"] == PORT["name"]
        assert asked["timeoutSeconds"] > 2  # the program waits so long for its own threads
    assert CONTAINER["livenessProbe"]["httpGet"]["path"] == CONTAINER["startupProbe"]["httpGet"]["path"] == "/live"
    assert CONTAINER["readinessProbe"]["httpGet"]["path"] == "/ready"


def test_the_kubelet_waits_until_handlers_have_ended_and_the_lease_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELECTION_URL", "memory:")
    worker = importlib.import_module("examples.projects.kubernetes_deployment.worker")
    (handler,), (leader,) = worker.shop._handlers, worker.elections._leaders
    assert leader.options["ttl"] == TIMING.ttl
    released = TIMING.grace + TIMING.ttl + TIMING.retry_every
    needed = float(options()[UVICORN_REQUESTS]) + max(handler.options["grace"], released)
    assert needed + 5 <= POD["spec"]["terminationGracePeriodSeconds"] <= needed + 10
    assert leader.name == MANIFESTS["Role"]["metadata"]["name"]


def test_the_rights_are_those_that_the_documents_list() -> None:
    page = (PROJECTS.parents[1] / "docs" / "kubernetes.md").read_text()
    section = page.partition("\n## Rights\n")[2].partition("\n## ")[0]
    listed = re.findall(r"(?m)^\| ((?:`\w+`(?:, )?)+) \|", section)
    verbs = {verb for row in listed for verb in re.findall(r"\w+", row)}
    assert verbs - {"list"} == VERBS  # `list` is for commands that show every name
    for rule in RULES:
        assert (rule["apiGroups"], rule["resources"]) == (["coordination.k8s.io"], ["leases"])
        assert rule["verbs"] == ["create"] or rule["resourceNames"] == ["shop-worker"]


def test_the_rights_are_those_of_the_pods() -> None:
    account = MANIFESTS["ServiceAccount"]["metadata"]["name"]
    assert POD["spec"]["serviceAccountName"] == account
    binding = MANIFESTS["RoleBinding"]
    assert binding["roleRef"]["name"] == MANIFESTS["Role"]["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account}]


def test_the_page_shows_files_and_commands_that_exist() -> None:
    assert files_listed(PAGE) == files_of(PAGE)
    shown = commands(PAGE)
    image = CONTAINER["image"]
    assert f"docker build -t {image} ." in shown
    secret = CONTAINER["env"][0]["valueFrom"]["secretKeyRef"]
    (created,) = [shlex.split(line) for line in shown if "create secret" in line]
    assert created[:5] == ["kubectl", "create", "secret", "generic", secret["name"]]
    assert created[5].startswith(f"--from-literal={secret['key']}=redis://")
    (applied,) = [shlex.split(line) for line in shown if "kubectl apply" in line]
    assert {word for word in applied if word.endswith(".yaml")} == {file.name for file in PROJECT.glob("*.yaml")}
    for line in blocks(PAGE, "text"):
        assert any(re.fullmatch(one, line) for one in LINES), line


# --- the pods, as processes ------------------------------------------------------------------------------------------

PLACED = r"(\S+): standing-(\d+)-(\d+) placed"
SERVED = r"(\S+): (\S+), (\d+) (\w+) served"
LINES = (PLACED, SERVED)


class Pod:
    """One instance: the image's command with the manifest's variables; the kubelet is this test."""

    def __init__(self, number: int, port: int, variables: dict[str, str], folder: Path) -> None:
        self.log = folder / f"pod-{number}"
        self.port = port
        program, *arguments = command()
        assert program == "uvicorn"
        ours = {f"--port={options()['--port']}": f"--port={port}", "--host=0.0.0.0": "--host=127.0.0.1"}
        line = [sys.executable, "-m", "uvicorn", *(ours.get(word, word) for word in arguments)]
        environment = {**os.environ, **variables, "PYTHONUNBUFFERED": "1"}
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(line, cwd=folder, env=environment, stdout=out, stderr=out)

    def get(self, path: str) -> tuple[int, str]:
        """Return the code and the text of an answer; 0 as long as nothing listens."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=PATIENCE) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def passes(self, probe: str) -> bool:
        """Run a probe of the container."""
        return self.get(CONTAINER[probe]["httpGet"]["path"])[0] == 200

    def leads(self) -> bool:
        return 'tenure_leader{name="shop-worker"} 1.0' in self.get("/metrics")[1]

    def placed(self) -> list[tuple[int, int]]:
        """Return the term and the number of each standing order that it has placed."""
        found = re.findall(rf"(?m)^{PLACED}$", self.log.read_text())
        return [(int(term), int(number)) for _, term, number in found]

    def served(self) -> list[str]:
        """Return the ids of the orders that it has served."""
        return [found[1] for found in re.findall(rf"(?m)^{SERVED}$", self.log.read_text())]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class Pods(list[Pod]):
    """The three pods."""

    def leader(self) -> Pod:
        """Wait until one leads and has placed an order, and return it."""
        wait_until(lambda: any(pod.leads() and pod.placed() for pod in self if pod.process.poll() is None), self.logs)
        (found,) = (pod for pod in self if pod.process.poll() is None and pod.leads())
        return found

    def served(self) -> list[str]:
        return [one for pod in self for one in pod.served()]

    def logs(self) -> str:
        return "\n".join(f"--- {pod.log.name}\n{pod.log.read_text()}" for pod in self)


@contextmanager
def pods(
    cluster: Kubernetes, queue: str, folder: Path, count: int = 3, rules: Sequence[dict[str, Any]] = RULES
) -> Iterator[Pods]:
    """Start pods with the rights of the Role, and no others."""
    cluster.set(
        tokens={"token-of-the-pod": "pod"},
        roles=[{"verbs": rule["verbs"], "names": rule.get("resourceNames", [])} for rule in rules],
    )
    in_cluster = {one["name"]: one.get("value", "from a secret") for one in CONTAINER["env"]}
    assert set(in_cluster) == {"TENURE_URL", "ELECTION_URL"}
    variables = {
        "TENURE_URL": queue,
        "ELECTION_URL": f"{in_cluster['ELECTION_URL']}default?server={cluster.server}&token_env=POD_TOKEN",
        "POD_TOKEN": "token-of-the-pod",
        "STANDING_ORDER_EVERY": "0.2",
    }
    shutil.copy(WORKER, folder)
    with ExitStack() as stack:
        started = Pods()
        for number, port in enumerate(stack.enter_context(ports_held(count))):
            started.append(Pod(number, port, variables, folder))
            stack.callback(started[-1].end)
        yield started


@pytest.mark.process
def test_another_pod_leads_when_the_leader_is_killed_and_no_order_is_lost(tmp_path: Path) -> None:
    with private(Kubernetes) as cluster, private(Redis) as store, pods(cluster, store.url, tmp_path) as started:
        wait_until(lambda: all(pod.passes(probe) for pod in started for probe in PROBES), started.logs)
        first = started.leader()
        with tenure.sync.connect(store.url) as backend:
            orders = backend.queue("orders", lock=30)
            orders.send_batch([tenure.Outgoing.json({"item": "kettle"}, id=f"order-{n}") for n in range(60)])
            killed_at = time.monotonic()
            first.process.kill()
            first.process.wait()
            second = started.leader()
            assert time.monotonic() - killed_at <= TIMING.ttl + TIMING.retry_every + A_MOMENT
            assert second is not first
            assert min(second.placed()) > max(first.placed())
            # The orders that the killed pod was serving are delivered again when their locks have ended.
            wait_until(lambda: {f"order-{n}" for n in range(60)} <= set(started.served()), started.logs)
        requests = [one for one in cluster.requests() if one["user"] == "pod"]
        assert [one for one in requests if one["status"] in (401, 403)] == []
        assert {one["verb"] for one in requests} == VERBS


@pytest.mark.process
def test_a_pod_that_ends_serves_its_orders_and_another_leads_at_once(tmp_path: Path) -> None:
    with private(Kubernetes) as cluster, pods(cluster, f"sqlite:///{tmp_path}/shop.db", tmp_path) as started:
        wait_until(lambda: all(pod.passes("readinessProbe") for pod in started), started.logs)
        first = started.leader()
        asked_at = time.monotonic()
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(PATIENCE) in (0, -signal.SIGTERM)  # 0 as the first process of a container
        second = started.leader()
        assert time.monotonic() - asked_at < TIMING.ttl / 2  # the lease was released, and did not run out
        assert min(second.placed()) > max(first.placed())
        wait_until(lambda: {f"standing-{term}-{number}" for term, number in first.placed()} <= set(started.served()))


@pytest.mark.process
def test_no_probe_restarts_a_pod_while_a_store_is_away(tmp_path: Path) -> None:
    with private(Kubernetes) as cluster, private(Redis) as store, pods(cluster, store.url, tmp_path, 1) as (pod,):
        wait_until(lambda: pod.passes("readinessProbe"), pod.log.read_text)
        for server in (store, cluster):
            server.kill()
            wait_until(lambda: not pod.passes("readinessProbe"), pod.log.read_text)
            assert pod.passes("livenessProbe")
            server.start()
            wait_until(lambda: pod.passes("readinessProbe"), pod.log.read_text)


@pytest.mark.process
def test_a_pod_without_its_rights_stops_a_rollout(tmp_path: Path) -> None:
    queue = f"sqlite:///{tmp_path}/shop.db"
    with private(Kubernetes) as cluster, pods(cluster, queue, tmp_path, 1, rules=[]) as (pod,):
        wait_until(lambda: pod.get("/ready")[0] == 503, pod.log.read_text)
        wait_until(
            lambda: pod.get("/live")[0] == 503, pod.log.read_text
        )  # it is restarted, as the rights may be there then
        assert pod.process.poll() is None
        wait_until(lambda: "grant the verb 'get' on leases" in pod.log.read_text(), pod.log.read_text)
