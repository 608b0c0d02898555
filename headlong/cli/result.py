"""What a bench found, with all that is needed to show it: as tables, a page, a picture or one JSON object."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from headlong.cli.machine import about
from headlong.engine.bench import Plan
from headlong.engine.figures import Report, Section


@dataclass(frozen=True)
class Result:
    model: str
    device: str
    machine: Mapping[str, str | int]
    plan: Plan
    available: Mapping[str, int]  # prompts in each set, run or not
    report: Report
    no_draft_reason: str
    peak_memory: int | None  # bytes
    seconds: float
    interrupted: bool

    def record(self) -> dict[str, Any]:
        """What --json prints."""
        report, plan = self.report, self.plan
        content = {
            "model": self.model,
            "device": self.device,
            "machine": dict(self.machine),
            "settings": {
                "depths": plan.depths,
                "max_tokens": plan.max_tokens,
                "repeat": plan.repeat,
                "seed": plan.seed,
                "prompts": dict(report.prompts),
            },
            "samplings": [_section(section) for section in report.sections],
            "no_draft_reason": self.no_draft_reason,
            "same_text": not report.differences if report.compared else None,
            "compared": report.compared,
            "differences": [asdict(one) for one in report.differences],
            "prefill_tps": report.prefill_tps,
            "peak_memory": self.peak_memory,
            "seconds": self.seconds,
            "interrupted": self.interrupted,
        }
        return {name: _brief(value) for name, value in content.items()}

    def brief(self) -> dict[str, Any]:
        """As much of it as a terminal has room for."""
        return {
            "model": self.model,
            "samplings": [_brief_section(section) for section in self.report.sections],
            "same_text": not self.report.differences if self.report.compared else None,
            "seconds": _brief(self.seconds),
            "interrupted": self.interrupted,
        }


def _brief_section(section: Section) -> dict[str, Any]:
    """The speed-up by depth."""
    gained = {one.depth: _brief(one.speedup.value) for one in section.all if one.speedup and one.depth}
    return {"name": section.mode.name, "plain_tps": _brief(section.plain_tps), "speedup": gained}


def _section(section: Section) -> dict[str, Any]:
    return {
        "name": section.mode.name,
        **asdict(section.mode),
        "fastest_depth": section.fastest.depth if section.fastest else None,
        "costs": asdict(section.costs) if section.costs else None,
        "all": [asdict(figures) for figures in section.all],
        "sets": {name: [asdict(one) for one in figures] for name, figures in section.sets.items()},
    }


def _brief(value: Any) -> Any:
    """Floats with five digits that count: no timing has more."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _brief(item) for key, item in value.items()}
    return [_brief(item) for item in value] if isinstance(value, list | tuple) else value


# --- sentences, the same wherever they are shown -----------------------------------------------------------------


def about_machine(result: Result) -> str:
    return about(result.device, result.machine)


def about_prompts(result: Result) -> str:
    plan = result.plan
    if not result.report.prompts:
        return "No prompt was run at every depth"
    sets = ", ".join(f"{name} {_of(done, result.available[name])}" for name, done in result.report.prompts.items())
    times = "once" if plan.repeat == 1 else f"{plan.repeat} times"
    return f"Prompts: {sets}; {times}, up to {plan.max_tokens} tokens, seed {plan.seed}"


def _of(done: int, available: int) -> str:
    return str(done) if done == available else f"{done} of {available}"


def about_plain(result: Result) -> str:
    if not result.plan.drafting:
        return f"Plain decoding alone: {result.no_draft_reason or 'no other depth was asked for'}"
    return (
        "Speed-ups are over plain decoding here: the same engine, in rounds that skip the head. "
        "A text's first drafts are made with its prompt and count as prefill."
    )


def about_costs(section: Section) -> str:
    costs = section.costs
    if costs is None:
        return ""
    parts = [f"verify (beta) and draft: cost in plain steps of {costs.plain_s * 1e3:.2f} ms"]
    if costs.first_draft is not None:
        further = f", each further one {costs.next_draft:.2f} (delta)" if costs.next_draft is not None else ""
        parts.append(f"the first draft costs {costs.first_draft:.2f}{further}")
    parts.append("predicted = tok/round / (verify + draft)")
    return "; ".join(parts)


def about_fastest(result: Result) -> str:
    sections = result.report.sections
    found = [(section.mode.name, best, best.speedup) for section in sections if (best := section.fastest)]
    if sections and not found:
        return "No speed: every text had fewer than two tokens"
    parts = [
        f"{name} at depth {best.depth}, {speedup.value:.2f} times plain" if best.depth else f"{name} without drafts"
        for name, best, speedup in found
        if speedup
    ]
    return f"Fastest: {'; '.join(parts)}" if parts and len(result.plan.depths) > 1 else ""


def about_texts(result: Result) -> str:
    report = result.report
    if report.differences:
        return f"NOT the same text: {len(report.differences)} of {report.compared} texts differ from plain decoding's"
    if len(result.plan.depths) == 1 or not report.sections or not report.compared:
        return ""
    return f"Same text: all {report.compared} texts, at every depth, are those of plain decoding"


def about_run(result: Result) -> str:
    memory = result.peak_memory
    parts = [f"Prefill {result.report.prefill_tps:.0f} tok/s"]
    if memory is not None:
        parts.append(f"peak memory of the process {memory / 2**20:.0f} MiB")
    parts.append(f"{result.seconds:.0f} s in all")
    return "; ".join(parts) + (" (interrupted)" if result.interrupted else "")
