"""Nothing that is secret stays in a text that is shown."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leeway.services.redaction import (
    MASK,
    is_secret_name,
    known_secrets,
    redacted,
    redacted_environment,
    redacted_values,
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no answer from redis://u:pw@h:1/0: gone", "no answer from redis://u:***@h:1/0: gone"),
        ("redis://:p@ss/w@h", "redis://:***@h"),
        ("http://x?password=abc&n=1", "http://x?password=***&n=1"),
        ("url=http://x?password=abc", "url=http://x?password=***"),
        ("https://0123456789abcdefghijk@host/x", "https://***@host/x"),
        ("-H 'Authorization: Bearer abcdefgh1'", "-H 'Authorization: *** ***'"),
        ("api_key = 'x y'", "api_key = '***'"),
        ('{"token": "abc", "n": 3}', '{"token": "***", "n": 3}'),
        (r'"{\"password\": \"abc\"}"', r'"{\"password\": \"***\"}"'),
        ("AWS_SECRET_ACCESS_KEY=abc", "AWS_SECRET_ACCESS_KEY=***"),
        (r'password = "ab\"cd" n = 1', 'password = "***" n = 1'),
        ('password = "cut off', "password = ***"),
        ("x --password hunter22 --api-key=k1 --port 3", "x --password *** --api-key=*** --port 3"),
        ("with sk-0123456789abcdefXYZ, hf_0123456789abcdefXYZ", "with ***, ***"),
        (
            '{"accessToken": "a", "clientSecret": "b"}',
            '{"accessToken": "***", "clientSecret": "***"}',
        ),
        ("requirepass abc", "requirepass ***"),
        ("user leeway on >abcdefgh ~leeway:* +get", "user leeway on >*** ~leeway:* +get"),
        (
            "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----",
            "-----BEGIN RSA PRIVATE KEY-----***-----END RSA PRIVATE KEY-----",
        ),
    ],
)
def test_what_has_the_form_of_a_secret_is_masked(text: str, shown: str):
    assert redacted(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "redis://host:6379/0",
        "stop_token = '</s>', num_tokens=5, prompt_tokens: 7",
        "see http://127.0.0.1:8000/v1/status",
        "step 3: reward=0.5 kl=0.1",
        "api.auth = false with api.host",
        "leeway train --resume runs/demo --json",
        "public_key = abc, cache_key: x",
        "hf_home task-sk-learn",
    ],
)
def test_what_is_no_secret_stays(text: str):
    assert redacted(text) == text


@given(
    st.text(min_size=6, max_size=30).filter(lambda text: MASK not in text and not text.isspace()),
    st.sampled_from([str, json.dumps, lambda text: quote(text, safe=""), repr]),
)
def test_a_known_secret_is_masked_in_every_form(secret: str, form):
    written = form(secret)
    assert written.strip("\"'") not in redacted(f"before <{written}> behind", [secret])


def test_the_longer_of_two_secrets_goes_first():
    assert redacted("x-abcdefgh-y", ["abcdef", "abcdefgh"]) == "x-***-y"


@pytest.mark.parametrize(
    ("name", "is_secret"),
    [
        ("WANDB_API_KEY", True),
        ("redis.password", True),
        ("LEEWAY_API_READ_TOKEN", True),
        ("OTEL_EXPORTER_OTLP_HEADERS", True),
        ("HF_TOKEN", True),
        ("REDISCLI_AUTH", True),
        ("PGPASSWORD", True),
        ("SSHPASS", True),
        ("OPENAI_KEY", True),
        ("AZURE_OPENAI_KEY", True),
        ("ENCRYPTION_KEY", True),
        ("GITHUB_PAT", True),
        ("NPM_CONFIG__AUTH", True),
        ("DOCKER_AUTH_CONFIG", True),
        ("SLACK_WEBHOOK_URL", True),
        ("accessToken", True),
        ("clientSecret", True),
        ("stopToken", False),
        ("primary_key", False),
        ("MONKEY", False),
        ("bypass", False),
        ("stop_token", False),
        ("num_tokens", False),
        ("PATH", False),
        ("a" * 100_000, False),
    ],
)
def test_names_tell_what_is_secret(name: str, is_secret: bool):
    assert is_secret_name(name) is is_secret


def test_values_keep_their_form():
    found = redacted_values({"api_key": "x", "urls": ["redis://:pw@h"], "n": 3, "secret": ""})
    assert found == {"api_key": "***", "urls": ["redis://:***@h"], "n": 3, "secret": ""}


def test_the_environment_is_shown_without_its_secrets():
    shown = redacted_environment(
        {"PATH": "/bin:hf_12345678", "HF_TOKEN": "hf_12345678", "MY_TEAM": "x", "EMPTY": ""}
    )
    assert shown == {
        "PATH": "/bin:***",
        "HF_TOKEN": "***",
        "MY_TEAM": "(set, not shown)",
        "EMPTY": "",
    }


def test_secrets_of_a_run_are_those_of_its_private_files_and_of_the_environment(tmp_path: Path):
    (tmp_path / "redis").mkdir()
    (tmp_path / "redis" / "redis.conf").write_text("port 1\nuser admin on >admin-password ~*\n")
    (tmp_path / "redis_url").write_text("redis://leeway:run%2Fpassword@127.0.0.1:1/0")
    (tmp_path / "api-tokens.json").write_text('{"read": "read-token", "control": "control-token"}')
    environment = {"OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20otlp-token", "X": "y"}
    wanted = {"admin-password", "run/password", "read-token", "control-token", "otlp-token"}
    assert wanted <= known_secrets(tmp_path, environment)
    assert known_secrets(tmp_path / "none", {"A_TOKEN": "short"}) == frozenset()
