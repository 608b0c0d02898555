"""`headlong serve`: a model behind the APIs of OpenAI and Anthropic, and a page to try it."""

import argparse
import gc
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import headlong
from headlong.cli import options, request
from headlong.errors import UserError
from headlong.settings import MAX_DEPTH, Settings

if TYPE_CHECKING:
    from headlong.server.serving import Serving

KEY_NAME = "HEADLONG_API_KEY"
SPECULATIVE_KEYS = ("method", "num_speculative_tokens")  # of vLLM's config, those that mean something here


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a model's folder or a hub name; default: nano, the small model that comes with headlong",
    )
    _add_server_arguments(parser.add_argument_group("server"))
    _add_limit_arguments(parser.add_argument_group("limits"))
    drafting = parser.add_argument_group("drafting, for requests that do not say (changes the speed, never the text)")
    kind = request.add_draft_arguments(drafting)
    kind.add_argument(
        "--enable-mtp", dest="draft_kind", action="store_const", const="mtp", help="same as --draft-kind mtp"
    )
    kind.add_argument(
        "--speculative-config",
        type=_speculative_config,
        metavar="JSON",
        help='vLLM\'s way to say the same: {"method": "mtp", "num_speculative_tokens": 3}',
    )
    machine = parser.add_argument_group("machine")
    options.add_machine_arguments(machine)
    options.add_rows_argument(machine, Settings.rows)
    loudness = parser.add_mutually_exclusive_group()
    loudness.add_argument("-v", "--verbose", action="store_true", help="tracebacks of faults")
    loudness.add_argument("-q", "--quiet", action="store_true", help="no line for each request")


def _add_server_arguments(group: argparse._ArgumentGroup) -> None:
    from headlong.server.serving import Serving

    group.add_argument(
        "--host", default=Serving.host, help="anywhere but on this machine a key is needed; default: %(default)s"
    )
    group.add_argument(
        "--port",
        type=options.whole,
        default=Serving.port,
        metavar="N",
        help="0: one that is free; default: %(default)s",
    )
    group.add_argument("--api-key", metavar="KEY", help=f"asked of every request; default: ${KEY_NAME}")
    group.add_argument(
        "--served-model-name",
        action="append",
        default=[],
        metavar="NAME",
        help="what clients may call the model; repeatable; default: its own name",
    )
    group.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="a web page's origin, such as https://example.org, that may use the server; repeatable; default: none",
    )
    group.add_argument(
        "--temperature",
        type=options.number,
        default=Serving.temperature,
        metavar="X",
        help="for requests that do not say; default: %(default)s, which is greedy",
    )


def _add_limit_arguments(group: argparse._ArgumentGroup) -> None:
    from headlong.server.serving import Serving

    group.add_argument(
        "--max-body",
        type=options.whole,
        default=Serving.max_body,
        metavar="N",
        help="bytes of a request; default: %(default)s",
    )
    group.add_argument(
        "--max-prompt",
        type=options.whole,
        default=Serving.max_prompt,
        metavar="N",
        help="tokens of a prompt; 0: as many as the context holds; default: %(default)s",
    )
    group.add_argument(
        "--max-concurrent",
        type=options.whole,
        default=Serving.max_concurrent,
        metavar="N",
        help="answers that run or wait; 0: rows and queue together; default: %(default)s",
    )
    group.add_argument(
        "--queue",
        type=options.whole,
        default=Settings.queue,
        metavar="N",
        help="answers that wait for a row; more are refused with 429; default: %(default)s",
    )
    group.add_argument(
        "--budget",
        type=options.whole,
        default=Settings.budget,
        metavar="N",
        help="prompt tokens between two rounds of answers under way: more bring prompts in sooner, fewer hold answers "
        "up less, down to one layer of a chunk on a CPU and to one chunk on a GPU; 0: chosen for you; default: "
        "%(default)s",
    )
    group.add_argument(
        "--request-timeout",
        type=options.number,
        default=Serving.request_s,
        metavar="SECONDS",
        help="an answer ends there with the text so far; 0: never; default: %(default)s",
    )


def run(args: argparse.Namespace) -> int:
    """Everything that can be refused is refused before the model is loaded."""
    from headlong.server.run import bind, serve

    _take_aliases(args)
    request.check(args)
    settings = replace(options.settings_of(args, args.rows), queue=args.queue, budget=args.budget)
    serving = _serving(args)
    with _log(args.quiet, args.verbose):
        bound = bind(serving)
        engine = headlong.load(args.model, require_draft=args.require_draft, **vars(settings))
        # What is there by now stays; to look through it for garbage would hold up every row for tens of milliseconds.
        gc.collect()
        gc.freeze()
        serve(engine, serving, bound)
    return 0


def _take_aliases(args: argparse.Namespace) -> None:
    """vLLM's flag as ours."""
    config = args.speculative_config or {}
    if "depth" in config and args.depth is not None:
        raise UserError("--depth and num_speculative_tokens mean the same; leave one out.")
    vars(args).update(config)


def _speculative_config(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error})") from None
    if not isinstance(config, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    strange = sorted(set(config) - set(SPECULATIVE_KEYS))
    if strange:
        raise argparse.ArgumentTypeError(f"{strange[0]!r} is not supported; give {' and '.join(SPECULATIVE_KEYS)}")
    method, count = config.get("method", "mtp"), config.get("num_speculative_tokens")
    kind = "mtp" if str(method).endswith("mtp") else method  # vLLM has one for each family, such as qwen3_next_mtp
    if kind not in ("mtp", "ngram"):
        raise argparse.ArgumentTypeError(f"method {method!r} is not supported; give mtp or ngram")
    if count is not None and (type(count) is not int or not 0 <= count <= MAX_DEPTH):
        raise argparse.ArgumentTypeError(f"num_speculative_tokens is {count!r}; it must be 0 to {MAX_DEPTH}")
    return {"draft_kind": kind, **({} if count is None else {"depth": count})}


def _serving(args: argparse.Namespace) -> "Serving":
    from headlong.server.serving import Serving

    if args.depth is not None and not 0 <= args.depth <= MAX_DEPTH:
        raise UserError(f"depth is {args.depth}; it must be auto or between 0 and {MAX_DEPTH}.")
    return Serving(
        host=args.host,
        port=args.port,
        api_key=args.api_key or os.environ.get(KEY_NAME, ""),
        names=tuple(args.served_model_name),
        cors_origins=tuple(args.cors_origin),
        max_body=args.max_body,
        max_prompt=args.max_prompt,
        max_concurrent=args.max_concurrent,
        request_s=args.request_timeout,
        depth=args.depth,
        temperature=args.temperature,
    )


@contextmanager
def _log(quiet: bool, verbose: bool) -> Iterator[None]:
    """The server's lines on standard error, each with its time; what broke too, in a line, or with -v at length."""
    lines, faults = logging.StreamHandler(), logging.StreamHandler()
    lines.setLevel(logging.WARNING if quiet else logging.INFO)
    faults.addFilter(lambda record: bool(record.exc_info) and not verbose)  # the door shows them with -v
    loggers = {"headlong.server": lines, "uvicorn.error": lines, "headlong": faults}
    for name, handler in loggers.items():
        handler.setFormatter(_Line(with_traces=verbose))
        logging.getLogger(name).addHandler(handler)
    logging.getLogger("headlong.server").setLevel(logging.INFO)
    logging.getLogger("headlong.server").propagate = False
    try:
        yield
    finally:
        for name, handler in loggers.items():
            logging.getLogger(name).removeHandler(handler)


class _Line(logging.Formatter):
    """One line a record; what went wrong by its name alone, unless traces are wanted."""

    def __init__(self, with_traces: bool) -> None:
        super().__init__("%(asctime)s %(message)s", "%H:%M:%S")
        self._with_traces = with_traces

    def format(self, record: logging.LogRecord) -> str:
        if record.exc_info and not self._with_traces:
            kind, error, _ = record.exc_info
            told = (
                f"{record.getMessage().strip()}: {kind.__name__ if kind else ''}: {error}; serve with -v to see where"
            )
            record = logging.makeLogRecord({"created": record.created, "msg": " ".join(told.split())})
        return super().format(record)
