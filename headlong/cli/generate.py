"""`headlong generate`: write text from one prompt or many."""

import argparse
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import FrameType
from typing import TYPE_CHECKING

import headlong
from headlong.cli import options, show
from headlong.cli.prompts import decode, read_file
from headlong.engine.request import Output, Request, Sampling
from headlong.errors import DraftError, UserError
from headlong.settings import DRAFT_KINDS, MAX_DEPTH, Settings

if TYPE_CHECKING:
    from headlong.engine.engine import Engine

# The sampling flags, by field; type and default come from the field itself.
SAMPLING = {
    "temperature": "0 is greedy",
    "top_k": "keep the K likeliest tokens; 0 keeps all",
    "top_p": "keep the likeliest tokens that together reach P",
    "min_p": "keep tokens at least P times as likely as the likeliest",
    "xtc_probability": "chance to leave out the likeliest tokens but the last above the threshold",
    "xtc_threshold": "what counts as likely for --xtc-probability",
    "repetition_penalty": "divide the logits of tokens seen in prompt or output",
    "presence_penalty": "subtract from the logits of tokens in the output",
    "frequency_penalty": "subtract for every time a token is in the output",
    "seed": "the same seed gives the same text; default: a new text each time",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-m",
        "--model",
        help="a folder with config.json and safetensors files, or a hub name; "
        "default: nano, the small model that comes with headlong",
    )
    _add_prompt_arguments(parser.add_argument_group("prompt"))
    _add_text_arguments(parser.add_argument_group("text"))
    _add_draft_arguments(parser.add_argument_group("drafting (changes the speed, never the text)"))
    options.add_machine_arguments(parser.add_argument_group("machine"))
    parser.add_argument("--json", action="store_true", help="print one JSON object for each prompt instead of text")
    loudness = parser.add_mutually_exclusive_group()
    loudness.add_argument("-v", "--verbose", action="store_true", help="more figures, and tracebacks of faults")
    loudness.add_argument("-q", "--quiet", action="store_true", help="the text alone")


def _add_prompt_arguments(group: argparse._ArgumentGroup) -> None:
    source = group.add_mutually_exclusive_group()
    source.add_argument("-p", "--prompt", help="the prompt; - or nothing: standard input")
    source.add_argument("--prompts", metavar="FILE", help="a file with one prompt a line, run together")
    group.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    group.add_argument("--raw", action="store_true", help="the prompt as it is, without the model's chat template")


def _add_text_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "-n", "--max-tokens", type=options.whole, default=Request.max_tokens, metavar="N", help="default: %(default)s"
    )
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the model's end token")
    for name, meaning in SAMPLING.items():
        default = getattr(Sampling, name)
        flags = [f"--{name.replace('_', '-')}"] + ["--temp"] * (name == "temperature")
        group.add_argument(
            *flags,
            type=options.number if isinstance(default, float) else options.whole,
            default=default,
            metavar="X" if isinstance(default, float) else "N",
            help=meaning if default is None else f"{meaning}; default: {default}",
        )


def _add_draft_arguments(group: argparse._ArgumentGroup) -> None:
    kind = group.add_mutually_exclusive_group()
    shown = "{" + ",".join(DRAFT_KINDS) + "}"
    kind.add_argument("--draft-kind", default=Settings.draft_kind, metavar=shown, help="default: %(default)s")
    kind.add_argument("--mtp", dest="draft_kind", action="store_const", const="mtp", help="same as --draft-kind mtp")
    kind.add_argument(
        "--no-mtp", dest="draft_kind", action="store_const", const="none", help="same as --draft-kind none"
    )
    group.add_argument(
        "--depth",
        type=_depth,
        default=Request.depth,
        metavar=f"{{auto,0..{MAX_DEPTH}}}",
        help="tokens drafted in a round; default: auto",
    )
    group.add_argument("--require-draft", action="store_true", help="fail with exit code 3 if drafting cannot run")


def _depth(text: str) -> int | None:
    return None if text == "auto" else options.whole(text)


def run(args: argparse.Namespace) -> int:
    """Everything that can be refused is checked before the model is loaded."""
    _check(args)
    settings = Settings(
        device=args.device,
        dtype=args.dtype,
        context=args.context,
        draft_kind=args.draft_kind,
        threads=args.threads,
    )
    prompts = _read_prompts(args)
    requests = [_request(prompt, args) for prompt in prompts]
    started = time.perf_counter()
    with closing(headlong.load(args.model, require_draft=args.require_draft, **vars(settings))) as engine:
        load_s = time.perf_counter() - started
        if not args.raw:
            requests = [_as_chat(engine, request, args.system) for request in requests]
        view = _view(args, engine.name, load_s, prompts)
        started = time.perf_counter()
        outputs = _drive(engine, requests, view)
        seconds = time.perf_counter() - started
        if not args.json and not args.quiet:
            lines = [show.figures(outputs, seconds)]
            if args.verbose:
                lines.append(show.details(engine.name, load_s, engine.limits.device, outputs))
            show.write(show.open_console(stderr=True), "".join(f"{line}\n" for line in lines), show.ASIDE)
    if any(output.finish_reason == "cancelled" for output in outputs):
        raise KeyboardInterrupt  # all is shown; the door knows the exit code
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.model == "":
        raise UserError("the model's name is empty; name a folder or a hub name, or leave -m out.")
    if args.raw and args.system is not None:
        raise UserError("--system was given with --raw; a system message needs the chat template, leave one out.")
    if args.require_draft and (args.draft_kind == "none" or args.depth == 0):
        raise DraftError("--require-draft was given and drafting is turned off; leave one of the two out.")


def _read_prompts(args: argparse.Namespace) -> list[str]:
    if args.prompts is not None:
        lines = decode(read_file(Path(args.prompts)), args.prompts).split("\n")
        prompts = [line.rstrip("\r") for line in lines if line.strip()]
        if not prompts:
            raise UserError(f"{args.prompts} holds no prompt; write one on each line.")
        return prompts
    if args.prompt is not None and args.prompt != "-":
        prompt = decode(args.prompt.encode(errors="surrogateescape"), "the prompt")
    elif sys.stdin is None or (args.prompt is None and sys.stdin.isatty()):
        raise UserError("no prompt was given; give one with -p, with --prompts or on standard input.")
    else:
        prompt = decode(sys.stdin.buffer.read(), "standard input").removesuffix("\n")
    if not prompt.strip():
        raise UserError("the prompt is empty; give some text with -p or on standard input.")
    return [prompt]


def _request(prompt: str, args: argparse.Namespace) -> Request:
    return Request(
        prompt,
        max_tokens=args.max_tokens,
        sampling=Sampling(**{name: getattr(args, name) for name in SAMPLING}),
        stop=tuple(args.stop),
        depth=args.depth,
        ignore_eos=args.ignore_eos,
    )


def _as_chat(engine: "Engine", request: Request, system: str | None) -> Request:
    """The request with its prompt as a user's message; as it is when the model has no chat template."""
    if not engine.text.has_chat_template:
        if system is not None:
            raise UserError("--system was given and this model has no chat template; put it into the prompt.")
        return request
    messages = [{"role": "user", "content": str(request.prompt)}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return replace(request, prompt=engine.text.encode_chat(messages))


def _view(args: argparse.Namespace, model: str, load_s: float, prompts: Sequence[str]) -> show.View:
    if args.json:
        return show.Json(sys.stdout, model, load_s)
    console = show.open_console()
    return show.Live(console) if len(prompts) == 1 else show.Whole(console, prompts)


def _drive(engine: "Engine", requests: Sequence[Request], view: show.View) -> list[Output]:
    """Run the requests together; each answer is shown once it and those before it are complete."""
    indices = [engine.submit(request) for request in requests]
    running = set(indices)
    outputs: list[Output] = []

    def show_complete() -> None:
        while len(outputs) < len(indices) and indices[len(outputs)] not in running:
            output = engine.output(indices[len(outputs)])
            view.answer(len(outputs), output)
            outputs.append(output)

    with _ctrl_c_between_steps() as interrupted:
        while running and not interrupted.is_set():
            for emitted in engine.step():
                view.piece(emitted)
                if emitted.finish_reason is not None:
                    running.discard(emitted.index)
            show_complete()
    for index in running:
        engine.cancel(index)
    running.clear()
    show_complete()
    return outputs


@contextmanager
def _ctrl_c_between_steps() -> Iterator[Event]:
    """The first Ctrl-C sets the event, so that a step is never torn; the second ends at once."""
    pressed = Event()

    def press(number: int, frame: FrameType | None) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    before = signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
