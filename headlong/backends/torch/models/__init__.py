"""Which class runs which family: one line each."""

from collections.abc import Callable
from typing import Any

from headlong.backends.torch.loader import Loader
from headlong.backends.torch.models.base import Model
from headlong.backends.torch.models.qwen3_5 import Qwen35

FAMILIES: dict[str, Callable[[Any, Loader, int, bool], Model]] = {
    "qwen3_5": Qwen35,
}
