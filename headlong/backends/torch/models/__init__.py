"""Which class runs which family: one line each."""

from headlong.backends.torch.models.qwen3_5 import Qwen35
from headlong.backends.torch.models.base import Model

FAMILIES: dict[str, type[Model]] = {
    "qwen3_5": Qwen35,
}
