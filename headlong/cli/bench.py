"""`headlong bench`: how fast a model decodes, plain and at every depth, and whether the text stays the same."""

import argparse
import json
import os
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import headlong
from headlong.cli import machine, options, page, plot, prompts, show, tables
from headlong.cli.result import Result
from headlong.cli.summary import count
from headlong.engine.bench import Bench, Case, Mode, Plan
from headlong.engine.figures import Report, report_of
from headlong.engine.request import Request, Sampling
from headlong.engine.scene import HEAD
from headlong.errors import Fault, UserError
from headlong.settings import MAX_DEPTH, Settings

if TYPE_CHECKING:
    from headlong.engine.engine import Engine

LIMIT = 3  # prompts of a set: the model that comes with headlong then takes a minute or two on two cores
TEMPERATURES = (0.0, 0.8)
LOG_WIDTH = 100  # columns where no terminal says how many it has

FILES = (
    "A file of prompts is named *.jsonl, with one JSON object a line (HumanEval and MT-Bench are such files), or has "
    "one prompt a line; either may be gzipped. Of an object the first of these fields counts: prompt or text, which "
    "are continued as they are; turns (its first), question or messages, which go through the model's chat template, "
    "as the lines of other files do."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = FILES
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a model's folder or a hub name; default: nano, the small model that comes with headlong",
    )
    _add_prompt_arguments(parser.add_argument_group("prompts"))
    _add_run_arguments(parser.add_argument_group("runs"))
    options.add_machine_arguments(parser.add_argument_group("machine"))
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json", action="store_true", help="the JSON line alone, and all of it (a terminal is given it in brief)"
    )
    output.add_argument("--html", metavar="FILE", type=Path, help="write a page with plots and tables")
    output.add_argument("--png", metavar="FILE", type=Path, help="write a picture; needs matplotlib")
    output.add_argument("-v", "--verbose", action="store_true", help="a table for each set, and tracebacks of faults")


def _add_prompt_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--sets",
        metavar="NAMES",
        help=f"of {','.join(prompts.SETS)}; default: all of them, or none with --prompts",
    )
    group.add_argument(
        "--prompts", metavar="FILE", type=Path, action="append", default=[], help="a file as a set; repeatable"
    )
    group.add_argument(
        "--limit",
        type=options.whole,
        default=LIMIT,
        metavar="N",
        help="prompts of each set, evenly spaced; 0: all; default: %(default)s",
    )


def _add_run_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--depths",
        type=options.depths,
        default=tuple(range(MAX_DEPTH + 1)),
        metavar="LIST",
        help=f"such as 0,1,4 or 0-4; plain decoding (0) always runs; default: 0-{MAX_DEPTH}",
    )
    group.add_argument(
        "-n", "--max-tokens", type=options.whole, default=Plan.max_tokens, metavar="N", help="default: %(default)s"
    )
    group.add_argument(
        "--temperature",
        "--temp",
        type=options.numbers,
        default=TEMPERATURES,
        metavar="LIST",
        help="0 is greedy; default: 0,0.8",
    )
    group.add_argument("--seed", type=options.whole, default=Plan.seed, metavar="N", help="default: %(default)s")
    group.add_argument(
        "--unseeded",
        action="store_true",
        help="sample without a seed too, where texts may differ and are not compared",
    )
    group.add_argument(
        "--repeat",
        type=options.whole,
        default=Plan.repeat,
        metavar="N",
        help="times each prompt runs; default: %(default)s",
    )


def run(args: argparse.Namespace) -> int:
    """Everything that can be refused is checked before the model is loaded."""
    _check(args)
    modes = _modes(args)
    sets = _sets(args)
    settings = _settings(args)
    with closing(headlong.load(args.model, **vars(settings))) as engine:
        started = time.perf_counter()
        bench = Bench(engine, _plan(args, engine, modes, sets))
        if args.png and not bench.plan.drafting:
            why = engine.limits.no_draft_reason or "no other depth was asked for"
            raise UserError(f"--png was given and plain decoding is all there is to draw ({why}); leave it out.")
        interrupted = not _drive(bench)
        result = Result(
            model=engine.name,
            device=engine.limits.device,
            machine=machine.describe(),
            plan=bench.plan,
            available={each.name: len(each.prompts) for each in sets},
            report=report_of(bench),
            no_draft_reason=engine.limits.no_draft_reason,
            peak_memory=machine.peak_memory(),
            seconds=time.perf_counter() - started,
            interrupted=interrupted,
        )
    _show(args, result)
    _refuse_differences(result.report)
    if interrupted:
        raise KeyboardInterrupt  # all is shown; the door knows the exit code
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.model == "":
        raise UserError("the model's name is empty; name a folder or a hub name, or leave it out.")
    for name in ("limit", "repeat"):
        least = 0 if name == "limit" else 1
        if getattr(args, name) < least:
            raise UserError(f"{name} is {getattr(args, name)}; it must be at least {least}.")
    Request((), max_tokens=args.max_tokens, sampling=Sampling(seed=args.seed))
    for path in (args.html, args.png):
        if path and not path.absolute().parent.is_dir():
            raise UserError(f"{path.parent} is not a folder; make it or write {path.name} elsewhere.")
        if path and os.path.isdir(path):
            raise UserError(f"{path} is a folder; name a file to write.")
    if args.png:
        plot.check()


def _settings(args: argparse.Namespace) -> Settings:
    """Every run prefills its own prompt, and nothing is kept in the pages that rounds are timed in."""
    return Settings(
        device=args.device,
        dtype=args.dtype,
        rows=1,
        context=args.context,
        memory_fraction=args.memory_fraction,
        prefix_bytes=0,
        threads=args.threads,
    )


def _modes(args: argparse.Namespace) -> tuple[Mode, ...]:
    for temperature in args.temperature:
        Sampling(temperature)
    modes = [Mode(temperature) for temperature in args.temperature]
    if args.unseeded:
        modes += [Mode(temperature, seeded=False) for temperature in args.temperature if temperature]
        if len(modes) == len(args.temperature):
            raise UserError("--unseeded was given and the temperature is 0 alone; name one above 0 or leave it out.")
    return tuple(modes)


def _sets(args: argparse.Namespace) -> list[prompts.PromptSet]:
    names = args.sets.split(",") if args.sets is not None else [] if args.prompts else prompts.SETS
    unknown = next((name for name in names if name not in prompts.SETS), None)
    if unknown is not None:
        raise UserError(f"{unknown!r} is not a set; name some of {', '.join(prompts.SETS)}, or a file with --prompts.")
    sets = [*map(prompts.built_in, names), *map(prompts.read_set, args.prompts)]
    prompts.check_names(sets)
    return sets


def _plan(args: argparse.Namespace, engine: "Engine", modes: tuple[Mode, ...], sets: list[prompts.PromptSet]) -> Plan:
    cases = [
        Case(each.name, place, tuple(_encode(engine, prompt)))
        for each in sets
        for place, prompt in each.pick(args.limit)
    ]
    deepest = engine.limits.depth if engine.limits.drafter == HEAD else 0
    depths = sorted({0, *(depth for depth in args.depths if depth <= deepest)})
    return Plan(tuple(cases), modes, tuple(depths), args.repeat, args.max_tokens, args.seed)


def _encode(engine: "Engine", prompt: prompts.Prompt) -> list[int]:
    """Messages as they are, one below the other, where the model has no chat template."""
    if isinstance(prompt, str):
        return engine.text.encode(prompt)
    if engine.text.has_chat_template:
        return engine.text.encode_chat(prompt)
    return engine.text.encode("\n\n".join(message["content"] for message in prompt))


def _drive(bench: Bench) -> bool:
    """Run it all behind a progress bar; false if Ctrl-C came first."""
    with show.progress(bench.steps) as advance:
        try:
            for name in bench.go():
                advance(name)
        except KeyboardInterrupt:
            return False
    return True


def _show(args: argparse.Namespace, result: Result) -> None:
    console = show.open_console(log_width=LOG_WIDTH)
    if not args.json:
        tables.show(console, result, every_set=args.verbose)
    # All of it would fill a terminal many times over.
    brief = console.is_terminal and not args.json
    sys.stdout.write(json.dumps(result.brief() if brief else result.record(), ensure_ascii=False) + "\n")
    sys.stdout.flush()
    try:
        if args.html:
            args.html.write_text(page.render(result), encoding="utf-8")
        if args.png and result.report.sections:
            plot.write(result, args.png)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be written ({error.strerror}); name another file.") from error


def _refuse_differences(report: Report) -> None:
    if not report.differences:
        return
    first, others = report.differences[0], len(report.differences) - 1
    where = f"prompt {first.case}, {first.mode}, {f'depth {first.depth}' if first.depth else 'plain again'}"
    more = f" ({others} more)" if others else ""
    raise Fault(
        f"{where} gave another text than plain decoding after {count(first.equal_tokens, 'equal token')}{more}, "
        "and they must be the same; report it with this command and the model's name."
    )
