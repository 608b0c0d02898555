"""The model's tensors under their canonical names, read one at a time when asked for."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from headlong.checkpoint.tensor import Array, Tensor, wrong_shape
from headlong.errors import UserError

__all__ = ["HEAD", "Array", "Layout", "Weights"]

HEAD = "mtp."  # what the names of the head's tensors begin with


@dataclass(frozen=True)
class Layout:
    """What a family makes of the stored tensors."""

    tensors: Mapping[str, Tensor]
    skipped: Mapping[str, int] = field(default_factory=dict)  # kind → how many stored tensors of it are not needed
    trunk_norms: str = ""  # "delta" (1 + w) or "absolute", and by what that was told
    head_norms: str = ""


class Weights:
    """Canonical names to arrays. Norms come absolute, in float32; everything else in the type it is stored in, or in
    float32 where it is stored quantised."""

    def __init__(self, layout: Layout) -> None:
        self.skipped: Mapping[str, int] = layout.skipped
        self.trunk_norms = layout.trunk_norms
        self.head_norms = layout.head_norms
        self._tensors = layout.tensors
        self._used: set[str] = set()

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def tensor(self, name: str) -> Tensor:
        """How a tensor is stored; nothing is read."""
        if name not in self._tensors:
            raise UserError(f"the model has no tensor {name}: fetch the model again.")
        return self._tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensor(name).shape

    def fault(self, name: str, shape: tuple[int, ...]) -> str:
        """Why a tensor cannot be had in this shape, in one sentence; empty when it can."""
        if name not in self._tensors:
            return (
                f"the model has no {name}, and config.json asks for it in shape {list(shape)}: fetch the model again."
            )
        tensor = self._tensors[name]
        return tensor.fault or ("" if tensor.shape == shape else wrong_shape(name, tensor.shape, shape))

    def read(self, name: str, shape: tuple[int, ...]) -> Array:
        """The tensor, which must have this shape. It counts as used from now on."""
        fault = self.fault(name, shape)
        if fault:
            raise UserError(fault)
        self._used.add(name)
        return self._tensors[name].read()

    def unused(self) -> list[str]:
        """Names that nobody has read."""
        return [name for name in self._tensors if name not in self._used]

    def check_all_used(self, ignore_head: bool) -> None:
        """A tensor nobody asked for means that the model is not the one its config describes."""
        left = [name for name in self.unused() if not (ignore_head and name.startswith(HEAD))]
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise UserError(
                f"the model has {len(left)} tensors that config.json does not ask for ({', '.join(left[:3])}{more}): "
                f"check that the config and the weights are of the same model."
            )
