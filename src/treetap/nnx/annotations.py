# SPDX-License-Identifier: Apache-2.0
"""Names of types, as flax and NNX have them: for annotations, which nobody checks.

Programs import them from `flax.typing`, or from the NNX module that uses them. Most are
`Any`: an annotation says no more here than its name does.
"""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax

Array = Any
ArrayPytree = Any
Axes = Any
Axis = int | None
AxisIndex = int
AxisName = str
Collection = Any
ConvGeneralDilatedT = Callable[..., Any]
DotGeneralT = Callable[..., Any]
Dtype = Any
DtypeLikeInexact = Any
EinsumT = Callable[..., Any]
Index = int
Initializer = Callable[..., Any]
IsLeafCallable = Callable[[tuple[Any, ...], Mapping[Any, Any]], bool]
Key = Hashable
KeyPath = tuple[Hashable, ...]
LaxPadding = Any
Leaf = Any
LogicalNames = Any
LogicalRules = Any
OutShardingType = Any
Output = Any
PRNGKey = jax.Array
PaddingLike = Any
Path = str
PathParts = tuple[Hashable, ...]
PrecisionLike = Any
Prefix = Any
PromoteDtypeFn = Callable[..., Any]
Shape = Any
Sharding = Any
Size = int | tuple[int, ...]
Specs = Any
StateMapping = Mapping[Any, Any]
VariableDict = Any

# Of filters and states.
FilterLiteral = Any
HasTag = Any
ellipsis = Any
ExtractValueFn = Callable[[Any], Any]
SetValueFn = Callable[[Any, Any], Any]

# Of random streams.
AxesValue = Any
Counts = list[int]
KeylessInitializer = Callable[..., Any]
RngValue = Any
SplitPattern = Any
