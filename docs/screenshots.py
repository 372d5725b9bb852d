# SPDX-License-Identifier: Apache-2.0
"""Makes the pictures of the report that the pages and the README show.

A small decoder is trained on this project's licence and observed on the way; in a
second run one weight of a later block overflows. It needs Chromium, and the package
`playwright`.

    python docs/screenshots.py                  # writes docs/images/report-*.png
    python docs/screenshots.py --out elsewhere  # and leaves the pages there, too
"""

import argparse
import pathlib
import shutil
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from playwright.sync_api import Page, sync_playwright

import treetap as tt

FOLDER = pathlib.Path(__file__).parent
WIDTH, HEADS, CONTEXT, BATCH, LAYERS = 64, 4, 48, 8, 4
SIZE = {"width": 1440, "height": 900}


class Attention(tt.Module):
    """Causal attention whose patterns are a site."""

    def __init__(self, *, rngs: tt.Rngs):
        self.qkv = tt.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.out = tt.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[batch, time, width]` to the same."""
        parts = jnp.split(self.qkv(x), 3, axis=-1)
        q, k, v = (p.reshape(*p.shape[:-1], HEADS, WIDTH // HEADS) for p in parts)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (WIDTH / HEADS) ** 0.5
        seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))[None, None]
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30))
        weights = tt.tap(weights, "patterns")
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return self.out(mixed.reshape(x.shape))


class Mlp(tt.Module):
    """Up, relu, down."""

    def __init__(self, *, rngs: tt.Rngs):
        self.up = tt.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = tt.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., width]` to the same."""
        return self.down(tt.tap(jax.nn.relu(self.up(x)), "hidden"))


class Block(tt.Module):
    """Attention and a small network, each added to what comes in."""

    def __init__(self, *, rngs: tt.Rngs):
        self.attn_norm = tt.LayerNorm(WIDTH, rngs=rngs)
        self.attn = Attention(rngs=rngs)
        self.mlp_norm = tt.LayerNorm(WIDTH, rngs=rngs)
        self.mlp = Mlp(rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[batch, time, width]` to the same."""
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(tt.Module):
    """From characters to scores for the one that follows each."""

    def __init__(self, letters: int, *, rngs: tt.Rngs):
        self.embed = tt.Embed(letters, WIDTH, rngs=rngs)
        self.positions = tt.Embed(CONTEXT, WIDTH, rngs=rngs)
        self.blocks = tt.List([Block(rngs=rngs) for _ in range(LAYERS)])
        self.norm = tt.LayerNorm(WIDTH, rngs=rngs)
        self.head = tt.Linear(WIDTH, letters, rngs=rngs)

    def __call__(self, letters: jax.Array) -> jax.Array:
        """`[batch, time]` of letters to `[batch, time, letters]` of scores."""
        x = self.embed(letters) + self.positions(jnp.arange(CONTEXT))[None]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(model: Decoder, rows: jax.Array) -> jax.Array:
    """The mean loss of the letters that follow."""
    scores = model(rows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(scores, rows[:, 1:]).mean()


def observed(steps: int, every: int, *, breaks: bool) -> tt.Report:
    """Trains, and reports every so many steps; something may break before the last."""
    text = (FOLDER.parent / "LICENSE").read_text()
    letters = sorted(set(text))
    data = np.array([letters.index(letter) for letter in text], np.int32)
    model = Decoder(len(letters), rngs=tt.Rngs(0))
    optimizer = tt.Optimizer(model, optax.adamw(3e-3), wrt=tt.Param)

    @tt.jit
    def train_step(model, optimizer, rows):
        optimizer.update(model, tt.grad(loss_fn)(model, rows))

    look = jax.jit(tt.observe(jax.grad(loss_fn, allow_int=True), grads=True))
    records, numbers = [], []
    for step in range(steps + 1):
        starts = np.random.default_rng(step).integers(0, len(data) - CONTEXT - 1, BATCH)
        rows = jnp.asarray(data[starts[:, None] + np.arange(CONTEXT + 1)])
        if breaks and step == steps:
            kernel = model.blocks[2].attn.qkv.kernel
            kernel[...] = kernel[...].at[:, 5].multiply(1e38)
        if step % every == 0:
            records.append(look(model, rows)[1])
            numbers.append(step)
        train_step(model, optimizer, rows)
    if breaks:
        return tt.report(records[-1], title="Decoder, step 200", model=model)
    return tt.report(records, title="Decoder on a licence", model=model, steps=numbers)


def pictures(page: Page, pages: dict[str, str], out: pathlib.Path) -> None:
    """The first NaN in light and in dark, and attention patterns."""
    shots = {
        "report": ("broken", "light"),
        "report-dark": ("broken", "dark"),
        "report-attention": ("good", "light"),
    }
    for name, (which, scheme) in shots.items():
        page.emulate_media(color_scheme=scheme)  # pyright: ignore[reportArgumentType] - a literal
        page.goto(pages[which])
        if which == "broken":
            page.click("a.verdict")
        else:
            page.get_by_text("patterns", exact=True).nth(1).click()
        page.mouse.move(0, 0)
        page.screenshot(path=out / f"{name}.png")


def main() -> None:
    """Writes all pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=FOLDER / "images")
    out: pathlib.Path = parser.parse_args().out
    keep = out if out != FOLDER / "images" else None
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        place = (keep or pathlib.Path(folder)).resolve()
        pages = {}
        for name, breaks in (("good", False), ("broken", True)):
            made = observed(200, 200 if breaks else 25, breaks=breaks)
            pages[name] = made.save(place / f"{name}.html").as_uri()
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox"]
        )
        page = browser.new_page(viewport=SIZE, device_scale_factor=1.5)  # pyright: ignore[reportArgumentType] - a plain dict
        pictures(page, pages, out)
        browser.close()


if __name__ == "__main__":
    main()
