# SPDX-License-Identifier: Apache-2.0
"""Layers, a family a file: what a model is built of.

Signatures, attribute names, shapes, initial values and the order of random keys are
those of NNX, so a model gets the same parameters from the same seed.

What all layers share comes first. `parameters` checks arguments, makes parameters and
keeps options; `dtypes` brings inputs and parameters to the dtype to compute in.
`initializers` are the public starting values. All layers work alike. `__init__` names
its arguments and hands them on as `locals()`, so that what is done with many of them is
written once: it checks them, makes the parameters in the order in which NNX draws their
keys, and keeps the options as static attributes. `__call__` checks the inputs,
promotes, computes. The families:

- `activations`: the one activation with a parameter.
- `linear`: linear maps, and the base they share with `convolution`; `adapters` put maps
  of low rank beside them, `embedding` looks vectors up in a table.
- `normalization`: moments, and the layers that divide by them.
- `dropout`: random zeros, and where layers get keys from.
- `attention`: the function and its masks; `rotary`: positions as rotations, and the
  function with them; `decoding`: one position with a cache of those before;
  `multihead`: the layer around all.
- `cells`: one step in time; `recurrence`: cells run over sequences.
- `pooling`: windows without parameters.
- `reparametrization`: layers that run another with weights made from its own.

The root, `_train` and all folders after it may import this; layers import nothing
beyond `_transforms`.
"""
