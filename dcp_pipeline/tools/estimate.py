"""How large the checkpoints of a recipe's model are, by formula: no weights are needed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from dcp_pipeline.config.recipe import Recipe
from dcp_pipeline.core.dtypes import ITEM_SIZES
from dcp_pipeline.core.errors import ConfigError

__all__ = ["Estimate", "estimate"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """Sizes in bytes, of elements alone: headers, digests and counters come on top, far below 1 %.

    Attributes:
        recipe: its name.
        parameters: elements of the tensors, tied ones counted once.
        trained: those that the optimizer changes.
        tensors: how many tensors there are.
        model_bytes: dtype -> bytes of the model as it is exported.
        model_total: all of them.
        published_bytes: the same as the published files hold it, where those are codes and scales;
            else ``None``.
        training_bytes: ``weights``, ``moments`` and ``buffers`` -> bytes in a training checkpoint.
        checkpoint_bytes: all of them.
        ranks: that share the writing.
        bytes_per_rank: what the rank with most writes, when all shares are alike.
    """

    recipe: str
    parameters: int
    trained: int
    tensors: int
    model_bytes: dict[str, int]
    model_total: int
    published_bytes: dict[str, int] | None
    training_bytes: dict[str, int]
    checkpoint_bytes: int
    ranks: int
    bytes_per_rank: int


def estimate(recipe: Recipe, ranks: int | None = None) -> Estimate:
    """Estimate the sizes of a model's checkpoints.

    >>> from dcp_pipeline.config.compose import load_recipe
    >>> found = estimate(load_recipe("llama3_8b"))
    >>> found.parameters, found.model_bytes, found.checkpoint_bytes // 10**9
    (8030261248, {'bfloat16': 16060522496}, 96)

    Args:
        recipe: of the model.
        ranks: that share the writing; ``None`` for the recipe's own.

    Raises:
        ConfigError: the recipe says of no tensors, or there are no ranks.
    """
    if not recipe.info.tensors:
        raise ConfigError(f"the recipe {recipe.name!r} says nothing of tensors", "recipe.tensors")
    ranks = recipe.info.parallel.ranks if ranks is None else ranks
    if ranks < 1:
        raise ConfigError(f"ranks: found {ranks}; expected at least 1", "ranks")
    sizes = list(recipe.sizes(next(iter(recipe.info.tensors))))
    model: Counter[str] = Counter()
    trained = buffers = 0
    for pattern, dtype, count, elements in sizes:
        nbytes = count * elements * ITEM_SIZES[dtype]
        model[dtype] += nbytes
        if recipe.is_trained(pattern):
            trained += count * elements
        else:
            buffers += nbytes
    training = {
        "weights": trained * ITEM_SIZES[recipe.info.training.weights],
        "moments": 2 * trained * ITEM_SIZES[recipe.info.training.moments],
        "buffers": buffers,
    }
    total = sum(training.values())
    return Estimate(
        recipe=recipe.name,
        parameters=sum(count * elements for _, _, count, elements in sizes),
        trained=trained,
        tensors=sum(count for _, _, count, _ in sizes),
        model_bytes=dict(model),
        model_total=sum(model.values()),
        published_bytes=recipe.published_bytes(),
        training_bytes=training,
        checkpoint_bytes=total,
        ranks=ranks,
        bytes_per_rank=-(-total // ranks),
    )
