"""What OpenAI's APIs have in common: fields of a request, and how they become options."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from headlong.server.refusal import Refusal
from headlong.server.wire import Wire

MOST_STOPS = 16
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "xtc_probability",
    "xtc_threshold",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "n",
    "min_tokens",
    "ignore_eos",
)


class StreamOptions(Wire):
    include_usage: bool = False
    include_origins: bool = False  # Headlong's: where every piece of text came from


class Speculative(Wire):
    """Headlong's: how drafts are made for this request. It changes the speed, never the text."""

    kind: Literal["auto", "mtp", "ngram", "prediction", "none"] = "auto"
    depth: Annotated[int, Field(ge=0, le=8)] | Literal["auto"] = "auto"

    def options(self) -> dict[str, Any]:
        depth = None if self.depth == "auto" else self.depth
        return {"draft_kind": self.kind, **({"depth": depth} if "depth" in self.model_fields_set else {})}


class TextPart(Wire):
    type: Literal["text"]
    text: str


def _only_text(content: Any) -> Any:
    """Refuse pictures and the like in a sentence, before pydantic tries one kind after the other."""
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ValueError(f"holds a part of type {kind!r}; this server takes text alone.")
    return content


Content = Annotated[str | list[TextPart], BeforeValidator(_only_text)]


def text_of(content: str | list[TextPart] | None) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


class Prediction(Wire):
    """A text that the answer is expected to resemble."""

    type: Literal["content"]
    content: Content


class Sampled(Wire):
    """Fields that say how tokens are chosen and when a text ends."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    seed: int | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    speculative: Speculative | None = None

    @property
    def told(self) -> StreamOptions:
        return self.stream_options or StreamOptions()

    def options(self) -> dict[str, Any]:
        """Those of the engine's options that were given."""
        if self.stream_options and not self.stream:
            raise Refusal(400, "stream_options is for streams; set stream or leave it out.", "stream_options")
        options = {name: value for name in SAMPLING if (value := getattr(self, name)) is not None}
        if self.stop is not None:
            options["stop"] = [self.stop] if isinstance(self.stop, str) else self.stop
        if self.logit_bias:
            options["logit_bias"] = {_token(key): bias for key, bias in self.logit_bias.items()}
        return options | (self.speculative.options() if self.speculative else {})


def _token(key: str) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) < 10):
        raise Refusal(400, f"logit_bias has {key!r}; its keys must be token ids.", "logit_bias")
    return int(key)
