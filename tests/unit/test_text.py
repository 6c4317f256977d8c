"""Text from outside never becomes a control token, whatever it says and whatever the tokenizer."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from leeway.actors.config import bundled_dir
from leeway.actors.search.protocol import TAGS, render_observation
from leeway.actors.text import Text, compose, foreign
from leeway.actors.tokens import Tokens, write_byte_tokenizer

CONTROL = (
    *("</s>", "<s>", "[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>", "<eos>"),
    *("<|im_start|>", "<|im_end|>", "<|end|>", "<|eot_id|>", "<tool_call>", "((", "EOS"),
)


def special(text: str, **options: bool) -> AddedToken:
    return AddedToken(text, special=True, normalized=False, **options)


def byte_level(folder: Path) -> None:
    """Llama-3, Qwen, SmolLM: bytes, and special tokens beside them."""
    write_byte_tokenizer(folder, CONTROL)


def unigram(folder: Path) -> None:
    """T5, XLM-R: control pieces stand in the vocabulary itself, and text is made NFKC."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("<s>", 0.0), ("\u2581", -2.0)]
    letters = "abcdefghijklmnopqrstuvwxyz<>/|[]_()"
    tokenizer = Tokenizer(models.Unigram([*pieces, *((c, -3.0) for c in letters)], unk_id=0))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([special("</s>"), special("<s>"), special("[INST]")])
    write(folder, tokenizer, {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"})


def greedy(folder: Path) -> None:
    """Tokens that take the white space beside them, and one matched on normalised text."""
    write_byte_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.normalizer = normalizers.Lowercase()
    stripping = special("<mask>", lstrip=True, rstrip=True)
    tokenizer.add_special_tokens([stripping, special("</s>", single_word=True)])
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=True), AddedToken("  ")])
    write(folder, tokenizer, {"eos_token": {"content": "</s>"}})


def bundled(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((bundled_dir() / "model" / name).read_bytes())


def write(folder: Path, tokenizer: Tokenizer, names: dict[str, object]) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


KINDS: tuple[Callable[[Path], None], ...] = (byte_level, unigram, greedy, bundled)


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.__name__)
def tokens(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    folder = tmp_path_factory.mktemp("tokenizer")
    request.param(folder)
    return Tokens.load(folder)


signs = st.sampled_from(
    [*CONTROL, *TAGS, "<mask>", "<pad>", "<unk>", "<TOOL_CALL>", "\uff1c/s\uff1e", *"</|s>[(", " "]
)
hostile = st.lists(signs | st.text(max_size=3), max_size=8).map("".join)
own = st.sampled_from(
    ["", " ", "\n", "Doc 1: ", "<", "</", "<|", "[INST]", "</s>", "<information>"]
)
patient = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def control_in(tokens: Tokens, text: str) -> list[int]:
    return [i for i in tokens.encode(text) if i in tokens.facts.control_ids]


@patient
@given(text=hostile)
def test_no_control_token_comes_out_of_foreign_text(tokens: Tokens, text: str):
    assert control_in(tokens, foreign(text)) == []


@patient
@given(parts=st.lists(st.tuples(own, hostile), min_size=1, max_size=4))
def test_between_own_pieces_only_the_own_control_tokens_are_left(
    tokens: Tokens, parts: list[tuple[str, str]]
):
    mixed = compose(*(part for mine, outside in parts for part in (mine, foreign(outside))))
    assert len(control_in(tokens, mixed)) <= sum(len(control_in(tokens, m)) for m, _ in parts)


@patient
@given(passages=st.lists(st.tuples(hostile, hostile), max_size=3))
def test_an_observation_holds_the_control_tokens_of_its_frame_alone(
    tokens: Tokens, passages: list[tuple[str, str]]
):
    frame = render_observation([("", "")] * len(passages))
    assert control_in(tokens, render_observation(passages)) == control_in(tokens, frame)


@patient
@given(text=st.text(alphabet="abc xyz.,1\u00fc\n", max_size=40))
def test_harmless_text_is_encoded_as_if_it_were_our_own(tokens: Tokens, text: str):
    assert tokens.encode(foreign(text)) == tokens.encode(text)


def test_a_broken_control_token_shows_where_it_was(tmp_path: Path):
    byte_level(tmp_path)
    tokens = Tokens.load(tmp_path)
    text = compose("<s>", foreign("a </s> b [INST] c"), "</s>")
    assert tokens.decode(tokens.encode(text)) == "<s>a (/s> b (INST] c</s>"


def test_a_control_token_that_begins_with_a_bracket_is_broken_too(tmp_path: Path):
    # "((" cannot become "((": its first bracket goes.
    byte_level(tmp_path)
    tokens = Tokens.load(tmp_path)
    assert tokens.decode(tokens.encode(foreign("a((b"))) == "a(b"


def test_a_control_token_made_with_the_help_of_our_own_text_is_broken(tmp_path: Path):
    byte_level(tmp_path)
    tokens = Tokens.load(tmp_path)
    assert tokens.decode(tokens.encode(compose("<", foreign("/s>")))) == "<(s>"


def test_the_unknown_token_is_no_control_token(tmp_path: Path):
    unigram(tmp_path)
    tokens = Tokens.load(tmp_path)
    assert "<unk>" not in {tokens.decode([i]) for i in tokens.facts.control_ids}
    assert 0 in tokens.encode(foreign("\u6771"))


def test_added_words_and_spaces_are_text(tmp_path: Path):
    greedy(tmp_path)
    facts = Tokens.load(tmp_path).facts
    control = {text for text, i in facts.added_tokens.items() if i in facts.control_ids}
    assert control == {"<|endoftext|>", "<mask>", "</s>", "<tool_call>"}


# --- Text itself ---


def test_compose_marks_what_is_foreign_and_joins_what_touches():
    text = compose("ab", foreign("cd"), foreign("e"), "f", Text("gh", [(1, 2)]))
    assert (text, text.spans) == ("abcdefgh", ((2, 5), (7, 8)))


def test_adding_keeps_the_marks_on_either_side():
    assert ("ab" + foreign("c")).spans == ((2, 3),)
    assert (foreign("c") + "ab").spans == ((0, 1),)


def test_nothing_foreign_is_no_span():
    assert compose("a", foreign(""), "b").spans == ()


pieces = st.lists(st.tuples(st.text(max_size=4), st.booleans()), max_size=6)


@given(pieces)
def test_pieces_are_the_text_again(parts: list[tuple[str, bool]]):
    text = compose(*(foreign(part) if outside else part for part, outside in parts))
    assert "".join(part for part, _ in text.pieces()) == text
    assert "".join(p for p, outside in text.pieces() if outside) == "".join(
        p for p, outside in parts if outside
    )


@given(pieces, st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=3))
def test_defusing_never_touches_our_own_characters(
    parts: list[tuple[str, bool]], spans: list[tuple[int, int]]
):
    text = compose(*(foreign(part) if outside else part for part, outside in parts))
    changed = text.defused(spans)
    assert "".join(p for p, o in changed.pieces() if not o) == "".join(
        p for p, o in text.pieces() if not o
    )
