"""What is deployed: files that tools accept, and the topology of compose.yaml run as processes."""

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import kubernetes_validate
import openai
import pytest
import yaml
from compose_spec import PyCompose
from forebay_gateway.teams.networks import Proxies
from forebay_shared.telemetry import UpstreamMetrics
from patience import PATIENCE_S
from redis import Redis
from redis.exceptions import AuthenticationError, NoPermissionError
from serve_house import until
from topology import ROOT, Topology, read_compose

DEPLOY = ROOT / "deploy"


def tool(name: str) -> str:
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def test_compose_is_valid_by_the_specification() -> None:
    document = read_compose({})
    assert set(PyCompose.from_yaml(yaml.safe_dump(document)).service_names()) == set(
        document["services"]
    )


def test_every_container_is_hardened_and_pinned() -> None:
    for name, service in read_compose({})["services"].items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["user"].split(":")[0] != "0", name
        assert re.search(r":v?\d+\.\d+\.\d+(-\w+)?$", service["image"]), name


def test_redis_is_on_no_published_network_and_only_the_front_is_public() -> None:
    document = read_compose({})
    assert document["networks"]["inner"]["internal"]
    assert document["services"]["redis"]["networks"] == ["inner"]
    published = [name for name, service in document["services"].items() if "ports" in service]
    assert sorted(published) == ["front", "grafana", "traces"]
    for name in ("grafana", "traces"):
        assert document["services"][name]["ports"][0].startswith("127.0.0.1:")


def test_a_gateway_sees_the_client_behind_the_front() -> None:
    assert re.search(r"^  option forwardfor$", (DEPLOY / "haproxy.cfg").read_text(), re.M)
    trusted = read_compose({})["services"]["gateway"]["environment"]["FOREBAY_TRUSTED_PROXY"]
    proxies = Proxies(trusted.split(","))
    said = {b"x-forwarded-for": b"203.0.113.9"}
    for front in ("172.18.0.5", "192.168.64.7", "10.5.0.2"):
        assert proxies.client((front, 40_000), said) == "203.0.113.9"
    assert proxies.client(("198.51.100.1", 40_000), said) == "198.51.100.1"


def test_what_compose_mounts_exists_and_secrets_are_those_that_the_script_makes() -> None:
    document = read_compose({})
    for service in document["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (ROOT / source).exists(), source
    made = set(re.findall(r"^make_one (\w+)", (DEPLOY / "make-secrets").read_text(), re.M))
    named = {Path(secret["file"]).name for secret in document["secrets"].values()}
    assert named == made


@pytest.mark.parametrize("file", sorted(DEPLOY.glob("*.Dockerfile")), ids=lambda path: path.name)
def test_dockerfiles_pass_hadolint_and_copy_only_what_the_context_holds(file: Path) -> None:
    subprocess.run([tool("hadolint"), file], check=True)
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    for line in file.read_text().splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            source = line.split()[1]
            assert f"!{source}" in ignore, line
            assert (ROOT / source).exists(), line


def test_the_gateway_image_holds_no_torch() -> None:
    text = (DEPLOY / "gateway.Dockerfile").read_text()
    assert "worker" not in text
    requirements = (ROOT / "gateway/pyproject.toml").read_text()
    assert "torch" not in requirements


def test_manifests_fit_the_schemas_of_kubernetes() -> None:
    built = subprocess.run(
        [tool("kubectl"), "kustomize", DEPLOY / "k8s"], check=True, capture_output=True, text=True
    ).stdout
    kinds: list[str] = []
    for manifest in yaml.safe_load_all(built):
        kinds.append(manifest["kind"])
        if not manifest["apiVersion"].startswith("keda.sh"):
            kubernetes_validate.validate(manifest, "1.32", strict=True)
    assert {"Deployment", "StatefulSet", "HorizontalPodAutoscaler", "PodDisruptionBudget"} < set(
        kinds
    )


def test_workers_are_scaled_by_what_the_whole_fleet_has_to_do() -> None:
    """KEDA divides what a query says by the threshold: a figure per worker would end busy ones."""
    scaled = yaml.safe_load((DEPLOY / "k8s/scaling.yaml").read_text())
    for trigger in scaled["spec"]["triggers"]:
        assert trigger.get("metricType", "AverageValue") == "AverageValue"
        assert trigger["metadata"]["query"].startswith("sum(")
        assert "/" not in trigger["metadata"]["query"]


def test_kubernetes_runs_the_images_of_compose() -> None:
    images = {service["image"] for service in read_compose({})["services"].values()}
    used = re.findall(r"image: (\S+)", "".join(p.read_text() for p in DEPLOY.glob("k8s/*.yaml")))
    assert used
    assert set(used) <= images


@pytest.mark.system
def test_the_topology_serves_through_every_gateway_and_outlives_the_end_of_a_worker() -> None:
    with Topology({"cpu"}) as house:
        assert {"redis", "gateway", "worker-cpu"} < set(house.services())
        house.start("redis")
        gateways = [house.start("gateway") for _ in range(2)]
        workers = [house.start("worker-cpu", FOREBAY_ENGINE="echo") for _ in range(2)]
        clients = [_client(house, gateway) for gateway in gateways]
        for gateway in gateways:
            until(lambda name=gateway: _sees_two_workers(house, name))
        for client in clients:
            assert _say(client) == "hello fleet"
        house.process(workers[0]).terminate()
        assert house.process(workers[0]).wait(PATIENCE_S) == 0, house.log(workers[0])
        for client in clients:
            assert _say(client) == "hello fleet"
        with pytest.raises(openai.AuthenticationError):
            clients[0].with_options(api_key="sk-wrong").models.list()
        _check_rights(house)
        _check_dashboards(house, gateways[0])
        house.process(gateways[0]).terminate()
        assert house.process(gateways[0]).wait(PATIENCE_S) == 0, house.log(gateways[0])


def _check_rights(house: Topology) -> None:
    """Redis' user for gateways and workers may touch our keys alone and configure nothing."""
    address = house.addresses["redis"]
    with pytest.raises(AuthenticationError):
        Redis(host=address).ping()
    client = Redis.from_url(house.secret("redis_url"))
    client.set("fb:{test}", "1", px=1000)
    for refused in (lambda: client.set("other", "1"), lambda: client.config_get("*")):
        with pytest.raises(NoPermissionError):
            refused()


def _check_dashboards(house: Topology, gateway: str) -> None:
    """Every metric that a dashboard or the autoscaler asks for is in the scrape."""
    scrape = _get(house, gateway, "/metrics")
    families = set(re.findall(r"^# TYPE (\S+)", scrape, re.M))
    families |= {family.name for family in UpstreamMetrics("", [], time.monotonic).collect()}
    labels = set(re.findall(r"[{,](\w+)=", scrape)) | {"reason"}
    board: dict[str, Any] = json.loads((DEPLOY / "grafana/dashboards/forebay.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked += re.findall(r"query: (.*)", (DEPLOY / "k8s/scaling.yaml").read_text())
    for expression in asked:
        for name in re.findall(r"\b(?:vllm:|forebay_)\w+", expression):
            assert {name, re.sub(r"_(bucket|total|count|sum)$", "", name)} & families, name
        for names in re.findall(r"\bby \(([^)]*)\)", expression):
            assert set(names.split(", ")) <= labels, expression


def _client(house: Topology, gateway: str) -> openai.OpenAI:
    url = f"http://{house.addresses[gateway]}:8000/v1"
    return openai.OpenAI(
        base_url=url, api_key=house.secret("api_key"), timeout=PATIENCE_S, max_retries=0
    )


def _say(client: openai.OpenAI) -> str | None:
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "hello fleet"}]
    )
    return answer.choices[0].message.content


def _get(house: Topology, gateway: str, path: str) -> str:
    with urllib.request.urlopen(f"http://{house.addresses[gateway]}:8000{path}", timeout=5) as got:
        return got.read().decode()


def _sees_two_workers(house: Topology, gateway: str) -> bool:
    assert house.process(gateway).poll() is None, house.log(gateway)
    try:
        seen = re.findall(r"^forebay_workers{.*} (\S+)", _get(house, gateway, "/metrics"), re.M)
    except OSError:
        return False
    return len(seen) == 2 and set(seen) == {"2.0"}
