"""`headlong generate`: write text from one prompt or many."""

import argparse
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import headlong
from headlong.cli import options, request, show, summary
from headlong.cli.drive import drive, refuse_faults
from headlong.cli.prompts import decode, read_file
from headlong.engine.intake import requests_from
from headlong.engine.request import MOST_LOGPROBS, Request
from headlong.errors import UserError
from headlong.settings import Settings

if TYPE_CHECKING:
    from headlong.engine.engine import Engine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-m",
        "--model",
        help="a folder with config.json and safetensors files, or a hub name; "
        "default: nano, the small model that comes with headlong",
    )
    _add_prompt_arguments(parser.add_argument_group("prompt"))
    request.add_arguments(parser)
    machine = parser.add_argument_group("machine")
    options.add_machine_arguments(machine)
    options.add_rows_argument(machine, Settings.rows)
    parser.add_argument("--json", action="store_true", help="print one JSON object for each answer instead of text")
    parser.add_argument(
        "--logprobs",
        type=options.whole,
        metavar="N",
        help=f"with --json, each token's logprob and those of the N likeliest, at most {MOST_LOGPROBS}",
    )
    loudness = parser.add_mutually_exclusive_group()
    loudness.add_argument("-v", "--verbose", action="store_true", help="more figures, and tracebacks of faults")
    loudness.add_argument("-q", "--quiet", action="store_true", help="the text alone")


def _add_prompt_arguments(group: argparse._ArgumentGroup) -> None:
    source = group.add_mutually_exclusive_group()
    source.add_argument("-p", "--prompt", help="the prompt; - or nothing: standard input")
    source.add_argument("--prompts", metavar="FILE", help="a file with one prompt a line, run together")
    group.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    group.add_argument("--raw", action="store_true", help="the prompt as it is, without the model's chat template")
    group.add_argument(
        "-N",
        "--completions",
        type=options.whole,
        default=1,
        metavar="N",
        help="answers to each prompt; seeds count up from --seed; default: %(default)s",
    )
    group.add_argument(
        "--prediction",
        type=options.text_or_file,
        metavar="TEXT|@FILE",
        help="a text that the answer is expected to resemble, such as a file that it edits",
    )


def run(args: argparse.Namespace) -> int:
    """Everything that can be refused is checked before the model is loaded."""
    _check(args)
    settings = options.settings_of(args, args.rows)
    asked = summary.Asked(_read_prompts(args), args.completions, args.depth, args.logprobs is not None)
    requests = requests_from(asked.prompts, options_of(args))
    settings = replace(settings, queue=max(settings.queue, len(requests)))
    started = time.perf_counter()
    with closing(headlong.load(args.model, require_draft=args.require_draft, **vars(settings))) as engine:
        load_s = time.perf_counter() - started
        if not args.raw:
            requests = [_as_chat(engine, one, args.system) for one in requests]
        view = _view(args, engine.name, load_s, asked)
        started = time.perf_counter()
        outputs = drive(engine, requests, view)
        seconds = time.perf_counter() - started
        if not args.json and not args.quiet:
            lines = [summary.figures(outputs, seconds, asked)]
            if args.verbose:
                lines += summary.details(engine.name, load_s, engine.limits.device, outputs)
            show.write(show.open_console(stderr=True), "".join(f"{line}\n" for line in lines), show.ASIDE)
    refuse_faults(outputs, args.verbose)
    if any(output.finish_reason == "cancelled" for output in outputs):
        raise KeyboardInterrupt  # all is shown; the door knows the exit code
    return 0


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    own = {"n": args.completions, "logprobs": args.logprobs, "prediction": args.prediction}
    return request.options_of(args) | own


def _check(args: argparse.Namespace) -> None:
    if args.model == "":
        raise UserError("the model's name is empty; name a folder or a hub name, or leave -m out.")
    if args.raw and args.system is not None:
        raise UserError("--system was given with --raw; a system message needs the chat template, leave one out.")
    request.check(args)
    if args.prediction is not None and not request.drafts(args):
        raise UserError("--prediction was given and drafting is turned off; leave one of the two out.")
    if args.logprobs is not None and not args.json:
        raise UserError("--logprobs was given without --json, which alone shows them; add it or leave them out.")


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


def _as_chat(engine: "Engine", one: Request, system: str | None) -> Request:
    """The request with its prompt as a user's message; as it is when the model has no chat template."""
    if not engine.text.has_chat_template:
        if system is not None:
            raise UserError("--system was given and this model has no chat template; put it into the prompt.")
        return one
    messages = [{"role": "user", "content": str(one.prompt)}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return replace(one, prompt=engine.text.encode_chat(messages))


def _view(args: argparse.Namespace, model: str, load_s: float, asked: summary.Asked) -> show.View:
    if args.json:
        return show.Json(sys.stdout, model, load_s, asked.logprobs)
    console = show.open_console()
    return show.Live(console) if asked.answers == 1 else show.Whole(console, asked)
