"""What no schema sees: whether the objects of a release fit each other.

A rule takes the objects and yields a sentence for each fault. `faults` applies all of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tests.helm.chart import Document, PodTemplate, pods

Rule = Callable[[Sequence[Document]], Iterator[str]]

RULES: list[Rule] = []
PROBES = ("livenessProbe", "readinessProbe", "startupProbe")
SERVICES = ("api", "learner", "redis", "ray-head", "policy", "actors")
"""Components whose pods run until they are ended; the others end by themselves."""
LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
PORT_NAME = re.compile(r"(?=.*[a-z])[a-z0-9](-?[a-z0-9])*")
QUANTITY = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?")
FACTORS = {"": 1.0, "m": 1e-3} | {
    letter + suffix: base**power
    for suffix, base in (("", 1000), ("i", 1024))
    for power, letter in enumerate("KMGTPE", start=1)
}
FACTORS["k"] = 1000


def rule(check: Rule) -> Rule:
    RULES.append(check)
    return check


def faults(documents: Sequence[Document]) -> list[str]:
    """Every fault that a rule finds."""
    return [fault for check in RULES for fault in check(documents)]


def quantity(value: Any) -> float:
    """1.5Gi -> 1610612736.0; 250m -> 0.25. Raises ValueError."""
    found = QUANTITY.fullmatch(str(value))
    if found is None:
        raise ValueError(f"{value!r} is not a quantity")
    return float(found[1]) * FACTORS[found[2] or ""]


def selects(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """Whether a label selector, with matchLabels and matchExpressions, takes these labels."""
    selector = selector or {}
    for key, value in (selector.get("matchLabels") or {}).items():
        if labels.get(key) != value:
            return False
    for term in selector.get("matchExpressions") or []:
        is_in = labels.get(term["key"]) in (term.get("values") or [])
        holds = {
            "In": is_in,
            "NotIn": not is_in,
            "Exists": term["key"] in labels,
            "DoesNotExist": term["key"] not in labels,
        }
        if not holds[term["operator"]]:
            return False
    return True


def _name(document: Document) -> str:
    return f"{document['kind']}/{document['metadata'].get('name')}"


def _of_kind(documents: Sequence[Document], *kinds: str) -> list[Document]:
    return [document for document in documents if document["kind"] in kinds]


# --- objects


@rule
def each_object_is_there_once(documents: Sequence[Document]) -> Iterator[str]:
    for name, count in Counter(map(_name, documents)).items():
        if count > 1:
            yield f"{name} is there {count} times"


@rule
def names_and_labels_are_valid(documents: Sequence[Document]) -> Iterator[str]:
    for document in documents:
        limit = 52 if document["kind"] == "StatefulSet" else 63
        name = str(document["metadata"].get("name"))
        if not NAME.fullmatch(name) or len(name) > limit:
            yield f"{_name(document)}: the name is not one of at most {limit} lower-case characters"
        yield from _label_faults(_name(document), document["metadata"])
    for pod in pods(documents):
        yield from _label_faults(pod.where, pod.template.get("metadata") or {})


def _label_faults(where: str, metadata: Mapping[str, Any]) -> Iterator[str]:
    for key, value in (metadata.get("labels") or {}).items():
        if not isinstance(value, str) or not LABEL.fullmatch(value):
            yield f"{where}: label {key} = {value!r} is not valid"
    for key, value in (metadata.get("annotations") or {}).items():
        if not isinstance(value, str):
            yield f"{where}: annotation {key} = {value!r} is not text"


@rule
def all_lie_in_one_namespace(documents: Sequence[Document]) -> Iterator[str]:
    spaces = {document["metadata"].get("namespace") for document in documents}
    if len(spaces) > 1:
        yield f"objects lie in {len(spaces)} namespaces: {spaces}"


@rule
def no_object_grants_rights_in_the_whole_cluster(documents: Sequence[Document]) -> Iterator[str]:
    for document in _of_kind(documents, "ClusterRole", "ClusterRoleBinding"):
        yield f"{_name(document)}: the chart needs nothing outside its namespace"


# --- workloads and services


@rule
def selectors_select_their_own_pods(documents: Sequence[Document]) -> Iterator[str]:
    for document in _of_kind(documents, "Deployment", "StatefulSet"):
        selector = document["spec"].get("selector") or {}
        if not selector.get("matchLabels"):
            yield f"{_name(document)}: no selector"
        for pod in pods([document]):
            if not selects(selector, pod.labels):
                yield f"{_name(document)}: the selector does not match the labels of its pods"
        others = [p for p in pods(documents) if p.owner is not document]
        for other in others:
            if selector.get("matchLabels") and selects(selector, other.labels):
                yield f"{_name(document)}: the selector matches pods of {other.where}, too"


@rule
def services_lead_to_ports_of_pods(documents: Sequence[Document]) -> Iterator[str]:
    for service in _of_kind(documents, "Service"):
        spec = service["spec"]
        if not spec.get("selector"):
            yield f"{_name(service)}: no selector"
            continue
        found = [p for p in pods(documents) if selects({"matchLabels": spec["selector"]}, p.labels)]
        if not found:
            yield f"{_name(service)}: selects no pod of the release"
        names = [port.get("name") for port in spec["ports"]]
        if len(set(names)) < len(names):
            yield f"{_name(service)}: two ports of one name"
        for port in spec["ports"]:
            target = port.get("targetPort", port["port"])
            for pod in found:
                if target not in _ports(pod):
                    yield f"{_name(service)}: {pod.where} has no port {target}"


def _ports(pod: PodTemplate) -> set[Any]:
    ports = [port for c in pod.containers for port in c.get("ports") or []]
    return {p.get("name") for p in ports} | {p["containerPort"] for p in ports}


@rule
def statefulsets_have_their_service(documents: Sequence[Document]) -> Iterator[str]:
    services = {s["metadata"]["name"]: s for s in _of_kind(documents, "Service")}
    for document in _of_kind(documents, "StatefulSet"):
        service = services.get(document["spec"].get("serviceName", ""))
        if service is None:
            yield f"{_name(document)}: its serviceName is no Service of the release"
        elif not all(
            selects({"matchLabels": service["spec"].get("selector")}, p.labels)
            for p in pods([document])
        ):
            yield f"{_name(document)}: its Service does not select its pods"


@rule
def ingresses_lead_to_services(documents: Sequence[Document]) -> Iterator[str]:
    ports = {
        (service["metadata"]["name"], port.get("name"))
        for service in _of_kind(documents, "Service")
        for port in service["spec"]["ports"]
    }
    for ingress in _of_kind(documents, "Ingress"):
        for host in ingress["spec"].get("rules") or []:
            for path in host["http"]["paths"]:
                backend = path["backend"]["service"]
                if (backend["name"], backend["port"].get("name")) not in ports:
                    yield f"{_name(ingress)}: {backend} is no Service of the release"


@rule
def budgets_and_scalers_have_their_target(documents: Sequence[Document]) -> Iterator[str]:
    named = {(d["kind"], d["metadata"]["name"]): d for d in documents}
    for budget in _of_kind(documents, "PodDisruptionBudget"):
        spec = budget["spec"]
        if ("minAvailable" in spec) == ("maxUnavailable" in spec):
            yield f"{_name(budget)}: takes one of minAvailable and maxUnavailable"
        if not spec.get("selector"):
            yield f"{_name(budget)}: no selector"
        elif not any(selects(spec["selector"], pod.labels) for pod in pods(documents)):
            yield f"{_name(budget)}: selects no pod of the release"
    for scaler in _of_kind(documents, "HorizontalPodAutoscaler"):
        spec, target = scaler["spec"], scaler["spec"]["scaleTargetRef"]
        if spec.get("minReplicas", 1) > spec["maxReplicas"]:
            yield f"{_name(scaler)}: minReplicas is above maxReplicas"
        scaled = named.get((target["kind"], target["name"]))
        if scaled is None:
            yield f"{_name(scaler)}: {target['kind']}/{target['name']} is not of the release"
        elif "replicas" in scaled["spec"]:
            yield f"{_name(scaler)}: {_name(scaled)} sets replicas, and each upgrade resets them"


@rule
def monitors_select_a_service(documents: Sequence[Document]) -> Iterator[str]:
    for monitor in _of_kind(documents, "ServiceMonitor"):
        services = [
            service
            for service in _of_kind(documents, "Service")
            if selects(monitor["spec"]["selector"], service["metadata"].get("labels") or {})
        ]
        if not services:
            yield f"{_name(monitor)}: selects no Service of the release"
        names = {port.get("name") for s in services for port in s["spec"]["ports"]}
        for endpoint in monitor["spec"]["endpoints"]:
            if services and endpoint.get("port") not in names:
                yield f"{_name(monitor)}: no Service has a port {endpoint.get('port')}"


@rule
def policies_select_pods(documents: Sequence[Document]) -> Iterator[str]:
    for policy in _of_kind(documents, "NetworkPolicy"):
        if not any(selects(policy["spec"]["podSelector"], pod.labels) for pod in pods(documents)):
            yield f"{_name(policy)}: selects no pod of the release"


@rule
def groups_of_ray_have_room(documents: Sequence[Document]) -> Iterator[str]:
    for document in _of_kind(documents, "RayService"):
        groups = document["spec"]["rayClusterConfig"].get("workerGroupSpecs") or []
        if not groups:
            yield f"{_name(document)}: no group of workers"
        for group in groups:
            if not group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]:
                yield f"{_name(document)} {group['groupName']}: replicas are out of bounds"


@rule
def the_head_of_ray_names_its_port_of_serve(documents: Sequence[Document]) -> Iterator[str]:
    """KubeRay makes a Service of the head's port `serve`, and fails where there is none."""
    for document in _of_kind(documents, "RayService"):
        head = document["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]
        (first, *_) = head["spec"]["containers"]
        if "serve" not in {port.get("name") for port in first.get("ports") or []}:
            yield f"{_name(document)} head: no port is named serve"


@rule
def objects_of_ray_fit_in_shared_memory(documents: Sequence[Document]) -> Iterator[str]:
    """Ray's object store takes 30 % of the memory; on disk if /dev/shm is smaller than that."""
    for pod in pods(documents):
        if pod.owner["kind"] != "RayService":
            continue
        sizes = [v["emptyDir"]["sizeLimit"] for v in pod.spec["volumes"] if v["name"] == "shm"]
        memory = (pod.main.get("resources") or {}).get("limits", {}).get("memory", 0)
        if not sizes or quantity(sizes[0]) < 0.3 * quantity(memory):
            yield f"{pod.where}: /dev/shm holds less than 30 % of the memory limit"


# --- pods


@rule
def mounts_have_volumes(documents: Sequence[Document]) -> Iterator[str]:
    for pod in pods(documents):
        names = [volume["name"] for volume in pod.spec.get("volumes") or []]
        if len(set(names)) < len(names):
            yield f"{pod.where}: two volumes of one name"
        mounted = set()
        for container in pod.containers:
            paths = [mount["mountPath"] for mount in container.get("volumeMounts") or []]
            if len(set(paths)) < len(paths):
                yield f"{pod.where} {container['name']}: two mounts at one path"
            for mount in container.get("volumeMounts") or []:
                mounted.add(mount["name"])
                if mount["name"] not in names:
                    yield f"{pod.where} {container['name']}: no volume {mount['name']}"
        for name in set(names) - mounted:
            yield f"{pod.where}: volume {name} is mounted nowhere"


@rule
def names_in_a_pod_are_there_once(documents: Sequence[Document]) -> Iterator[str]:
    for pod in pods(documents):
        for name, count in Counter(c["name"] for c in pod.containers).items():
            if count > 1:
                yield f"{pod.where}: {count} containers {name}"
        for container in pod.containers:
            for name, count in Counter(e["name"] for e in container.get("env") or []).items():
                if count > 1:
                    yield f"{pod.where} {container['name']}: variable {name} is set {count} times"
            for port in container.get("ports") or []:
                name = port.get("name", "x")
                if not PORT_NAME.fullmatch(name) or len(name) > 15:
                    yield f"{pod.where}: port name {name!r} is not valid"


@rule
def variables_refer_to_earlier_ones(documents: Sequence[Document]) -> Iterator[str]:
    for pod in pods(documents):
        for container in pod.containers:
            known: set[str] = set()
            for variable in container.get("env") or []:
                for used in re.findall(r"\$\((\w+)\)", str(variable.get("value", ""))):
                    if used not in known:
                        yield f"{pod.where}: {variable['name']} uses {used}, set later or never"
                known.add(variable["name"])


@rule
def resources_are_given_and_fit(documents: Sequence[Document]) -> Iterator[str]:
    for pod in pods(documents):
        for container in pod.containers:
            where = f"{pod.where} {container['name']}"
            resources = container.get("resources") or {}
            limits = resources.get("limits") or {}
            for part in ("requests", "limits"):
                for key in {"cpu", "memory"} - set(resources.get(part) or {}):
                    yield f"{where}: no {part}.{key}"
                for key, value in (resources.get(part) or {}).items():
                    try:
                        quantity(value)
                    except ValueError as error:
                        yield f"{where}: {part}.{key} {error}"
            yield from _too_small_limits(where, resources.get("requests") or {}, limits)
            yield from _too_large_memory_volumes(where, pod, container, limits)


def _too_small_limits(
    where: str, requests: Mapping[str, Any], limits: Mapping[str, Any]
) -> Iterator[str]:
    for key, value in requests.items():
        if key not in limits or not QUANTITY.fullmatch(f"{value}"):
            continue
        if QUANTITY.fullmatch(f"{limits[key]}") and quantity(value) > quantity(limits[key]):
            yield f"{where}: requests.{key} is above its limit"


def _too_large_memory_volumes(
    where: str, pod: PodTemplate, container: Mapping[str, Any], limits: Mapping[str, Any]
) -> Iterator[str]:
    """Files in memory count as the container's: a full /dev/shm must not get it killed."""
    mounted = {mount["name"] for mount in container.get("volumeMounts") or []}
    for volume in pod.spec.get("volumes") or []:
        folder = volume.get("emptyDir") or {}
        if volume["name"] in mounted and folder.get("medium") == "Memory" and "memory" in limits:
            if "sizeLimit" not in folder:
                yield f"{where}: volume {volume['name']} in memory has no sizeLimit"
            elif quantity(folder["sizeLimit"]) >= quantity(limits["memory"]):
                yield f"{where}: volume {volume['name']} may fill the memory limit"


@rule
def pods_keep_away_from_their_node(documents: Sequence[Document]) -> Iterator[str]:
    for pod in pods(documents):
        for key in ("hostNetwork", "hostPID", "hostIPC"):
            if pod.spec.get(key):
                yield f"{pod.where}: {key}"
        if any("hostPath" in volume for volume in pod.spec.get("volumes") or []):
            yield f"{pod.where}: a volume of the node"


@rule
def containers_are_restricted(documents: Sequence[Document]) -> Iterator[str]:
    """Pod Security Standard `restricted`, and a root file system that cannot be written."""
    for pod in pods(documents):
        outer = pod.spec.get("securityContext") or {}
        for container in pod.containers:
            context = {**outer, **(container.get("securityContext") or {})}
            for fault in _context_faults(context):
                yield f"{pod.where} {container['name']}: {fault}"


def _context_faults(context: Mapping[str, Any]) -> Iterator[str]:
    if context.get("runAsNonRoot") is not True or context.get("runAsUser", 1) == 0:
        yield "may run as root"
    if context.get("privileged") or context.get("allowPrivilegeEscalation") is not False:
        yield "may gain privileges"
    if context.get("readOnlyRootFilesystem") is not True:
        yield "can write its root file system"
    if (context.get("capabilities") or {}).get("drop") != ["ALL"]:
        yield "keeps capabilities"
    if (context.get("seccompProfile") or {}).get("type") != "RuntimeDefault":
        yield "no seccomp profile"


@rule
def images_are_pinned(documents: Sequence[Document]) -> Iterator[str]:
    for pod in pods(documents):
        for container in pod.containers:
            last = str(container.get("image", "")).rpartition("/")[2]
            tag = last.partition("@")[0].partition(":")[2]
            if "@sha256:" not in last and tag in ("", "latest"):
                yield f"{pod.where}: image {container.get('image')!r} has no fixed tag"


@rule
def services_have_probes_on_their_ports(documents: Sequence[Document]) -> Iterator[str]:
    for pod in pods(documents):
        main = pod.main
        for probe in PROBES if pod.component in SERVICES else ():
            if probe not in main:
                yield f"{pod.where}: no {probe}"
        for container in pod.containers:
            names = {port.get("name") for port in container.get("ports") or []}
            for probe in PROBES:
                handler = container.get(probe) or {}
                target = (handler.get("httpGet") or handler.get("tcpSocket") or {}).get("port")
                if isinstance(target, str) and target not in names:
                    yield f"{pod.where}: {probe} asks port {target}, which is none of its own"


@rule
def references_are_of_the_release_or_given(documents: Sequence[Document]) -> Iterator[str]:
    """A name with the release's prefix must be an object of the release; others are the user's."""
    held = {(d["kind"], d["metadata"]["name"]): d for d in documents}
    prefixes = {
        d["metadata"].get("labels", {}).get("app.kubernetes.io/instance") for d in documents
    }
    for where, kind, name, key in _references(documents):
        if not any(prefix and name.startswith(prefix) for prefix in prefixes):
            continue
        found = held.get((kind, name))
        if found is None:
            yield f"{where}: {kind}/{name} is not of the release"
        elif key is not None and key not in (found.get("data") or {}):
            yield f"{where}: {kind}/{name} has no key {key}"


def _references(documents: Sequence[Document]) -> Iterator[tuple[str, str, str, str | None]]:
    """(where, kind, name, key) of what pods and custom resources read."""
    for pod in pods(documents):
        account = pod.spec.get("serviceAccountName")
        if account:
            yield pod.where, "ServiceAccount", account, None
        for volume in pod.spec.get("volumes") or []:
            if "configMap" in volume:
                yield pod.where, "ConfigMap", volume["configMap"]["name"], None
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                yield pod.where, "PersistentVolumeClaim", claim, None
    for where, secret in _secret_keys(documents):
        yield where, "Secret", secret["name"], secret["key"]


def _secret_keys(documents: Sequence[Document]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(where, name and key) of every key of a Secret that is read."""
    found: list[tuple[str, Any]] = []
    for pod in pods(documents):
        variables = [v for c in pod.containers for v in c.get("env") or []]
        found += [(pod.where, (v.get("valueFrom") or {}).get("secretKeyRef")) for v in variables]
    for document in _of_kind(documents, "ServiceMonitor"):
        for endpoint in document["spec"]["endpoints"]:
            found.append(
                (_name(document), (endpoint.get("authorization") or {}).get("credentials"))
            )
    for document in _of_kind(documents, "RayService"):
        redis = document["spec"]["rayClusterConfig"].get("gcsFaultToleranceOptions") or {}
        source = (redis.get("redisPassword") or {}).get("valueFrom") or {}
        found.append((_name(document), source.get("secretKeyRef")))
    yield from ((where, secret) for where, secret in found if secret)
