"""What a client asks for, whatever API it speaks, made into prompts and options of the engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headlong.engine import channels
from headlong.engine.engine import Engine
from headlong.engine.intake import longest_answer
from headlong.engine.template import ChatTemplate
from headlong.errors import UserError
from headlong.server.grammar import constraint_of
from headlong.server.reader import Reader
from headlong.server.serving import Serving
from headlong.server.tools import CALL_CLOSE, XML_MARK, Message, Tools, told_in_words

THINKING = "enable_thinking"  # what templates call it
RESERVED = {"messages", "add_generation_prompt", "tools"}  # of a template's names: not for clients to give


@dataclass(frozen=True)
class Asked:
    """One request of a client: a conversation or some prompts, and what the answers must be."""

    messages: Sequence[Message] | None = None
    prompts: Sequence[str | Sequence[int]] = ()
    tools: Tools | None = None
    schema: Mapping[str, Any] | None = None  # the answer must be JSON that fits it
    template: Mapping[str, Any] = field(default_factory=dict)  # for the chat template
    thinking: bool | None = None  # whether the model is to reason first; None: as it likes
    prefill: str = ""  # the beginning of the answer, which it goes on with
    max_tokens: int | None = None  # None: as many as there is room for
    options: Mapping[str, Any] = field(default_factory=dict)  # others of the engine's, where they were given
    user: str = ""

    @property
    def answers(self) -> int:
        prompts = 1 if self.messages is not None else len(self.prompts)
        return prompts * int(self.options.get("n", 1))


@dataclass(frozen=True)
class Ready:
    """A request that the engine can take."""

    prompts: list[list[int]]
    options: dict[str, Any]
    rendered: str | None = None  # the prompt of a conversation
    tools: Tools | None = None

    def readers(self) -> list[Reader]:
        count = len(self.prompts) * int(self.options.get("n", 1))
        return [Reader(choice, self.rendered, self.tools) for choice in range(count)]


def make_ready(asked: Asked, engine: Engine, serving: Serving) -> Ready:
    """Render, encode and check; takes a while with long prompts."""
    if asked.messages is None:
        prompts = [engine.text.encode(one) if isinstance(one, str) else list(one) for one in asked.prompts]
        return _sized(asked, Ready(prompts, dict(asked.options)), engine, serving)
    rendered, tools = render(asked, engine)
    options = {**asked.options, **constraint_of(asked.schema, tools, _thinks(rendered), engine.text)}
    if tools and not tools.parallel:
        options["stop"] = [*options.get("stop", ()), CALL_CLOSE]
    ready = Ready([engine.text.encode_rendered(rendered)], options, rendered, tools)
    return _sized(asked, ready, engine, serving)


def render(asked: Asked, engine: Engine) -> tuple[str, Tools | None]:
    """The prompt of a conversation, and its tools as this model takes them."""
    template, tools, messages = engine.text.chat_template, asked.tools, asked.messages or ()
    variables = _variables(asked, template)
    known = tools.known if tools else ()
    if "tools" not in template.names:
        messages = told_in_words(messages, known)
    elif known:
        variables["tools"] = [tool.told() for tool in known]
    rendered = template.render(messages, variables)
    if asked.prefill and _thinks(rendered):
        raise UserError("the answer was begun, and this model reasons before it answers; leave the last message out.")
    return rendered + asked.prefill, tools and replace(tools, as_xml=XML_MARK in template.source)


def _variables(asked: Asked, template: ChatTemplate) -> dict[str, Any]:
    strange = sorted(set(asked.template) - (template.names - RESERVED))
    if strange:
        raise UserError(f"the model's chat template does not ask for {', '.join(strange)}; leave that out.")
    if asked.thinking and THINKING not in template.names:
        raise UserError("this model's chat template cannot turn reasoning on; leave thinking out.")
    chosen = {} if asked.thinking is None or THINKING not in template.names else {THINKING: asked.thinking}
    return {**chosen, **asked.template}


def _thinks(rendered: str) -> bool:
    """Whether a prompt has opened the model's reasoning."""
    return rendered.rstrip().endswith(channels.OPENS)


def _sized(asked: Asked, ready: Ready, engine: Engine, serving: Serving) -> Ready:
    longest = max(map(len, ready.prompts))
    if serving.max_prompt and longest > serving.max_prompt:
        raise UserError(f"the prompt has {longest} tokens and may have {serving.max_prompt} here; shorten it.")
    room = max(1, longest_answer(longest, engine.limits))
    defaults = {"temperature": serving.temperature, "depth": serving.depth, "max_tokens": asked.max_tokens or room}
    if serving.request_s:
        defaults["deadline_s"] = serving.request_s
    return replace(ready, options={**defaults, **ready.options})
