"""Chat templates: where they are found, what they may use, how they fail."""

import json
import re

import pytest

from headlong.engine.template import ChatTemplate
from headlong.engine.text import Text
from headlong.errors import UserError
from tests.engine.conftest import END, byte_tokenizer

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
PLAIN = """{% for message in messages %}
    {{- message.role }}: {{ message.content }}
{% endfor %}
{% if add_generation_prompt %}
assistant:{% endif %}"""
RENDERED = "system: Be brief.\nuser: Hi\nassistant:"


def render(source, messages=MESSAGES, **tokens):
    return ChatTemplate(source, tokens).render(messages)


def folder_with(path, config=None, template=None):
    byte_tokenizer().save(str(path / "tokenizer.json"))
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return Text.from_folder(path)


@pytest.mark.parametrize(
    "where",
    [
        {"template": PLAIN},
        {"config": {"chat_template": PLAIN}},
        {"config": {"chat_template": "other"}, "template": PLAIN},
        {"config": {"chat_template": [{"name": "rag", "template": "x"}, {"name": "default", "template": PLAIN}]}},
    ],
)
def test_the_template_is_found(tmp_path, where):
    text = folder_with(tmp_path, **where)
    assert text.has_chat_template
    assert text.decode(text.encode_chat(MESSAGES)) == RENDERED


@pytest.mark.parametrize("config", [None, {}, {"chat_template": None}, {"chat_template": []}])
def test_without_a_template_a_chat_is_refused(tmp_path, config):
    text = folder_with(tmp_path, config)
    assert not text.has_chat_template
    with pytest.raises(UserError, match="has no chat template; use --raw"):
        text.encode_chat(MESSAGES)


def test_special_tokens_come_from_the_config_and_are_not_added_twice(tmp_path, end):
    text = folder_with(
        tmp_path, {"bos_token": {"content": END}, "eos_token": END, "pad_token": None}, "{{ bos_token }}a"
    )
    assert text.encode_chat(MESSAGES) == [end, *text.encode("a")]


def test_tojson_is_plain_json():
    assert render("{{ messages[0] | tojson }}", [{"a": "<é>"}]) == '{"a": "<é>"}'
    assert render("{{ messages[0] | tojson(indent=1) }}", [{"a": 1}]) == '{\n "a": 1\n}'


def test_the_date_and_loop_controls_are_there():
    assert re.fullmatch(r"\d{4}", render("{{ strftime_now('%Y') }}"))
    assert render("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}") == "system"


def test_a_template_can_refuse_messages():
    with pytest.raises(UserError, match="refuses these messages: no system message, please"):
        render("{{ raise_exception('no system message, please') }}")


def test_a_broken_template_is_refused():
    with pytest.raises(UserError, match="does not parse"):
        ChatTemplate("{% if %}", {})


def test_a_template_runs_in_a_sandbox():
    with pytest.raises(UserError, match="refuses these messages"):
        render("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(UserError, match="refuses these messages"):
        render("{{ messages.append(1) }}")


def test_a_config_that_is_not_json_is_refused(tmp_path):
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        Text.from_folder(tmp_path)


def test_a_template_tells_what_it_asks_for():
    template = ChatTemplate(
        "{{ bos_token }}{% for m in messages %}{{ m.role }}{% endfor %}{{ mood }}", {"bos_token": "<s>"}
    )
    assert template.names == {"bos_token", "messages", "mood"}
    assert template.render(MESSAGES, {"mood": "calm", "messages": ()}) == "<s>systemusercalm"
