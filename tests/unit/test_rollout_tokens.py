"""Tokens and the scripted policy."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from leeway.actors.failures import EngineError
from leeway.actors.policy import CompletionRequest
from leeway.actors.scripted_policy import ScriptedPolicy
from leeway.actors.search.protocol import TAGS
from leeway.actors.tokens import EOS, Tokens, write_byte_tokenizer
from leeway.replay.errors import ConfigurationError


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    write_byte_tokenizer(tmp_path, TAGS)
    return Tokens.load(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "plain", " <think>a b</think>\n\n", "Zürich 東京 🙂", f"x{EOS}"]
)
def test_decoding_gives_back_what_was_encoded(tokens: Tokens, text: str):
    assert tokens.decode(tokens.encode(text)) == text


def test_a_tag_is_one_token_and_a_byte_is_one_token(tokens: Tokens):
    assert len(tokens.encode("<think>ab</think>")) == 4
    assert len(tokens.encode("ü")) == 2


def test_the_vocabulary_counts_bytes_tags_and_the_end_of_sequence(tokens: Tokens):
    assert tokens.vocab_size == 256 + 8 + 1
    assert tokens.encode(EOS) == [tokens.eos_id]


def test_an_end_of_sequence_token_may_be_a_table(tmp_path: Path):
    write_byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": EOS}}))
    assert Tokens.load(tmp_path).eos_id == 256


def test_a_folder_without_an_end_of_sequence_token_has_none(tmp_path: Path):
    write_byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert Tokens.load(tmp_path).eos_id is None


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path):
    with pytest.raises(ConfigurationError, match="holds no tokenizer"):
        Tokens.load(tmp_path)


def test_an_unknown_end_of_sequence_token_is_refused(tmp_path: Path):
    write_byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    with pytest.raises(ConfigurationError, match=r"'<eos>' is not in tokenizer\.json"):
        Tokens.load(tmp_path)


def test_a_folder_without_tokenizer_json_is_read_by_transformers(tmp_path: Path):
    letters = ["a", "b", "c", "Ġ", "ab", "<eos>"]
    (tmp_path / "vocab.json").write_text(json.dumps({text: i for i, text in enumerate(letters)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    settings = {
        "tokenizer_class": "GPT2Tokenizer",
        "eos_token": "<eos>",
        "unk_token": "<eos>",
        "bos_token": "<eos>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    tokens = Tokens.load(tmp_path)
    assert tokens.encode("ab c") == [4, 3, 2]
    assert tokens.decode([4, 3, 2, 5]) == "ab c<eos>"
    assert (tokens.eos_id, tokens.vocab_size) == (5, 6)


def test_a_worker_imports_no_model_library():
    heavy = "{'torch', 'transformers', 'vllm', 'ray'}"
    code = (
        "import sys, leeway.actors.worker, leeway.actors.search.environment,"
        f" leeway.actors.scripted_policy; print({heavy} & set(sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"


def request(tokens: Tokens, text: str, **changes: object) -> CompletionRequest:
    fields: dict[str, object] = {
        "request_id": "r",
        "prompt_ids": tokens.encode(text),
        "max_tokens": 100,
    }
    return CompletionRequest(**{**fields, **changes})  # type: ignore[arg-type]


async def test_a_table_answers_by_the_longest_key_the_prompt_ends_with(tokens: Tokens):
    policy = ScriptedPolicy(tokens, {"": "any", "b": "short", "ab": "long"})
    for prompt, text in (("xab", "long"), ("xb", "short"), ("x", "any")):
        completion = await policy.complete(request(tokens, prompt))
        assert tokens.decode(completion.token_ids) == text + EOS


async def test_a_prompt_the_table_does_not_know_is_an_engine_error(tokens: Tokens):
    with pytest.raises(EngineError, match="no line for a prompt that ends in 'xyz'"):
        await ScriptedPolicy(tokens, {"a": "b"}).complete(request(tokens, "xyz"))


async def test_a_version_set_during_a_request_tags_its_later_tokens(tokens: Tokens):
    policy = ScriptedPolicy(tokens, {"": "0123456789"}, version=1, token_delay_s=0.01)
    running = asyncio.create_task(policy.complete(request(tokens, "x")))
    await asyncio.sleep(0.045)
    policy.set_version(2)
    versions = (await running).versions
    assert versions == sorted(versions)
    assert set(versions) == {1, 2}


async def test_the_context_length_cuts_a_completion(tokens: Tokens):
    policy = ScriptedPolicy(tokens, {"": "0123456789"}, max_model_len=8)
    completion = await policy.complete(request(tokens, "abcde"))
    assert (tokens.decode(completion.token_ids), completion.finish) == ("012", "length")


async def test_a_closed_policy_refuses(tokens: Tokens):
    policy = ScriptedPolicy(tokens, {"": "x"})
    await policy.close()
    with pytest.raises(EngineError, match="closed"):
        await policy.complete(request(tokens, "x"))
