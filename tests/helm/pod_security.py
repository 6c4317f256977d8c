"""What the Pod Security Standard `restricted` forbids a pod, of Kubernetes 1.37 and before.

The API server that is built here is older than Pod Security, and no package holds the admission
itself. These are its rules for pods of Linux; field names are Kubernetes' own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.helm.chart import Document, PodTemplate, pods

Fields = Mapping[str, Any]

HOST = ("hostNetwork", "hostPID", "hostIPC")
VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim"),
    *("projected", "secret", "image"),
}
CAPABILITIES = {"NET_BIND_SERVICE"}
"""What may be added after ALL was dropped."""
SECCOMP = APP_ARMOR = {"RuntimeDefault", "Localhost"}
SELINUX_TYPES = {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
SYSCTLS = {
    *(
        "kernel.shm_rmid_forced",
        "net.ipv4.ip_local_port_range",
        "net.ipv4.ip_unprivileged_port_start",
    ),
    *("net.ipv4.tcp_syncookies", "net.ipv4.ping_group_range", "net.ipv4.ip_local_reserved_ports"),
    *("net.ipv4.tcp_keepalive_time", "net.ipv4.tcp_fin_timeout"),
    *("net.ipv4.tcp_keepalive_intvl", "net.ipv4.tcp_keepalive_probes"),
    *("net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem"),
}
ANNOTATION = "container.apparmor.security.beta.kubernetes.io/"
HANDLERS = ("livenessProbe", "readinessProbe", "startupProbe")


def violations(documents: Sequence[Document]) -> list[str]:
    """One line for each rule that a pod of the objects breaks, those that KubeRay makes of a
    RayService included."""
    return [f"{pod.where}: {said}" for pod in pods(documents) for said in _of_pod(pod)]


def _of_pod(pod: PodTemplate) -> Iterator[str]:
    spec = pod.spec
    context = spec.get("securityContext") or {}
    for field in HOST:
        if spec.get(field):
            yield f"{field} is true"
    yield from _of_volumes(spec.get("volumes") or [])
    yield from _of_settings(pod, context)
    if context.get("runAsUser") == 0:
        yield "runAsUser is 0"
    yield from _of_options("pod", context)
    for container in [*pod.containers, *_autoscaler(pod)]:
        for said in _of_container(container, context):
            yield f"container {container['name']}: {said}"


def _of_volumes(volumes: Sequence[Fields]) -> Iterator[str]:
    for volume in volumes:
        kinds = volume.keys() - {"name"}
        if not kinds <= VOLUMES:
            yield f"volume {volume['name']} is a {', '.join(sorted(kinds - VOLUMES))}"


def _of_settings(pod: PodTemplate, context: Fields) -> Iterator[str]:
    """Of the kernel."""
    for sysctl in context.get("sysctls") or []:
        if sysctl["name"] not in SYSCTLS:
            yield f"sysctl {sysctl['name']} is not safe"
    for key, value in (pod.template.get("metadata", {}).get("annotations") or {}).items():
        if key.startswith(ANNOTATION) and not value.startswith(("runtime/default", "localhost/")):
            yield f"AppArmor is {value}"


def _autoscaler(pod: PodTemplate) -> list[dict[str, Any]]:
    """The container that KubeRay adds to the head where Ray scales itself."""
    if not pod.where.endswith(" head"):
        return []
    cluster = pod.owner["spec"]["rayClusterConfig"]
    if not cluster.get("enableInTreeAutoscaling"):
        return []
    return [{"name": "autoscaler", **(cluster.get("autoscalerOptions") or {})}]


def _of_container(container: Fields, of_pod: Fields) -> Iterator[str]:
    context = container.get("securityContext") or {}
    if context.get("privileged"):
        yield "it is privileged"
    if context.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation is not false"
    if not context.get("runAsNonRoot", of_pod.get("runAsNonRoot")):
        yield "runAsNonRoot is not true"
    if context.get("runAsUser") == 0:
        yield "runAsUser is 0"
    if context.get("procMount", "Default") != "Default":
        yield f"procMount is {context['procMount']}"
    profile = context.get("seccompProfile") or of_pod.get("seccompProfile") or {}
    if profile.get("type") not in SECCOMP:
        yield "there is no seccompProfile"
    yield from _of_options("container", context)
    yield from _of_capabilities(context.get("capabilities") or {})
    yield from _of_hosts(container)


def _of_options(owner: str, context: Fields) -> Iterator[str]:
    """What pods and containers may both have."""
    options = context.get("seLinuxOptions") or {}
    if options.get("type", "") not in SELINUX_TYPES or options.get("user") or options.get("role"):
        yield f"seLinuxOptions of the {owner}"
    profile = context.get("appArmorProfile")
    if profile and profile.get("type") not in APP_ARMOR:
        yield f"appArmorProfile of the {owner} is {profile.get('type')}"
    if (context.get("windowsOptions") or {}).get("hostProcess"):
        yield f"hostProcess of the {owner} is true"


def _of_capabilities(capabilities: Fields) -> Iterator[str]:
    if "ALL" not in (capabilities.get("drop") or []):
        yield "it does not drop ALL capabilities"
    more = set(capabilities.get("add") or []) - CAPABILITIES
    if more:
        yield f"it adds {', '.join(sorted(more))}"


def _of_hosts(container: Fields) -> Iterator[str]:
    for port in container.get("ports") or []:
        if port.get("hostPort"):
            yield f"hostPort {port['hostPort']}"
    handlers = [container.get(name) for name in HANDLERS]
    for handler in [*handlers, *(container.get("lifecycle") or {}).values()]:
        for kind in ("httpGet", "tcpSocket"):
            if ((handler or {}).get(kind) or {}).get("host"):
                yield f"{kind} of a probe or hook names a host"
