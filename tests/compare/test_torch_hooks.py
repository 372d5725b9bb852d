# SPDX-License-Identifier: Apache-2.0
"""A port beside what PyTorch's hooks gave; `torch_hooks.py` made the files."""

import pathlib

import jax
import jax.numpy as jnp
import pytest
from safetensors.numpy import load_file

import treetap as tt
from treetap._compare.comparison import compare

FOLDER = pathlib.Path(__file__).with_name("torch")
IMAGES = tt.Select("stem") | tt.Select("norm") | tt.Select("down")
LAYOUT = {IMAGES: "NCHW->NHWC"}


class Net(tt.Module):
    def __init__(self, rngs, epsilon=1e-5):
        size = (3, 3)
        self.stem = tt.Conv(3, 8, size, rngs=rngs)
        self.norm = tt.GroupNorm(8, num_groups=2, epsilon=epsilon, rngs=rngs)
        self.down = tt.Conv(8, 8, (2, 2), strides=2, padding="VALID", rngs=rngs)
        self.shared = tt.Linear(8, 8, rngs=rngs)
        self.head = tt.Linear(8, 5, rngs=rngs)

    def __call__(self, images):
        x = jax.nn.relu(self.norm(self.stem(images)))
        x = jax.nn.relu(self.down(x)).mean((1, 2))
        for _ in range(2):
            x = x + jax.nn.relu(self.shared(x))
        return self.head(x)


WEIGHTS = {
    "{conv}/kernel": tt.tensor("{conv}.weight").rearrange("o i h w -> h w i o"),
    "{layer}/scale": "{layer}.weight",
}
LINEAR = {
    f"{name}/kernel": tt.tensor(f"{name}.weight").transpose()
    for name in ("shared", "head")
}


def port(**options):
    model = Net(tt.Rngs(0), **options)
    rules = {**LINEAR, **WEIGHTS}
    tt.load_weights(FOLDER / "model.safetensors", model, rules=rules)
    return model


def run(model):
    images = load_file(FOLDER / "inputs.safetensors")["images"]
    loss = tt.grad(lambda model, x: jax.nn.logsumexp(model(x), axis=-1).sum())
    with jax.default_matmul_precision("highest"):
        images = jnp.asarray(images.transpose(0, 2, 3, 1))
        return tt.observe(loss, grads=True)(model, images)[1]


def test_names_calls_and_gradients_align_without_rules():
    comparison = compare(run(port()), FOLDER / "outputs.safetensors", layout=LAYOUT)
    assert comparison, comparison
    assert [each.other for each in comparison] == [
        "stem",
        "norm",
        "down",
        "shared",
        "shared#1",
        "head",
        "__call__",
        "__call__@grad",
        "head@grad",
        "shared#1@grad",
        "shared@grad",
        "down@grad",
        "norm@grad",
        "stem@grad",
    ]
    # the file tells the order of the calls too
    back = compare(FOLDER / "outputs.safetensors", run(port()), select="shared")
    assert [each.site for each in back] == [
        "shared",
        "shared#1",
        "shared#1@grad",
        "shared@grad",
    ]


@pytest.mark.parametrize(
    ("plant", "site"),
    [
        (lambda model: setattr(model.norm, "epsilon", 1e-3), "norm:__call__"),
        (lambda model: setattr(model.stem, "padding", "CIRCULAR"), "stem:__call__"),
        (
            lambda model: model.shared.kernel.set_value(model.shared.kernel[...].T),
            "shared:__call__",
        ),
    ],
)
def test_mistakes_show_where_they_are(plant, site):
    model = port()
    plant(model)
    comparison = compare(run(model), FOLDER / "outputs.safetensors", layout=LAYOUT)
    assert comparison.first.site == site
