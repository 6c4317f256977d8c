"""What the users of the chart's Redis may do: it starts as in the chart, and is asked as there."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest
import redis
import redis.exceptions

from leeway.replay.errors import ConfigurationError
from leeway.replay.run_board import RunBoard
from tests.helm.chart import parsed, template
from tests.helm.tools import FOLDER

from .local_processes import Place, Process, children_of, free_port, left_of
from .release import Release

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (FOLDER / "helm4").is_file(), reason="no Helm: `make helm-test` fetches it"
    ),
]


@pytest.fixture
def release(place: Place) -> Iterator[Release]:
    """The chart for CPUs; Redis runs."""
    found = Release(parsed(template(ci="cpu")), place)
    found.write_files()
    server = found.start("redis")
    place.until(lambda: answers(found), 60, server)
    yield found


def password(release: Release) -> str:
    return release.environment("learner")["LEEWAY_REDIS_PASSWORD"]


def client(release: Release, user: str) -> Any:
    port = release.port("redis", 6379)
    return redis.Redis(port=port, username=user, password=password(release))


def answers(release: Release) -> bool:
    try:
        return client(release, "leeway").ping()
    except redis.ConnectionError:
        return False


def test_nobody_comes_in_without_a_user_or_with_another_password(release: Release):
    port = release.port("redis", 6379)
    with pytest.raises(redis.AuthenticationError):
        redis.Redis(port=port).ping()
    with pytest.raises(redis.AuthenticationError):
        redis.Redis(port=port, password=password(release)).ping()
    with pytest.raises(redis.AuthenticationError):
        redis.Redis(port=port, username="leeway", password="another").ping()


@pytest.mark.parametrize(
    ("user", "refused"),
    [
        ("leeway", lambda c: c.config_set("appendonly", "no")),
        ("leeway", lambda c: c.flushall()),
        ("leeway", lambda c: c.get("RAYnamespace@KV")),
        ("leeway", lambda c: c.set("other", "x")),
        ("ray", lambda c: c.config_get("*")),
        ("ray", lambda c: c.flushall()),
        ("ray", lambda c: c.hgetall("leeway:{first}:board:sections")),
        ("ray", lambda c: c.eval("return 1", 0)),
    ],
)
def test_a_user_may_not_do_what_is_not_its_own(
    release: Release, user: str, refused: Callable[[Any], object]
):
    with pytest.raises(redis.exceptions.NoPermissionError):
        refused(client(release, user))


async def test_a_run_works_with_the_url_of_its_pods_and_not_as_ray(release: Release):
    url = release.environment("learner")["LEEWAY_REDIS_URL"]
    board = RunBoard(url, "first")
    assert await board.lead.take("me") == "me"
    await board.set_phase("training")
    assert await board.phase() == "training"
    await board.close()
    board = RunBoard(url.replace("leeway:", "ray:", 1), "first")
    with pytest.raises(ConfigurationError):
        await board.set_phase("training")
    await board.close()


@pytest.mark.ray
def test_a_new_head_of_ray_finds_the_cluster_again_and_its_state_can_be_cleared(
    release: Release, place: Place
):
    from ray._private.gcs_utils import cleanup_redis_storage

    as_ray = client(release, "ray")
    folder = tempfile.mkdtemp(prefix="r-", dir="/tmp")  # paths of sockets may have 107 characters
    try:
        session = started_session(release, place, folder)
        assert started_session(release, place, folder) == session
        assert as_ray.exists("RAYfirst@KV")
        cleanup_redis_storage(
            host="127.0.0.1",
            port=release.port("redis", 6379),
            username="ray",
            password=password(release),
            use_ssl=False,
            storage_namespace="first",
        )
        assert not as_ray.exists("RAYfirst@KV")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def started_session(release: Release, place: Place, folder: str) -> str:
    """The session of a head that starts as KubeRay lets it, and is killed when it answers."""
    dashboard = free_port()
    head = start_head(release, place, dashboard, folder)

    def healthy() -> bool:
        try:
            url = f"http://127.0.0.1:{dashboard}/api/gcs_healthz"
            return httpx.get(url, timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    place.until(healthy, 240, head)
    name = client(release, "ray").hget("RAYfirst@KV", "@namespace_session:session_name")
    processes = children_of(head)
    head.kill()
    for process in processes:  # as a container that is killed takes all with it
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    assert left_of(processes) == []
    return name.decode()


def start_head(release: Release, place: Place, dashboard: int, folder: str) -> Process:
    ports = {
        **{name: free_port() for name in ("port", "dashboard-agent-listen-port")},
        **{name: free_port() for name in ("dashboard-agent-grpc-port", "ray-client-server-port")},
        **{name: free_port() for name in ("runtime-env-agent-port", "metrics-export-port")},
        "dashboard-port": dashboard,
    }
    variables = {
        **release.environment("ray-head"),
        "RAY_REDIS_ADDRESS": f"127.0.0.1:{release.port('redis', 6379)}",
        "RAY_external_storage_namespace": "first",
        "RAY_raylet_start_wait_time_s": "200",  # of a busy machine; Ray's own bound is 60
    }
    return place.start(
        *("ray", "start", "--head", "--block", "--num-cpus=0", "--include-dashboard=true"),
        *("--redis-username=ray", f"--redis-password={password(release)}"),
        *(f"--{name}={port}" for name, port in ports.items()),
        *("--node-ip-address=127.0.0.1", "--object-store-memory=134217728"),
        *("--min-worker-port=0", "--max-worker-port=0", f"--temp-dir={folder}"),
        only=variables,
        log="ray-head",
    )
