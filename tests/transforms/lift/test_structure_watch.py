# SPDX-License-Identifier: Apache-2.0
"""Changes of structure inside a transform are found when it is traced."""

import warnings

import jax.numpy as jnp
import pytest

import treetap as tt
from modes import SIMPLE_MODES, UPDATES


class Model(tt.Module):
    def __init__(self):
        self.w = tt.Param(jnp.ones(2))
        self.table = jnp.zeros(2)
        self.size = 2
        self.deterministic = False
        self.inner = tt.Dict(x=tt.Param(jnp.zeros(())))


def replace_variable(model):
    model.w = tt.Param(jnp.zeros(2))


def replace_array(model):
    model.table = model.table + 1


def create(model):
    model.inner.new = tt.Variable(jnp.zeros(()))


def remove(model):
    del model.w


def step(fn):
    """A function with a scalar result around a change."""

    def run(model, x):
        fn(model)
        return x * 1.0

    return run


WRAPPERS = {
    "jit": lambda f, **o: tt.jit(f, **o),
    "remat": lambda f, **o: tt.remat(f, **o),
    "grad": lambda f, **o: tt.grad(f, argnums=1, **o),
    "value_and_grad": lambda f, **o: tt.value_and_grad(f, argnums=1, **o),
    "vjp": lambda f, **o: lambda m, x: tt.vjp(f, m, x, **o),
    "vmap": lambda f, **o: tt.vmap(f, in_axes=None, axis_size=2, **o),
    "scan": lambda f, **o: (
        lambda m, x: tt.scan(f, in_axes=None, out_axes=0, length=2, **o)(m, x)
    ),
    "cond": lambda f, **o: lambda m, x: tt.cond(True, f, lambda m, x: x, m, x, **o),
    "switch": lambda f, **o: lambda m, x: tt.switch(0, [f], m, x, **o),
    "checkify": lambda f, **o: tt.checkify(f, **o),
    "eval_shape": lambda f, **o: lambda m, x: tt.eval_shape(f, m, x, **o),
    "fori_loop": lambda f, **o: (
        lambda m, x: tt.fori_loop(0, 2, lambda i, m: (f(m, x), m)[1], m, **o)
    ),
    "while_loop": lambda f, **o: (
        lambda m, x: tt.while_loop(
            lambda m: m.w[0] > 5, lambda m: (f(m, x), m)[1], m, **o
        )
    ),
}


# They carry what plain arrays an object holds, so these may be replaced.
LOOPS = ("fori_loop", "while_loop")
OTHERS = [wrapper for wrapper in WRAPPERS if wrapper not in LOOPS]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replace_variable, r"the data attribute \S*w was replaced"),
        (create, r"the data attribute \S*inner/new was created"),
        (remove, r"the data attribute \S*w was removed"),
    ],
)
def test_changed_data_attributes_are_errors(wrapper, change, message):
    model = Model()
    before = dict(vars(model))
    with pytest.raises(tt.StructureError, match=f"{wrapper}: {message}"):
        WRAPPERS[wrapper](step(change))(model, 1.0)
    assert vars(model) == before


@pytest.mark.parametrize("wrapper", OTHERS)
def test_a_replaced_array_is_an_error(wrapper):
    model = Model()
    with pytest.raises(tt.StructureError, match=r"attribute \S*table was replaced"):
        WRAPPERS[wrapper](step(replace_array))(model, 1.0)
    assert (model.table == 0).all()


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_changed_statics_stay_inside_with_a_warning(wrapper):
    model = Model()
    with pytest.warns(UserWarning, match=r"static attribute \S*size changed"):
        WRAPPERS[wrapper](step(lambda model: setattr(model, "size", 3)))(model, 1.0)
    assert model.size == 2


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_modes_set_on_purpose_draw_no_warning(wrapper):
    model = Model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        WRAPPERS[wrapper](step(lambda model: model.eval()))(model, 1.0)
    assert not model.deterministic


@pytest.mark.parametrize("wrapper", OTHERS)
def test_a_transform_may_be_told_to_ignore_them(wrapper):
    model = Model()
    wrap = WRAPPERS[wrapper]
    wrap(step(replace_array), on_structure_change="ignore")(model, 1.0)
    with pytest.warns(UserWarning, match="table was replaced"):
        wrap(step(replace_array), on_structure_change="warn")(model, 1.0)
    assert (model.table == 0).all()


def test_policies_hold_for_a_block_or_the_process():
    model = Model()
    with tt.structure_policy("ignore"):
        tt.jit(step(replace_array))(model, 1.0)
    tt.set_structure_policy("ignore")
    try:
        tt.jit(step(replace_array))(model, 1.0)
    finally:
        tt.set_structure_policy(None)
    with pytest.raises(tt.StructureError):
        tt.jit(step(replace_array))(model, 1.0)


def test_unknown_policies_are_refused():
    with pytest.raises(ValueError, match="not 'perhaps'"):
        tt.set_structure_policy("perhaps")
    with pytest.raises(ValueError, match="not 'perhaps'"):
        tt.jit(step(create), on_structure_change="perhaps")


def test_objects_made_inside_may_change_freely():
    def run(x):
        model = Model()
        model.w = tt.Param(jnp.full(2, x))
        model.size = 7
        return model

    assert tt.jit(run)(3.0).size == 7


class Weighted(tt.Module):
    def __init__(self):
        self.w = tt.Param(jnp.array(3.0))
        self.offset = tt.data(jnp.array(1.0))
        self.kind = "plain"

    def double(self):
        return self.w * 2


@SIMPLE_MODES
def test_a_mapped_constructor_method_is_refused(mode):
    def use():
        class Mapped(tt.Module):
            @tt.vmap(in_axes=(None, 0), **mode)
            def __init__(self, x):
                self.w = tt.Param(x)

        return Mapped(jnp.arange(3.0))

    with pytest.raises(ValueError, match=r"__init__|w was created"):
        use()


def add_attribute(model):
    model.extra = tt.Param(1.0)


def replace(model):
    model.offset = model.offset + 1


CALLS = {
    "jit": lambda f, model, mode: tt.jit(f, **mode)(model),
    "vmap": lambda f, model, mode: tt.vmap(f, in_axes=None, axis_size=2, **mode)(model),
    "remat": lambda f, model, mode: tt.remat(f, **mode)(model),
    "grad": lambda f, model, mode: tt.grad(
        lambda model: (f(model), model.offset * 1)[1], **mode
    )(model),
    "cond": lambda f, model, mode: tt.cond(True, f, f, model, **mode),
    "scan": lambda f, model, mode: tt.scan(
        lambda model, x: (f(model), x)[1], in_axes=(None, 0), out_axes=0, **mode
    )(model, jnp.arange(2.0)),
    "fori_loop": lambda f, model, mode: tt.fori_loop(
        0, 2, lambda i, model: (f(model), model)[1], model, **mode
    ),
    "checkify": lambda f, model, mode: tt.checkify(f, **mode)(model),
}


@SIMPLE_MODES
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("change", "word"),
    [(add_attribute, "extra"), (replace, "offset"), (remove, "w")],
    ids=["create", "replace", "remove"],
)
def test_changed_data_attributes_are_refused(mode, name, change, word):
    model = Weighted()
    if name == "fori_loop" and change is replace:  # the array is carried
        assert float(CALLS[name](change, model, mode).offset) == 3.0
    else:
        with pytest.raises(ValueError, match=rf"{name}(.|\n)*{word}"):
            CALLS[name](change, model, mode)
    assert sorted(vars(model)) == sorted(vars(Weighted()))
    assert float(model.offset) == 1.0


@SIMPLE_MODES
@pytest.mark.parametrize("name", CALLS)
def test_changed_static_attributes_stay_inside_with_a_warning(mode, name):
    def change(model):
        model.kind = "other"

    model = Weighted()
    with pytest.warns(UserWarning, match=rf"{name}(.|\n)*kind"):
        CALLS[name](change, model, mode)
    assert model.kind == "plain"


def test_a_loop_refuses_what_would_change_the_carry():
    def change(model):
        model.kind = "other"

    model = Weighted()
    with pytest.raises(ValueError, match="changed its structure"):
        CALLS["fori_loop"](change, model, UPDATES)
    assert model.kind == "plain"
