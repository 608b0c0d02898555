"""`headlong check`: what this machine has, which path every operation takes, and how fast its memory is."""

import argparse
import json
import sys
from typing import Any

from headlong.cli import machine, options
from headlong.engine.backend import examine_machine
from headlong.settings import Settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_machine_arguments(parser.add_argument_group("machine"))
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument("-v", "--verbose", action="store_true", help="tracebacks of faults")


def run(args: argparse.Namespace) -> int:
    settings = Settings(device=args.device, dtype=args.dtype, threads=args.threads, context=args.context)
    found = machine.describe() | examine_machine(settings)
    if args.json:
        sys.stdout.write(json.dumps(found, ensure_ascii=False) + "\n")
        return 0
    for name, value in _lines(found):
        sys.stdout.write(f"{name:<16} {value}\n")
    return 0


def _lines(found: dict[str, Any]) -> list[tuple[str, object]]:
    lines: list[tuple[str, object]] = [
        ("headlong", f"{found['headlong']}, Python {found['python']}, torch {found['torch']}"),
        ("machine", f"{found['cpu']}, {found['cores']} cores, {found['platform']}"),
        ("device", _device(found)),
    ]
    if "memory" in found:
        free, total = (found["memory"][name] / 1e9 for name in ("free_bytes", "total_bytes"))
        lines.append(("memory", f"{free:.1f} of {total:.1f} GB are free"))
    lines.append(("copies", f"{found['copy_bytes_per_s'] / 1e9:.0f} GB/s read and written"))
    return lines + list(found["paths"].items())


def _device(found: dict[str, Any]) -> str:
    threads = f", {found['threads']} threads" if found["device"] == "cpu" else f" ({found['device']})"
    return f"{found['name']}{threads} in {found['dtype']}"
