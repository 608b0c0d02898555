"""Scripted models, what they say when asked alone, and what must hold of an engine when all is over."""

from headlong.engine.request import Request

RIGHT, WRONG = (True,), (False,)
MIXED = (True, True, False, True, False)


def walk(history):
    """A model whose next token depends on all before it and is never the end token."""
    return (sum(history) * 31 + history[-1] * 7 + len(history)) % 200


def walked(prompt, count):
    history = tuple(prompt)
    for _ in range(count):
        history += (walk(history),)
    return history[len(prompt) :]


def prompts(*lengths):
    return [[(3 * place + length) % 200 for place in range(length)] for length in lengths]


def submit(engine, prompt, max_tokens=8, **options):
    return engine.submit(Request(prompt, max_tokens=max_tokens, **options))


def run(engine, most=10_000):
    """Step until there is nothing to do; what came."""
    emitted = []
    for _ in range(most):
        if not engine.busy:
            return emitted
        emitted += engine.step()
    raise AssertionError(f"the engine was busy for {most} steps")


def assert_empty(engine):
    """Nothing is left behind: no row, no page, no request."""
    assert not engine.busy
    assert not engine._loop.answers
    assert not engine._answers
    assert not engine._outboxes
    scheduler = engine._loop.scheduler
    assert not scheduler.busy
    assert not engine.backend.rows
    scheduler.check()
    scheduler.prefix.clear()
    assert scheduler.pool.free == engine.limits.pages
