"""`penstock tiny-model`: makes the small random Llama for first runs and tests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.errors import CommandError
from penstock.exits import EX_CANNOT_WRITE, EX_UNAVAILABLE, EX_USAGE
from penstock.tiny_model import FILES, Dtype, Shape, make_tiny_model


def tiny_model(
    directory: Annotated[
        Path, typer.Argument(help="Where to write the model; made if missing.", metavar="DIR", readable=False)
    ],
    layers: Annotated[int, typer.Option(help="Number of transformer layers.")] = 2,
    hidden_size: Annotated[int, typer.Option(help="Width of the model: heads times a multiple of 32.")] = 128,
    heads: Annotated[int, typer.Option(help="Number of attention heads.")] = 4,
    vocab_size: Annotated[int, typer.Option(help="Tokens in the vocabulary.")] = 2048,
    max_position: Annotated[int, typer.Option(help="Window in tokens, prompt and output together.")] = 2048,
    dtype: Annotated[Dtype, typer.Option(help="Weights; run the engine with the same --dtype.")] = Dtype.FLOAT32,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same bytes.")] = 0,
) -> None:
    """Make a small Llama with random weights and its own tokenizer; nothing is downloaded."""
    _refuse_others(directory)
    shape = Shape(layers, hidden_size, heads, vocab_size, max_position, dtype)
    write_tiny_model(directory, shape, seed)
    print(f"tiny model in {directory}; serve it with --model {directory} --dtype {dtype.value}")


def _refuse_others(directory: Path) -> None:
    """Raise CommandError if there is something in `directory` that is no file of a tiny model: it is somebody's."""
    try:
        others = sorted({path.name for path in directory.iterdir()} - FILES) if directory.exists() else []
    except OSError as error:
        raise CommandError(f"cannot write {directory}: {error.strerror}", EX_CANNOT_WRITE) from None
    if others:
        hint = "give the model a directory of its own"
        raise CommandError(f"{directory} holds something else ({others[0]}); {hint}", EX_USAGE)


def write_tiny_model(directory: Path, shape: Shape, seed: int = 0) -> None:
    """Make the model; raises CommandError with the reason if it cannot be made."""
    try:
        make_tiny_model(directory, shape, seed)
    except ValueError as error:
        raise CommandError(f"tiny model: {error}", EX_USAGE) from None
    except OSError as error:
        raise CommandError(f"cannot write {directory}: {error.strerror}", EX_CANNOT_WRITE) from None
    except ImportError as error:
        hint = "install penstock[tiny-model] or a worker extra"
        raise CommandError(f"the tiny model needs {error.name}: {hint}", EX_UNAVAILABLE) from None
