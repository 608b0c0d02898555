"""The error tree.

HeadlongError
├── UserError        a mistake a person can mend: bad flag, bad request, bad model folder (exit code 2)
│   ├── DraftError   drafting was required and could not run (exit code 3)
│   └── QueueFull    as many requests wait as may; try again later
└── Fault            something of ours broke; never the user's doing (exit code 1)

A message is one sentence: what was found, what was wanted, what to do.
"""


class HeadlongError(Exception):
    """Anything Headlong raises on purpose."""

    exit_code = 1


class UserError(HeadlongError):
    """A mistake a person can mend; the message says how."""

    exit_code = 2


class DraftError(UserError):
    """Drafting was required, and this model or these options do not allow it."""

    exit_code = 3


class QueueFull(UserError):
    """The engine holds as many requests as it may."""


class Fault(HeadlongError):
    """A broken invariant inside Headlong."""
