"""What a 3D U-Net is made of, which of its tensors are annotated and how, and Table 8's rows.

The model itself is `models.unet`, which has all these names too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec as P

from shardwise.models.paper import Row
from shardwise.nn.strategies import spec_of

Array = jax.Array
Shard = Callable[[Array, str], Array]

X, Y, Z = 0, 1, 2  # mesh axes: X is the data axis, Y and Z are spatial

TENSORS = ("image", "features", "logits")
"""The tensors that may carry an annotation: the image [B, D, H, W, C], the activations that every block
of convolutions returns [B, d, h, w, c], and the logits [B, D, H, W, K]."""

STRATEGIES: dict[str, dict[str, tuple[int, ...]]] = {
    # Nothing: what the arguments' shardings say is all there is.
    "none": {},
    # Batch parallelism: every device whole images.
    "data": {"image": (X,)},
    # Table 8: the batch on X, the first spatial dim on Y.  One annotation.
    "spatial": {"image": (X, Y)},
    # Two spatial dims: smaller halos where there are many devices.
    "spatial2": {"image": (X, Y, Z)},
    # The last spatial dim instead of the first.
    "last": {"image": (X, -1, -1, Y)},
    # Every block's result as well: the same plan as "spatial", said many times.
    "all": {"image": (X, Y), "features": (X, Y), "logits": (X, Y)},
}
"""Strategy -> tensor -> dims mapping, of the leading dims: which mesh axis a dim is split over, -1 for
none.  Dims that are left out, channels among them, are not split."""


@dataclasses.dataclass(frozen=True)
class UNetConfig:
    """Sizes and choices of the model.

    Attributes:
      channels, classes: C and K.
      width: channels of the first level; they double from level to level.
      levels: resolutions, each half the one before.
      convs: convolutions in each block; `kernel`: their size along every spatial dim, odd.
      dims: spatial dims.
      norm: between convolution and ReLU: "instance", over space, by image and channel (sums over all
        devices, and other ones for a patch than for the whole volume); or None.
      down: how a level gets to the next: "max" pooling, or a convolution with "stride".
      remat: the backward pass recomputes what is inside of every block.
      dtype: of activations and of the weights' use; weights, statistics and loss are float32.
    """

    channels: int = 1
    classes: int = 3
    width: int = 32
    levels: int = 4
    convs: int = 2
    kernel: int = 3
    dims: int = 3
    norm: str | None = "instance"
    down: str = "max"
    remat: bool = False
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("channels", "classes", "width", "levels", "convs", "kernel", "dims"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.dims > 3:
            raise ValueError(f"dims is 1, 2 or 3, not {self.dims}")
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel is odd, for blocks to keep their size, not {self.kernel}")
        if self.norm not in (None, "instance"):
            raise ValueError(f"norm is None or 'instance', not {self.norm!r}")
        if self.down not in ("max", "stride"):
            raise ValueError(f"down is 'max' or 'stride', not {self.down!r}")

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of every level."""
        return tuple(self.width * 2**i for i in range(self.levels))

    @property
    def multiple(self) -> int:
        """What spatial sizes are padded to a multiple of: each level halves them."""
        return int(2 ** (self.levels - 1))

    @property
    def reach(self) -> int:
        """No voxel's logits depend on voxels further away than this (norms over space left out)."""
        block = self.convs * (self.kernel // 2)
        halved = self.multiple - 1  # voxels by which pooling, and growing, may be off, all levels
        return block * (2 * self.multiple - 1) + (block + 2) * halved


def spec(strategy: str, tensor: str, axes: tuple[str, ...] = ("x", "y", "z")) -> P | None:
    """The annotation of a tensor under a strategy, or None: it has none.

    Args:
      axes: the mesh's names for X, Y and Z; those that a strategy does not use may be left out.  An
        empty name is an axis that the mesh has not: nothing is split over it.

    Raises:
      ShardingError: no such strategy or tensor, or an axis without a name.
    """
    return spec_of(STRATEGIES, strategy, tensor, axes, TENSORS)


def identity(value: Array, name: str) -> Array:
    """The annotation hook of a one-device run."""
    return value


def sharder(
    annotate: Callable[[Array, P], Array], strategy: str, axes: tuple[str, ...] = ("x", "y", "z")
) -> Shard:
    """The hook the model takes, from `sw.annotate` (or jax's constraint) and a strategy."""

    def shard(value: Array, name: str) -> Array:
        s = spec(strategy, name, axes)
        return value if s is None else annotate(value, s)

    return shard


# ---- the paper's -----------------------------------------------------------------------------

PAPER_CONFIG = UNetConfig(
    channels=1, classes=3, width=96, levels=4, norm=None, down="stride", dtype="bfloat16"
)

_ASSUMED = (
    "architecture: four levels, two 3^3 convolutions in each block, no norm, strided convolutions down",
    "base width 96: 2.4e13 operations of an image of 128^3, where the paper's times and utilizations "
    "make 2.0e13 to 2.2e13",
    "bfloat16 activations, float32 weights, plain gradient descent",
)


@dataclasses.dataclass(frozen=True)
class ImageRow(Row[UNetConfig]):
    """A row of Table 8; `image` is the size of the cube that an image is."""

    image: int = 128


PAPER: dict[str, ImageRow] = {
    f"{image}^3, {x}x{y}": ImageRow(
        "Table 8", PAPER_CONFIG, {"x": x, "y": y}, batch,
        {"memory GB": memory, "step s": step, "utilisation": used}, _ASSUMED, image,
    )
    for image, batch, x, y, memory, step, used in (
        (128, 4, 1, 1, 14.3, 2.99, 0.479),
        (128, 4, 1, 2, 14.8, 1.56, 0.437),
        (128, 4, 1, 4, 7.9, 0.79, 0.435),
        (128, 4, 1, 8, 4.5, 0.39, 0.435),
        (128, 4, 1, 16, 2.7, 0.19, 0.438),
        (256, 8, 4, 16, 14.9, 1.66, 0.205),
        (256, 8, 2, 32, 8.5, 0.76, 0.412),
    )
}  # fmt: skip
"""Table 8; mesh x data, y spatial.  The paper does not give the architecture."""
