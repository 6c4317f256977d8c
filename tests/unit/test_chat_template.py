"""Chat templates: rendered as transformers renders them, with outside text out of their reach."""

import json
from pathlib import Path

import pytest

from leeway.actors.chat_template import ChatMessage, ChatTemplate
from leeway.actors.text import Text, compose, foreign
from leeway.actors.tokenizer_facts import TokenizerFacts
from leeway.actors.tokens import EOS, Tokens, write_byte_tokenizer
from leeway.replay.errors import ConfigurationError

CHATML = """\
{%- if messages[0]['role'] != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{% for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
HEADERS = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start|>system<|header|>\\n\\n" + system + "<|eot|>" }}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant'] %}{% continue %}{% endif %}
    {{- '<|start|>' + message['role'] + '<|header|>\\n\\n'
        + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|header|>\\n\\n' }}{%- endif %}"""
INST = """\
{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}
{{ ' ' + message['content'] + eos_token }}
{% else %}
{{ raise_exception('Only user and assistant roles are supported!') }}
{% endif %}
{% endfor %}"""
TURNS = """\
{{ bos_token }}
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception("Roles must alternate user/assistant") }}
{%- endif %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
REASONING = """\
{%- set ns = namespace(last=0) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- macro head(role) %}<|im_start|>{{ role }}
{% endmacro %}
{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- for message in messages %}
{{- head(message.role) }}
{%- if message.role == 'assistant' %}
{%- generation %}
{%- set content = message.content %}
{%- if loop.index0 < ns.last %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- content + '<|im_end|>' }}
{%- endgeneration %}
{%- else %}
{{- message.content + '<|im_end|>\\n' + ({'n': message.content | length > 0} | tojson) }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"""
TEMPLATES = {
    "chatml": CHATML,
    "headers": HEADERS,
    "inst": INST,
    "turns": TURNS,
    "reasoning": REASONING,
}
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": EOS}
USER = ("user", "Answer the question.\nQuestion: Wer war's, \u00dcnal <b>&amp;</b> \u6771\u4eac?\n")
SYSTEM = ("system", "Be careful.")


def facts(template: str | None, *end_tokens: str) -> TokenizerFacts:
    return TokenizerFacts(chat_template=template, named_tokens=NAMED, end_tokens=end_tokens)


def messages(*parts: tuple[str, str]) -> list[ChatMessage]:
    return [ChatMessage(role, Text(content)) for role, content in parts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_byte_tokenizer(folder, ("<s>", "</s>"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMED}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


CONVERSATIONS = [
    *((name, (USER,)) for name in TEMPLATES),
    *((name, (SYSTEM, USER)) for name in TEMPLATES if name not in ("inst", "turns")),
]


@pytest.mark.parametrize(("name", "parts"), CONVERSATIONS)
@pytest.mark.parametrize("outside", [False, True], ids=["own", "foreign"])
def test_a_conversation_is_rendered_as_transformers_renders_it(
    folder: Path, name: str, parts: tuple[tuple[str, str], ...], outside: bool
):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        [{"role": role, "content": content} for role, content in parts],
        chat_template=TEMPLATES[name],
        tokenize=False,
        add_generation_prompt=True,
    )
    make = foreign if outside else Text
    ours = ChatTemplate(facts(TEMPLATES[name])).render(
        [ChatMessage(role, make(content)) for role, content in parts]
    )
    assert ours == theirs


def test_outside_text_is_marked_and_what_the_template_writes_is_not():
    content = compose("Question: ", foreign("</s>?"))
    rendered = ChatTemplate(facts(INST)).render([ChatMessage("user", content)])
    assert rendered == "<s>[INST] Question: </s>? [/INST]\n"
    assert [rendered[a:b] for a, b in rendered.spans] == ["</s>?"]


def test_a_template_cannot_cut_outside_text():
    cutting = "{{ messages[0].content.split('</think>')[-1] }}"
    rendered = ChatTemplate(facts(cutting)).render([ChatMessage("user", foreign("a</think>b"))])
    assert rendered == "a</think>b"


def test_outside_text_may_look_like_its_own_placeholder():
    content = compose(foreign("\ue0001\ue001"), " and ", foreign("b"))
    rendered = ChatTemplate(facts("{{ messages[0].content }}")).render(
        [ChatMessage("user", content)]
    )
    assert rendered == "\ue0001\ue001 and b"


def test_a_refusal_of_the_template_is_told_in_one_sentence():
    with pytest.raises(ConfigurationError) as raised:
        ChatTemplate(facts(INST)).render(messages(SYSTEM, USER))
    assert "the roles system, user: Only user and assistant roles" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_template_that_leaves_the_question_out_is_refused():
    with pytest.raises(ConfigurationError, match="leaves out part of a message"):
        ChatTemplate(facts("{{ bos_token }}")).render([ChatMessage("user", foreign("Who?"))])


def test_a_template_that_cannot_be_read_is_refused():
    with pytest.raises(ConfigurationError, match="cannot be read: "):
        ChatTemplate(facts("{% for %}"))


def test_a_model_without_a_template_is_refused():
    with pytest.raises(ConfigurationError, match="the model has no chat template"):
        ChatTemplate(facts(None))


def test_a_template_cannot_reach_the_program():
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ConfigurationError, match="refuses messages"):
        ChatTemplate(facts(escape)).render(messages(USER))


@pytest.mark.parametrize(
    ("template", "end_tokens", "is_chat"),
    [
        (CHATML, ("<|im_end|>",), True),
        # a base model with the template of its family
        (CHATML, ("<|endoftext|>",), False),
        (INST, ("</s>",), True),
        # generation_config.json names the second one
        (TURNS, ("<eos>", "<end_of_turn>"), True),
        (TURNS, ("<eos>",), False),
        (CHATML, (), False),
    ],
)
def test_a_chat_model_ends_a_reply_with_its_end_token(template: str, end_tokens, is_chat: bool):
    assert ChatTemplate(facts(template, *end_tokens)).ends_with_end_token() is is_chat


def test_a_reply_may_begin_within_a_thought():
    assert ChatTemplate(facts(REASONING)).opens_thought()
    assert not ChatTemplate(facts(CHATML)).opens_thought()


# --- what a model folder says ---


def read(folder: Path, **files: object) -> TokenizerFacts:
    write_byte_tokenizer(folder, ("<s>", "</s>"))
    for name, content in files.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps(content))
    return Tokens.load(folder).facts


def test_the_template_is_read_from_the_settings(tmp_path: Path):
    settings = {"eos_token": "</s>", "chat_template": CHATML}
    assert read(tmp_path, tokenizer_config=settings).chat_template == CHATML


def test_of_several_templates_the_default_one_is_taken(tmp_path: Path):
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}]
    assert read(tmp_path, tokenizer_config={"chat_template": several}).chat_template == "y"


def test_a_template_file_wins_over_the_settings(tmp_path: Path):
    (tmp_path / "chat_template.jinja").write_text("z")
    assert read(tmp_path, tokenizer_config={"chat_template": "y"}).chat_template == "z"


def test_a_folder_without_a_template_has_none(tmp_path: Path):
    assert read(tmp_path).chat_template is None


def test_end_tokens_are_the_tokenizers_and_those_of_generation(tmp_path: Path):
    found = read(
        tmp_path,
        tokenizer_config={"eos_token": {"content": "</s>"}, "bos_token": "<s>"},
        generation_config={"eos_token_id": [257, 258]},
    )
    # 256 bytes, then <s> 256, </s> 257, <|endoftext|> 258
    assert found.end_tokens == ("</s>", EOS)
    assert found.named_tokens == {"eos_token": "</s>", "bos_token": "<s>"}


def test_the_beginning_of_a_text_is_what_the_tokenizer_puts_before_it(tmp_path: Path):
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    assert read(tmp_path).begin == ""
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 256), ("</s>", 257)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert Tokens.load(tmp_path).facts.begin == "<s>"
    assert Tokens.load(tmp_path).encode("a") == [tokenizer.token_to_id("a")]


def test_a_settings_file_that_is_no_json_is_named(tmp_path: Path):
    write_byte_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"generation_config\.json is no JSON"):
        Tokens.load(tmp_path)
