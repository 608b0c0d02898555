"""The body of /v1/completions, and what it asks for."""

from typing import Annotated, Any

from pydantic import ConfigDict, Field

from headlong.server.asked import Asked
from headlong.server.openai.common import Prediction, Sampled, text_of
from headlong.server.refusal import Refusal

DEFAULT_TOKENS = 16  # as OpenAI has it
MOST_PROMPTS = 128

Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class CompletionBody(Sampled):
    """Text to go on with, as it is."""

    model_config = ConfigDict(title="CompletionRequest")

    prompt: (
        str
        | Ids
        | Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[list[Ids], Field(min_length=1, max_length=MOST_PROMPTS)]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    prediction: Prediction | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        given: Any = self.prompt
        return [given] if isinstance(given, str) or isinstance(given[0], int) else given

    def asked(self) -> Asked:
        options = self.options()
        if self.logprobs is not None:
            options["logprobs"] = self.logprobs
        if self.prediction is not None:
            options["prediction"] = text_of(self.prediction.content)
        asked = Asked(
            prompts=self.prompts,
            max_tokens=self.max_tokens or DEFAULT_TOKENS,
            options=options,
            user=self.user or "",
        )
        if asked.answers > MOST_PROMPTS:
            message = f"the prompts and n together ask for {asked.answers} answers; ask for at most {MOST_PROMPTS}."
            raise Refusal(400, message, "n")
        return asked
