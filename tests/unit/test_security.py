"""What a configuration, a model folder and the user of a run in Redis may not do."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from leeway.actors.config import model_dir
from leeway.replay.errors import ConfigurationError
from leeway.replay.model_files import danger_in
from leeway.replay.redis_acl import CLIENT_COMMANDS, SCRIPT_COMMANDS, user_line
from leeway.services.config import load

ROOT = Path(__file__).parents[2]
CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path(__file__).with_name("ran").write_text("")
Path({marker!r}).write_text("")

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def model_with_code(tmp_path: Path) -> tuple[Path, Path]:
    """A model folder that names classes in a file beside it, and what that file leaves if run."""
    folder, marker = tmp_path / "model", tmp_path / "ran"
    shutil.copytree(model_dir("bundled"), folder)
    facts = json.loads((folder / "config.json").read_text())
    facts |= {
        "model_type": "own",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {
            "AutoConfig": "own.OwnConfig",
            "AutoModelForCausalLM": "own.OwnForCausalLM",
        },
    }
    (folder / "config.json").write_text(json.dumps(facts))
    (folder / "own.py").write_text(CODE.format(marker=str(marker)))
    return folder, marker


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigurationError) as raised:
        load(None, overrides)
    return str(raised.value)


def test_code_of_a_model_is_refused_unless_it_is_asked_for(model_with_code):
    folder, _ = model_with_code
    said = refusal(f"model={folder}")
    assert "auto_map in config.json" in said and "set policy.trust_remote_code = true" in said
    assert load(None, [f"model={folder}", "policy.trust_remote_code=true"])


def test_the_learner_runs_code_of_a_model_only_when_told(
    model_with_code, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from leeway.learner.model import load_model

    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder, marker = model_with_code
    with pytest.raises(ConfigurationError, match=r"policy\.trust_remote_code = true"):
        load_model(folder)
    assert not marker.exists()
    assert type(load_model(folder, trust_remote_code=True)).__name__ == "OwnForCausalLM"
    assert marker.exists()


def test_weights_in_a_pickle_are_refused_by_name(tmp_path: Path):
    folder = tmp_path / "model"
    shutil.copytree(model_dir("bundled"), folder)
    (weights,) = folder.glob("*.safetensors")
    weights.rename(folder / "pytorch_model.bin")
    said = refusal(f"model={folder}")
    assert "holds its weights as pickle (pytorch_model.bin)" in said and "safetensors" in said
    assert danger_in(folder, trusts_code=True) is not None


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("search.retriever_url=http://me:secret12@host", "search.retriever_url"),
        ("tracing.endpoint=http://c:4318/v1?token=secret12", "tracing.endpoint"),
    ],
)
def test_a_password_in_an_address_that_is_shown_is_refused(override: str, key: str):
    said = refusal(override)
    assert f"{key} holds a password" in said and "secret12" not in said


@pytest.mark.parametrize(
    "line", ['api_key = "secret12"', '[environment.options.a]\ntoken = "secret12"']
)
def test_a_secret_in_options_of_an_environment_is_refused(tmp_path: Path, line: str):
    file = tmp_path / "run.toml"
    file.write_text(f'[environment]\nfactory = "a.b:c"\n[environment.options]\n{line}\n')
    with pytest.raises(ConfigurationError, match="name an environment variable instead") as raised:
        load(file)
    assert "secret12" not in str(raised.value)
    file.write_text(
        '[environment]\nfactory = "a.b:c"\n'
        '[environment.options]\napi_key_variable = "MY_KEY"\nstop_token = "</s>"\nmax_tokens = 5\n'
    )
    assert load(file)


def test_an_api_without_tokens_is_for_this_machine_only():
    assert "lets everybody who reaches this machine control the run" in refusal(
        "api.auth=false", "api.host=0.0.0.0"
    )
    for allowed in (["api.auth=false"], ["api.auth=false", "api.host=::1"], ["api.host=0.0.0.0"]):
        assert load(None, allowed)


# --- the user of a run in Redis ---


def called_by_scripts() -> set[str]:
    """Commands that the Lua files call, by name or through the functions of base.lua."""
    texts = [path.read_text() for path in (ROOT / "replay" / "lua").glob("*.lua")]
    return {
        name.lower()
        for text in texts
        for name in re.findall(r"""(?:call|in_parts|read_parts)\([^'"\n]*['"]([A-Z]+)['"]""", text)
    }


def test_the_user_may_run_exactly_what_the_scripts_call():
    assert called_by_scripts() == set(SCRIPT_COMMANDS)


def test_the_line_names_no_family_of_commands_and_no_foreign_key():
    words = user_line("a-password-of-the-tests").split()
    assert [word for word in words if "@" in word] == ["-@all"]
    assert [word for word in words if word[0] == "~"] == ["~leeway:*"]
    allowed = {word[1:] for word in words if word[0] == "+"}
    assert allowed == {*SCRIPT_COMMANDS, *CLIENT_COMMANDS}
    assert not allowed & {
        "keys",
        "flushall",
        "flushdb",
        "config",
        "debug",
        "script",
        "acl",
        "client",
    }


@pytest.mark.parametrize(
    "password",
    [
        "short",
        "with a space in it",
        "line\nend-and-more-of-it",
        'a-"quote"-in-the-middle',
        "an-apostrophe's-password",
        "",
    ],
)
def test_a_password_that_would_end_its_word_is_refused(password: str):
    with pytest.raises(ConfigurationError, match="at least 16 printable ASCII"):
        user_line(password)


def test_the_page_on_security_shows_the_line_of_the_code():
    text = (ROOT / "docs" / "security.md").read_text()
    assert user_line("PASSWORD-OF-THE-RUN") in text


SENT_BY_THE_LIBRARY = {"select", "client|setname"}
"""For ?db= and ?client_name= of a URL."""


def test_every_command_of_the_line_is_asked_for():
    texts = [
        path.read_text()
        for part in ("replay", "services/soak", "services/doctor")
        for path in (ROOT / part).rglob("*.py")
        if path.name != "redis_acl.py"
    ]
    code = "\n".join(texts)
    ways = {"multi": "transaction=True", "exec": "transaction=True"}
    for command in set(CLIENT_COMMANDS) - SENT_BY_THE_LIBRARY:
        words = '", "'.join(command.upper().split("|"))
        found = f'("{words}"' in code or f".{command}(" in code
        assert found or ways.get(command, "-") in code, command


# --- dependencies ---


@pytest.mark.parametrize("file", sorted((ROOT / "requirements").rglob("*.txt")), ids=str)
def test_every_dependency_is_pinned_to_one_version(file: Path):
    text = file.read_text().replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines()]
    named = [line for line in lines if line and not line.startswith(("#", "-"))]
    assert named
    loose = [
        line for line in named if not re.match(r"[A-Za-z0-9._-]+(\[[^]]*\])?(==[^\s;]+| @ )", line)
    ]
    assert loose == []
