"""headlong inspect: what is in a model, whether it is whole, and what running it takes."""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from headlong.checkpoint.find import DEFAULT

if TYPE_CHECKING:
    from headlong.checkpoint.inspect import Parameters, Report

SHOWN = 10  # names of a list that are shown before "and N more"
UNITS = (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3))
SIZES = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default=DEFAULT,
        help="a model's folder, or a Hugging Face id such as org/name; "
        "default: %(default)s, the small model that comes with headlong",
    )
    parser.add_argument("--json", action="store_true", help="write the report as JSON")


def run(args: argparse.Namespace) -> int:
    from headlong.checkpoint.checkpoint import open_checkpoint
    from headlong.checkpoint.inspect import inspect

    report = inspect(open_checkpoint(args.model))
    if args.json:
        sys.stdout.write(json.dumps(_as_json(report), indent=2) + "\n")
    else:
        _show(report)
    return 0


def _as_json(report: "Report") -> dict[str, object]:
    content = asdict(report)
    content["parameters"]["total"] = report.parameters.total
    return content | {"whole": report.whole}


def _show(report: "Report") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in _rows(report):
        table.add_row(label, Text(text))
    Console().print(table)


def _rows(report: "Report") -> Iterator[tuple[str, str]]:
    yield "model", report.name
    if report.folder != report.name:
        yield "folder", report.folder
    yield "type", f"{report.model_type} (family {report.family})"
    yield "layers", _layers(report)
    yield "context", f"{report.context:,} tokens, vocabulary {report.vocab:,}"
    yield "parameters", _parameters(report.parameters)
    yield "stored as", _storage(report)
    yield "on disk", f"{_size(report.disk_bytes)}, norms {report.norms or 'unknown'}"
    for device, memory in report.memory.items():
        each = f"{_size(memory.state_per_sequence)} a sequence and {_size(memory.kv_per_token)} a token"
        yield f"on {device}", f"{_size(memory.weights)} of weights, {each}"
    yield from _head(report)
    if report.skipped:
        yield "not needed", ", ".join(f"{count} {kind}" for kind, count in report.skipped.items())
    yield from _names("missing", report.missing)
    yield from _names("unreadable", report.faulty)
    yield from _names("left over", report.leftover)
    yield "trunk", "whole" if report.whole else "cannot be run as it is"


def _head(report: "Report") -> Iterator[tuple[str, str]]:
    head = report.head
    if head.tensors:
        yield "MTP head", f"{head.tensors} tensors, {_amount(head.parameters)} parameters, in {head.where}"
        yield "its norms", head.convention or "unknown"
    yield "MTP", "can run" if head.found else f"cannot run: {head.reason}"
    yield from _names("missing in it", head.missing)


def _layers(report: "Report") -> str:
    kinds = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in report.layers.items())
    experts = f"; {report.experts} experts, {report.experts_per_token} a token" if report.experts else ""
    return f"{sum(report.layers.values())}: {kinds}{experts}"


def _parameters(parameters: "Parameters") -> str:
    parts = {"embedding": parameters.embedding, "layers": parameters.layers, "experts": parameters.experts}
    parts |= {"LM head": parameters.lm_head, "MTP head": parameters.mtp_head, "active a token": parameters.active}
    told = ", ".join(f"{label} {_amount(count)}" for label, count in parts.items() if count)
    return f"{_amount(parameters.total)}: {told}"


def _storage(report: "Report") -> str:
    if len(report.storage) < 2:
        return next(iter(report.storage), "unknown")
    total = sum(report.storage.values())
    return "; ".join(f"{kind}: {count / total:.1%}" for kind, count in report.storage.items())


def _names(label: str, names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    if names:
        more = f"\nand {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        yield label, "\n".join(names[:SHOWN]) + more


def _amount(count: int) -> str:
    for unit, size in UNITS:
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return str(count)


def _size(count: int) -> str:
    for unit, size in SIZES:
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
