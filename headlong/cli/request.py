"""The flags of a request, and the options they become."""

import argparse
from typing import Any

from headlong.cli import options
from headlong.engine.request import CONSTRAINTS, Request, Sampling
from headlong.errors import DraftError
from headlong.settings import DRAFT_KINDS, MAX_DEPTH, Settings

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
# Flags whose names are those of the options.
PLAIN = ("max_tokens", "min_tokens", "stop", "ignore_eos", "depth")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_text_arguments(parser.add_argument_group("text"))
    _add_constraint_arguments(parser.add_argument_group("what the text must be (one of these)"))
    add_draft_arguments(parser.add_argument_group("drafting (changes the speed, never the text)"))


def _add_text_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "-n", "--max-tokens", type=options.whole, default=Request.max_tokens, metavar="N", help="default: %(default)s"
    )
    group.add_argument(
        "--min-tokens",
        type=options.whole,
        default=Request.min_tokens,
        metavar="N",
        help="neither the model's end token nor a stop text ends it before; default: %(default)s",
    )
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the model's end token")
    group.add_argument(
        "--deadline", type=options.number, metavar="SECONDS", help="end there with the text so far; default: none"
    )
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


def _add_constraint_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--json-schema", type=options.text_or_file, metavar="TEXT|@FILE", help="JSON of this schema")
    group.add_argument("--regex", type=options.text, metavar="TEXT", help="a match of this regular expression, whole")
    group.add_argument(
        "--choice", type=options.text, action="append", metavar="TEXT", help="one of these texts; repeatable"
    )
    group.add_argument("--grammar", type=options.text_or_file, metavar="TEXT|@FILE", help="a text of this Lark grammar")


def add_draft_arguments(group: argparse._ArgumentGroup) -> argparse._MutuallyExclusiveGroup:
    """Gives the flags that choose the kind, of which one at most may be there."""
    kind = group.add_mutually_exclusive_group()
    shown = "{" + ",".join(DRAFT_KINDS) + "}"
    kind.add_argument(
        "--draft-kind",
        default=Settings.draft_kind,
        metavar=shown,
        help="auto: the model's head and n-grams of the text so far; default: %(default)s",
    )
    kind.add_argument("--mtp", dest="draft_kind", action="store_const", const="mtp", help="same as --draft-kind mtp")
    kind.add_argument(
        "--no-mtp", dest="draft_kind", action="store_const", const="none", help="same as --draft-kind none"
    )
    group.add_argument(
        "--depth",
        type=depth,
        default=Request.depth,
        metavar=f"{{auto,0..{MAX_DEPTH}}}",
        help="tokens drafted in a round; auto: as many as pay, found while it runs; default: auto",
    )
    group.add_argument("--require-draft", action="store_true", help="fail with exit code 3 if drafting cannot run")
    return kind


def depth(text: str) -> int | None:
    return None if text == "auto" else options.whole(text)


def drafts(args: argparse.Namespace) -> bool:
    """Whether drafting is wanted."""
    return bool(args.draft_kind != "none" and args.depth != 0)


def check(args: argparse.Namespace) -> None:
    """Refuse flags that would be ignored."""
    if args.require_draft and not drafts(args):
        raise DraftError("--require-draft was given and drafting is turned off; leave one of the two out.")


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """What the flags ask of every prompt, as `requests_from` takes it."""
    named = {name: getattr(args, name) for name in (*PLAIN, *CONSTRAINTS, *SAMPLING)}
    return {**named, "deadline_s": args.deadline}
