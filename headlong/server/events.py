"""What becomes of an answer on its way to a client, whatever API that speaks: text, tool calls, and its end."""

from dataclasses import dataclass

from headlong.engine.request import Logprob, Output

CONTENT, REASONING = "content", "reasoning"


@dataclass(frozen=True)
class Origin:
    """Some text, and where it came from."""

    text: str
    position: int  # in its round: 0 is the target's own token, n the n-th draft, accepted


@dataclass(frozen=True)
class Piece:
    """Some text of one answer, and the logprobs of the tokens that came with it, where they were asked for."""

    choice: int
    channel: str  # CONTENT or REASONING
    origins: tuple[Origin, ...] = ()
    logprobs: tuple[Logprob, ...] = ()

    @property
    def text(self) -> str:
        return "".join(origin.text for origin in self.origins)


@dataclass(frozen=True)
class Call:
    """One tool call, whole."""

    choice: int
    number: int  # in its answer, from 0
    id: str
    name: str
    arguments: str  # a JSON object
    logprobs: tuple[Logprob, ...] = ()


@dataclass(frozen=True)
class Finish:
    """One answer's end."""

    choice: int
    reason: str  # "stop", "length" or "tool_calls"
    output: Output
    reasoning_tokens: int = 0


Event = Piece | Call | Finish
