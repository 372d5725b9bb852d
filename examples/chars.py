# SPDX-License-Identifier: Apache-2.0
"""A character-level language model: the training program to start your own from.

It has what a real one needs: a jitted step with dropout, an optimizer and metrics; a
progress bar; checkpoints, and resuming from the last one with the very same numbers;
and a look at the activations every so many steps. The text is this project's licence,
or any file.

    python examples/chars.py --steps 400 --out runs/licence
    python examples/chars.py --steps 800 --out runs/licence    # goes on at step 400
"""

import argparse
import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.progress import TimeRemainingColumn as RemainingColumn
from rich.table import Table

import treetap as tt

LICENCE = pathlib.Path(__file__).parents[1] / "LICENSE"


@dataclasses.dataclass(frozen=True)
class Config:
    """How large the model is, and how it is trained."""

    text: pathlib.Path = LICENCE
    out: pathlib.Path = pathlib.Path("runs/chars")
    steps: int = 400
    batch: int = 16
    context: int = 64
    width: int = 96
    heads: int = 4
    layers: int = 2
    dropout: float = 0.1
    learning_rate: float = 3e-3
    seed: int = 0
    checkpoint_every: int = 100
    look_every: int = 100


class Block(tt.Module):
    """Attention and a small network, each added to what comes in."""

    def __init__(self, config: Config, *, rngs: tt.Rngs):
        width = config.width
        self.attention_norm = tt.LayerNorm(width, rngs=rngs)
        self.attention = tt.MultiHeadAttention(config.heads, width, rngs=rngs)
        self.mlp_norm = tt.LayerNorm(width, rngs=rngs)
        self.up = tt.Linear(width, 4 * width, rngs=rngs)
        self.down = tt.Linear(4 * width, width, rngs=rngs)
        self.dropout = tt.Dropout(config.dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[batch, time, width]` to the same."""
        seen = self.attention(self.attention_norm(x), is_causal=True)
        x = x + self.dropout(seen)
        return x + self.dropout(self.down(tt.gelu(self.up(self.mlp_norm(x)))))


class Writer(tt.Module):
    """A decoder: from characters to scores for the one that follows each."""

    def __init__(self, letters: int, config: Config, *, rngs: tt.Rngs):
        self.embed = tt.Embed(letters, config.width, rngs=rngs)
        self.positions = tt.Embed(config.context, config.width, rngs=rngs)
        blocks = [Block(config, rngs=rngs) for _ in range(config.layers)]
        self.blocks = tt.List(blocks)
        self.norm = tt.LayerNorm(config.width, rngs=rngs)

    def __call__(self, letters: jax.Array) -> jax.Array:
        """`[batch, time]` of letters to `[batch, time, letters]` of scores."""
        places = jnp.arange(letters.shape[-1])
        x = self.embed(letters) + self.positions(places)[None]
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


class Text:
    """A text as numbers, and batches of it.

    A batch is made from the number of its step alone: a run that resumes sees what it
    would have seen.
    """

    def __init__(self, text: str, config: Config):
        if len(text) <= config.context + 1:
            raise SystemExit(
                f"The text has {len(text)} characters; it needs more than "
                f"context + 1 = {config.context + 1}."
            )
        self.letters = sorted(set(text))
        numbers = {letter: number for number, letter in enumerate(self.letters)}
        self.data = np.array([numbers[letter] for letter in text], np.int32)
        self.config = config

    def batch(self, step: int) -> np.ndarray:
        """`[batch, context + 1]`: each row the inputs, and one letter more."""
        config = self.config
        random = np.random.default_rng((config.seed, step))
        length = config.context + 1
        starts = random.integers(0, len(self.data) - length + 1, config.batch)
        return self.data[starts[:, None] + np.arange(length)]


def loss_fn(model: Writer, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The mean loss, and the scores it came from."""
    scores = model(rows[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, rows[:, 1:])
    return losses.mean(), scores


@tt.jit
def train_step(
    model: Writer, optimizer: tt.Optimizer, metrics: tt.MultiMetric, rows: jax.Array
) -> jax.Array:
    """One step; model, optimizer and metrics are changed in place."""
    step = tt.value_and_grad(loss_fn, has_aux=True)
    (loss, scores), grads = step(model, rows)
    optimizer.update(model, grads)
    metrics.update(values=loss, logits=scores, labels=rows[:, 1:])
    return loss


@jax.jit
def next_scores(model: Writer, rows: jax.Array, last: jax.Array) -> jax.Array:
    return model(rows)[0, last]


def written(model: Writer, text: Text, start: str, count: int) -> str:
    """What the model writes after `start`, the likeliest letter each time."""
    model = tt.view(model, deterministic=True)
    context = text.config.context
    numbers = [text.letters.index(c) for c in start if c in text.letters]
    for _ in range(count):
        window = numbers[-context:]
        rows = np.zeros((1, context), np.int32)
        rows[0, : len(window)] = window
        scores = next_scores(model, rows, len(window) - 1)
        numbers.append(int(scores.argmax()))
    return "".join(text.letters[number] for number in numbers)


INTERESTING = tt.Select("blocks/*:__call__") | tt.Select("**:attention_weights")
look = tt.observe(tt.jit(lambda model, rows: model(rows)), select=INTERESTING)


def statistics(model: Writer, rows: jax.Array) -> dict[str, dict[str, float]]:
    """What each block puts out, and how its attention is spread, in figures."""
    _, record = look(tt.view(model, deterministic=True), rows[:, :-1])
    return {
        site.text: {
            "mean": float(jnp.mean(site.value)),
            "std": float(jnp.std(site.value)),
            "largest": float(jnp.max(jnp.abs(site.value))),
        }
        for site in record
    }


def shown(figures: dict[str, dict[str, float]], step: int) -> Table:
    table = Table(title=f"Activations at step {step}", title_justify="left")
    table.add_column("site")
    for column in ("mean", "std", "largest"):
        table.add_column(column, justify="right")
    for name, row in figures.items():
        table.add_row(name, *(f"{value:.4f}" for value in row.values()))
    return table


def newest(out: pathlib.Path) -> pathlib.Path | None:
    """The last checkpoint that was finished."""
    folders = [path for path in out.glob("step_*") if path.name[5:].isdigit()]
    return max(folders, key=lambda path: int(path.name[5:]), default=None)


@dataclasses.dataclass
class Run:
    """Everything that a run changes, and that a checkpoint holds."""

    model: Writer
    optimizer: tt.Optimizer[Writer]
    metrics: tt.MultiMetric

    def save(self, folder: pathlib.Path) -> None:
        """Writes everything to a folder."""
        tt.save_checkpoint(folder, vars(self))

    def restored(self, folder: pathlib.Path) -> "Run":
        """A run like this one, with what a folder holds."""
        return Run(**tt.restore_checkpoint(folder, vars(self)))


def begun(config: Config, letters: int) -> tuple[Run, int]:
    """A run as the last checkpoint left it, or a new one; and the step it is at."""
    model = Writer(letters, config, rngs=tt.Rngs(config.seed))
    optimizer = tt.Optimizer(model, optax.adamw(config.learning_rate), wrt=tt.Param)
    metrics = tt.MultiMetric(loss=tt.metrics.Average(), accuracy=tt.metrics.Accuracy())
    run = Run(model, optimizer, metrics)
    checkpoint = newest(config.out)
    if checkpoint is None:
        return run, 0
    return run.restored(checkpoint), int(checkpoint.name[5:])


def train(config: Config, console: Console) -> Writer:
    """Trains from the last checkpoint, if there is one, to the last step."""
    text = Text(config.text.read_text(), config)
    run, first = begun(config, len(text.letters))
    forget_after(config.out, first)
    console.print(
        f"{len(text.data)} characters, {len(text.letters)} different; "
        + (f"going on at step {first}" if first else f"writing to {config.out}")
    )
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[report]}"),
        RemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=config.steps, completed=first, report="")
        for step in range(first, config.steps):
            rows = jnp.asarray(text.batch(step))
            train_step(run.model, run.optimizer, run.metrics, rows)
            done = step + 1
            if done % config.look_every == 0 or done == config.steps:
                figures = {k: float(v) for k, v in run.metrics.compute().items()}
                run.metrics.reset()
                activations = statistics(run.model, rows)
                log(config.out, {"step": done, **figures, "activations": activations})
                console.print(shown(activations, done))
                report = "loss {loss:.3f}, accuracy {accuracy:.1%}".format(**figures)
                progress.update(task, report=report)
            if done % config.checkpoint_every == 0 or done == config.steps:
                run.save(config.out / f"step_{done}")
            progress.advance(task)
    console.print(written(run.model, text, "Licen", 120))
    return run.model


def log(out: pathlib.Path, entry: dict[str, object]) -> None:
    """Adds a line of figures to the log."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "log.jsonl").open("a") as file:
        file.write(json.dumps(entry) + "\n")


def forget_after(out: pathlib.Path, step: int) -> None:
    """Takes out of the log what comes after the checkpoint that is gone on from."""
    file = out / "log.jsonl"
    if file.exists():
        lines = file.read_text().splitlines(keepends=True)
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        file.write_text("".join(kept))


def parsed() -> Config:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for field in dataclasses.fields(Config):
        name = "--" + field.name.replace("_", "-")
        kind = pathlib.Path if isinstance(field.default, pathlib.Path) else None
        default = field.default
        parser.add_argument(name, type=kind or type(default), default=default)
    return Config(**vars(parser.parse_args()))


if __name__ == "__main__":
    train(parsed(), Console())
