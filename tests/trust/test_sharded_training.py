# SPDX-License-Identifier: Apache-2.0
"""Training of `examples/sharded.py` on eight devices: the numbers are those of one.

All is in float32. Sums are taken in another order on a mesh, so losses of a few steps
agree to 2e-6 of their size, and parameters to 1e-5, where one step is 1e-2.
"""

import contextlib
import functools
import importlib
import logging
import pathlib
import re
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import treetap as tt
from meshes import devices_of
from treetap import edits

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))
sharded = importlib.import_module("sharded")

P = PartitionSpec
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
STEPS = 4
long = pytest.mark.long
QUICK = ("fsdp", "explicit")  # the way in which all is tested at every change
each = pytest.mark.parametrize(
    ("way", "kind"),
    [
        QUICK,
        *(
            pytest.param(way, kind, marks=long)
            for way in sharded.WAYS
            for kind in KINDS
            if (way, kind) != QUICK
        ),
    ],
)
some = pytest.mark.parametrize(
    ("way", "kind"), [QUICK, pytest.param("both", "auto", marks=long)]
)


@contextlib.contextmanager
def on(mesh):
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        yield mesh


def mesh_of(way, kind, count=8):
    return sharded.mesh_for(way, KINDS[kind], devices_of(count))


class Compiled(logging.Handler):
    """Notes which functions are compiled."""

    def __init__(self):
        super().__init__()
        self.names = []

    def emit(self, record):
        found = re.match(r"Compiling (\S+)", record.getMessage())
        self.names += found.groups() if found else ()

    def __enter__(self):
        self.logging = jax.log_compiles()
        self.logging.__enter__()
        logging.getLogger("jax").addHandler(self)
        return self.names

    def __exit__(self, *args):
        logging.getLogger("jax").removeHandler(self)
        self.logging.__exit__(*args)


class Trained(NamedTuple):
    mesh: Any
    new: Any  # the model before the first step; not to be changed
    run: Any
    losses: list[float]
    born: dict[Any, Any]  # shardings from before the first step
    compiled: list[str]  # what was compiled for the steps


@functools.cache
def trained(way, kind, count=8):
    with on(mesh_of(way, kind, count)) as mesh:
        make = (
            tt.build
            if count > 1
            else tt.jit(lambda fn, way: fn(way), static_argnums=(0, 1))
        )
        run = make(sharded.Run, way)
        new, born = tt.clone(run.model), places(run)
        batches = [sharded.batch_of(step, mesh) for step in range(STEPS)]
        with Compiled() as compiled:
            losses = [float(sharded.train_step(run, rows)) for rows in batches]
    return Trained(mesh, new, run, losses, born, compiled)


def alone():
    return trained("data", "auto", 1)


def places(run):
    return {path: leaf[...].sharding for path, leaf in tt.to_flat_state(tt.state(run))}


def values(run):
    return {
        path: np.asarray(leaf[...]) for path, leaf in tt.to_flat_state(tt.state(run))
    }


def close(found, expected, atol=1e-5):
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_allclose(
            found[path], value, rtol=1e-5, atol=atol, err_msg=str(path)
        )


# Training.


@each
def test_losses_and_parameters_are_those_of_one_device(way, kind):
    _, _, run, losses, _, compiled = trained(way, kind)
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(losses, alone().losses, rtol=2e-6)
    close(values(run.model), values(alone().run.model))
    assert len(compiled) == 1


@each
def test_parameters_and_moments_are_born_in_their_shards_and_stay_there(way, kind):
    mesh, _, run, _, born, _ = trained(way, kind)
    for path, sharding in places(run).items():
        assert sharding.is_equivalent_to(born[path], values(run)[path].ndim), path
    for path, param in tt.to_flat_state(tt.state(run.model)):
        wanted = NamedSharding(mesh, sharded.spec_of(path, way))
        kept = [("opt_state", 0, name, *path) for name in ("mu", "nu")]
        for place in (("model", *path), *(("optimizer", *rest) for rest in kept)):
            assert born[place].is_equivalent_to(wanted, param.ndim), place
        shard = param[...].addressable_shards[0].data
        assert shard.size == param.size // prod_of(wanted)


def prod_of(sharding):
    """Into how many parts a sharding splits."""
    names = [name for name in sharding.spec if name is not None]
    return np.prod([sharding.mesh.shape[name] for name in names], dtype=int)


@long
def test_a_loss_needs_no_help_on_an_explicit_mesh_where_nothing_is_ambiguous():
    mesh, model, *_ = trained("data", "explicit")
    model = tt.clone(model)
    model.layers.split = None  # it lies so by itself
    with on(mesh):
        loss = tt.jit(sharded.loss_fn)(model, sharded.batch_of(0, mesh))
    assert float(loss) == pytest.approx(alone().losses[0], rel=2e-6)


@long
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_a_step_in_shards_gives_the_same_numbers(kind):
    mesh = mesh_of("data", kind)

    def local(run, rows):
        def loss_fn(model):
            return jax.lax.pmean(sharded.loss_fn(model, rows), "data")

        loss, grads = tt.value_and_grad(loss_fn)(run.model)
        run.optimizer.update(run.model, grads)
        return loss

    with on(mesh):
        run = tt.jit(lambda: sharded.Run("data"))()
        run.model.layers.split = None  # there is nothing left to lay out
        step = tt.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
        step = tt.jit(step)
        batches = [sharded.batch_of(n, mesh) for n in range(STEPS)]
        losses = [float(step(run, rows)) for rows in batches]
    np.testing.assert_allclose(losses, alone().losses, rtol=2e-6)
    close(values(run.model), values(alone().run.model))


@long
def test_a_checkpoint_goes_from_mesh_to_mesh_and_the_numbers_go_on(tmp_path):
    losses = []
    stations = [("fsdp", "explicit", 8), ("both", "auto", 8), ("data", "explicit", 1)]
    for number, (way, kind, count) in enumerate(stations):
        with on(mesh_of(way, kind, count)) as mesh:
            make = functools.partial(sharded.Run, way)
            if number == 0:
                run = tt.build(make)
            else:
                target = tt.eval_shape(make)
                run = tt.restore_checkpoint(tmp_path / str(number - 1), target)
                assert run.optimizer.step == number
            for path, param in tt.to_flat_state(tt.state(run.model)):
                wanted = NamedSharding(mesh, sharded.spec_of(path, way))
                assert param[...].sharding.is_equivalent_to(wanted, param.ndim)
            losses.append(
                float(sharded.train_step(run, sharded.batch_of(number, mesh)))
            )
            tt.save_checkpoint(tmp_path / str(number), run)
    np.testing.assert_allclose(losses, alone().losses[:3], rtol=2e-6)


# Looking.


def loss_of(fn=sharded.loss_fn):
    return jax.sharding.auto_axes(fn, out_sharding=P())


SITES = ["**/tokens", "**/layers", "**/layers/attn/query"]
FEW = [tt.Moments(), tt.Norm(), tt.TopK(3)]
ALL = [*FEW, tt.AbsMax(), tt.Histogram(8), tt.DeadUnits(), tt.NonFinite()]


@functools.cache
def observed(way, kind, reducers, count=8):
    """What chosen sites give, and the program that measured them."""
    mesh, model, *_ = trained(way, kind, count)
    chosen = [f"{site}:__call__" for site in SITES]
    run = tt.jit(tt.observe(loss_of(), chosen, reduce=list(reducers), values=True))
    with on(mesh):
        rows = sharded.batch_of(0, mesh)
        program = run.lower(model, rows).compile()
        _, record = program(model, rows)
    sites = {site.text.removeprefix("Llama/"): site for site in record}
    return sites, program.as_text()


@some
def test_what_is_observed_keeps_its_sharding(way, kind):
    reducers = tuple(FEW if (way, kind) == QUICK else ALL)
    found, _ = observed(way, kind, reducers)
    expected, _ = observed("data", "auto", reducers, 1)
    close(
        *({text: x.value for text, x in sites.items()} for sites in (found, expected))
    )
    wanted = {
        "tokens:__call__": P("data"),
        "layers/attn/query:__call__": P(None, "data", None, "tensor"),
        "layers:__call__": P(None, "data"),
    }
    assert found.keys() == wanted.keys()
    for text, site in found.items():
        mesh = site.value.sharding.mesh
        assert mesh.shape == mesh_of(way, kind).shape
        sharding = NamedSharding(mesh, wanted[text])
        assert site.value.sharding.is_equivalent_to(sharding, site.value.ndim), text


@some
def test_statistics_are_those_of_one_device_and_gather_nothing(way, kind):
    reducers = tuple(FEW if (way, kind) == QUICK else ALL)
    found, program = observed(way, kind, reducers)
    expected, _ = observed("data", "auto", reducers, 1)
    for text, site in found.items():
        pairs = zip(
            *map(jax.tree.leaves, (site.stats, expected[text].stats)), strict=True
        )
        for one, other in pairs:
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    whole = found["layers:__call__"].value[0]
    assert max(gathered(program)) < whole.size  # though weights are
    everywhere = NamedSharding(whole.sharding.mesh, P())
    control = jax.jit(lambda x: 2 * x, out_shardings=everywhere).lower(whole)
    assert max(gathered(control.compile().as_text())) == whole.size


def gathered(program):
    """How much devices gather from each other in a program, each time."""
    found = re.findall(r"= (\(.*?\)|\S+) all-gather(?:-start)?\(", program)
    shapes = [re.findall(r"\[([\d,]*)\]", text)[-1] for text in found]
    return [np.prod([int(n) for n in shape.split(",") if n]) for shape in shapes]


@some
def test_an_edit_of_sharded_values(way, kind):
    def losses_fn(model, rows):
        scores = model(rows[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(scores, rows[:, 1:])

    def edited(way, kind, count=8):
        mesh, model, *_ = trained(way, kind, count)
        change = edits.zero().where(np.arange(8)[:, None, None] == 5).at(1)
        run = tt.jit(tt.edit(loss_of(losses_fn), {"**/layers:__call__": change}))
        with on(mesh):
            return np.asarray(run(model, sharded.batch_of(0, mesh)))

    found, expected = edited(way, kind), edited("data", "auto", 1)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(found[5], np.log(64), rtol=1e-6)  # it knows nothing
    assert not np.isclose(found[4], np.log(64), rtol=1e-3).any()


# Blame.


def spoiled(model, rows):
    """A loss that divides by nothing where a row begins with the token 63."""
    scores = model(rows[:, :-1])
    return (scores / jnp.where(rows[:, :1] == 63, 0.0, 1.0)[..., None]).mean()


def rows_with_one_bad(mesh):
    rows = np.zeros((8, 17), np.int32)
    rows[6, 0] = 63
    return jax.device_put(rows, NamedSharding(mesh, P("data")))


@long
@some
def test_a_bad_number_is_traced_to_its_place_on_a_mesh(way, kind):
    mesh, model, *_ = trained(way, kind)
    with on(mesh):
        found = tt.blame(loss_of(spoiled))(model, rows_with_one_bad(mesh))
    assert (found.kind, found.operation, found.index) == ("inf", "div", (6, 0, 0))
    assert found.function == "spoiled"


@long
def test_a_bad_number_is_traced_to_its_shard():
    mesh, model, *_ = trained("data", "auto")
    model = tt.clone(model)
    model.layers.split = None  # there is nothing left to lay out
    step = tt.shard_map(
        lambda model, rows: jax.lax.pmean(spoiled(model, rows), "data"),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P(),
    )
    with on(mesh):
        found = tt.blame(step)(model, rows_with_one_bad(mesh))
    assert (found.kind, found.shard, found.index) == ("inf", 6, (0, 0, 0))
    assert "on shard 6" in str(found)


COLLECTIVES = {
    "sum": lambda x: jax.lax.psum(x, "data"),
    "all": lambda x: jax.lax.all_gather(x, "data"),
    "another": lambda x: jax.lax.ppermute(x, "data", [(n, 7 - n) for n in range(8)]),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_what_came_from_another_shard_is_blamed_on_that_shard(name):
    def local(x):
        return COLLECTIVES[name](jnp.log(x)).sum()[None]

    mesh = mesh_of("data", "auto")
    run = jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    found = tt.blame(run)(jnp.ones(16).at[13].set(-1.0))
    assert (found.kind, found.operation, found.shard) == ("nan", "log", 6)
    assert found.index == (1,)


def test_shards_that_are_not_summed_together_have_faults_of_their_own():
    def local(x):
        is_first = jax.lax.axis_index("data") == 0
        return jax.lax.psum(jnp.where(is_first, x, -jnp.inf), "tensor")

    mesh = mesh_of("both", "auto")
    specs = {"in_specs": P(("data", "tensor")), "out_specs": P("data")}
    found = tt.blame(jax.shard_map(local, mesh=mesh, **specs))(jnp.full(8, 2e38))
    assert (found.kind, found.shard, found.inputs_finite) == ("inf", 0, True)
    assert found.operation.startswith("psum")


def test_infinities_on_purpose_may_come_from_another_shard():
    def local(x):
        top = jax.lax.pmax(jnp.where(x > 1, x, -jnp.inf), "data")
        return (top - top)[None]

    mesh = mesh_of("data", "auto")
    run = jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    found = tt.blame(run)(jnp.ones(8))
    assert (found.kind, found.operation) == ("nan", "sub")
