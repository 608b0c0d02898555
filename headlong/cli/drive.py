"""Requests run to their ends and shown as they come; Ctrl-C ends them between two steps."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Event
from types import FrameType
from typing import TYPE_CHECKING

from headlong.engine.request import Output, Request
from headlong.errors import Fault

if TYPE_CHECKING:
    from headlong.cli.show import View
    from headlong.engine.engine import Engine


def drive(engine: "Engine", requests: Sequence[Request], view: "View", insist: bool = True) -> list[Output]:
    """Run the requests together; each answer is shown once it and those before it are complete.

    Where one may `insist`, a second Ctrl-C ends the program at once.
    """
    with _ctrl_c_between_steps(insist) as interrupted:
        indices = [engine.submit(request) for request in requests]
        running = set(indices)
        outputs: list[Output] = []

        def show_complete() -> None:
            while len(outputs) < len(indices) and indices[len(outputs)] not in running:
                output = engine.output(indices[len(outputs)])
                view.answer(len(outputs), output)
                outputs.append(output)

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


def refuse_faults(outputs: Sequence[Output], traced: bool) -> None:
    """Raise what broke answers off. `traced` says that tracebacks were shown where they were caught."""
    hint = "" if traced else "; run it again with -v to see where"
    errors = [" ".join(output.error.split()) for output in outputs if output.finish_reason == "fault"]
    if errors:
        which = f"{len(errors)} of {len(outputs)} answers broke off" if len(outputs) > 1 else "the answer broke off"
        raise Fault(f"{which}: {errors[0].rstrip('.')}{hint}.")


@contextmanager
def _ctrl_c_between_steps(insist: bool) -> Iterator[Event]:
    """The first Ctrl-C sets the event, so that a step is never torn; the second ends at once, or does no more."""
    pressed = Event()

    def press(number: int, frame: FrameType | None) -> None:
        if pressed.is_set() and insist:
            raise KeyboardInterrupt
        pressed.set()

    before = signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
