"""Redis URLs: one server, a server behind Sentinel, or a cluster.

redis://[user:password@]host:6379/0                 rediss:// speaks TLS
unix://[user:password@]/path?db=0
redis+sentinel://[user:password@]host:26379,host:26379/MASTER/0        rediss+sentinel://
redis+cluster://[user:password@]host:6379,host:6379                    rediss+cluster://
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from leeway.replay.errors import ConfigurationError

Kind = Literal["server", "socket", "sentinel", "cluster"]

_SCHEMES: Final[dict[str, tuple[Kind, bool]]] = {
    "redis": ("server", False),
    "rediss": ("server", True),
    "unix": ("socket", False),
    "redis+sentinel": ("sentinel", False),
    "rediss+sentinel": ("sentinel", True),
    "redis+cluster": ("cluster", False),
    "rediss+cluster": ("cluster", True),
}
_FILES: Final = {"ssl_ca_certs", "ssl_certfile", "ssl_keyfile"}
_TLS_OPTIONS: Final = _FILES | {"ssl_cert_reqs", "ssl_check_hostname", "ssl_password"}
_SENTINEL_OPTIONS: Final = {"sentinel_username", "sentinel_password"}
_OPTIONS: Final = {"db", "username", "password", "client_name"}
_CERT_REQS: Final = ("required", "optional", "none")


class RedisUrl(NamedTuple):
    """What a URL says."""

    kind: Kind
    is_tls: bool
    hosts: tuple[tuple[str, int], ...]
    """Host and port of the servers, of the Sentinels or of nodes of the cluster; none for a
    socket"""
    path: str
    """Path of the socket, else empty"""
    master: str
    """Name of the master that the Sentinels watch, else empty"""
    db: int
    options: dict[str, Any]
    """Keyword arguments of a connection: user, password, TLS"""
    sentinel_options: dict[str, Any]
    """Keyword arguments of a connection to a Sentinel"""


def parse_url(url: str) -> RedisUrl:
    """The parts of a Redis URL. Raises ConfigurationError, which never shows the password."""
    try:
        return _parsed(url)
    except ValueError as error:
        raise ConfigurationError(f"replay.url is not a Redis URL: {error}") from None


def address(url: str) -> str:
    """Where a URL points, without its password: host:6379, /path, or host:1,host:2/MASTER."""
    try:
        parsed = parse_url(url)
    except ConfigurationError:
        return "the address in replay.url"
    hosts = ",".join(f"{host}:{port}" for host, port in parsed.hosts)
    return f"{hosts}/{parsed.master}" if parsed.master else hosts or parsed.path


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:  # its words would show the password
        raise ValueError("it cannot be read; percent-encode user and password") from None


def _parsed(url: str) -> RedisUrl:
    parts = _split(url)
    if parts.scheme not in _SCHEMES:
        raise ValueError(f"it must begin with one of {', '.join(f'{s}://' for s in _SCHEMES)}")
    kind, is_tls = _SCHEMES[parts.scheme]
    # Else what follows an unquoted / or ? in a password would be taken for a path and be shown.
    if kind != "socket" and "@" in parts.path + parts.query + parts.fragment:
        raise ValueError("write / ? # and @ inside a user or password as %2F %3F %23 and %40")
    login, _, places = parts.netloc.rpartition("@")
    query = _checked_query(parts, kind, is_tls)
    sentinel_options = {
        name.removeprefix("sentinel_"): query.pop(name) for name in _SENTINEL_OPTIONS & query.keys()
    }
    tls = {name: value for name, value in query.items() if name in _TLS_OPTIONS}
    master, db = _master_and_db(parts, kind, query.pop("db", None))
    hosts = () if kind == "socket" else _hosts(places, 26379 if kind == "sentinel" else 6379)
    if kind == "server" and len(hosts) > 1:
        raise ValueError(
            "several hosts are a redis+sentinel:// or a redis+cluster:// URL, not redis://"
        )
    path = unquote(parts.path) if kind == "socket" else ""
    if kind == "socket" and (places or not path):
        raise ValueError("a socket is unix:///path/of/the.sock, with three slashes")
    return RedisUrl(
        kind, is_tls, hosts, path, master, db, query | _login(login), tls | sentinel_options
    )


def _login(text: str) -> dict[str, str]:
    """user:password, each percent-encoded; either may be missing."""
    user, _, password = text.partition(":")
    named = {"username": unquote(user), "password": unquote(password)}
    return {name: value for name, value in named.items() if value}


def _hosts(text: str, default_port: int) -> tuple[tuple[str, int], ...]:
    """host:1,[::1]:2 -> (("host", 1), ("::1", 2))"""
    hosts: list[tuple[str, int]] = []
    for place in text.split(","):
        parts = _split(f"//{place}")
        try:
            port = parts.port
        except ValueError:  # its words would show what may be a part of a password
            raise ValueError("a port is a number below 65536, as in host:6379") from None
        if not parts.hostname:
            raise ValueError("it names no host; write redis://user:password@host:6379/0")
        hosts.append((parts.hostname, port or default_port))
    return tuple(hosts)


def _master_and_db(parts: SplitResult, kind: Kind, db_option: str | None) -> tuple[str, int]:
    """/0 -> ("", 0) and, for Sentinels, /MASTER/0 -> ("MASTER", 0)"""
    if kind == "socket":
        return "", _number(db_option or "0")
    path = [unquote(part) for part in parts.path.split("/") if part]
    master = ""
    if kind == "sentinel":
        if not path:
            raise ValueError(
                "Sentinels need the name of a master; write redis+sentinel://host:26379/MASTER/0"
            )
        master = path.pop(0)
    if len(path) > 1:
        raise ValueError(f"/{'/'.join(path)} is not a database number")
    db = _number(db_option or (path[0] if path else "0"))
    if kind == "cluster" and db:
        raise ValueError(f"a cluster has no database but 0; leave out the {db}")
    return master, db


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"{text!r} is not a database number, such as 0")
    return int(text)


def _checked_query(parts: SplitResult, kind: Kind, is_tls: bool) -> dict[str, Any]:
    """The options behind the question mark, all known and all useful."""
    query: dict[str, Any] = dict(parse_qsl(parts.query))
    known = _OPTIONS | _TLS_OPTIONS | _SENTINEL_OPTIONS
    for name, value in query.items():
        if name not in known:
            raise ValueError(f"the option {name} is none of {', '.join(sorted(known))}")
        if name in _TLS_OPTIONS and not is_tls:
            raise ValueError(f"{name} does nothing without TLS; write rediss instead of redis")
        if name in _SENTINEL_OPTIONS and kind != "sentinel":
            raise ValueError(f"{name} is for redis+sentinel:// and rediss+sentinel:// only")
        if name in _FILES and not Path(value).is_file():
            raise ValueError(f"{name} = {value} is not a file")
    if query.get("ssl_cert_reqs", "none") not in _CERT_REQS:
        raise ValueError(f"ssl_cert_reqs is one of {', '.join(_CERT_REQS)}")
    if "ssl_check_hostname" in query:
        query["ssl_check_hostname"] = query["ssl_check_hostname"].lower() not in (
            "0",
            "no",
            "false",
        )
    return query
