# SPDX-License-Identifier: Apache-2.0
"""What every submodule of a PyTorch model puts out, in a file that `compare` reads.

Copy this file to where the model runs; it needs torch and safetensors, nothing else.

    with recorded(model, "outputs.safetensors"):
        loss_of(model(inputs)).backward()  # or without gradients

An output is called by the name of its module in `named_modules()`, that of the model
itself `__call__`. A second call is `name#1`, an item of a tuple or dict `name.0` or
`name.key`, a gradient `name@grad`; the order of the calls is in the file's metadata.
As a program, `python torch_hooks.py FOLDER` makes a small convolutional network, and
writes its weights, inputs and outputs.
"""

import collections
import contextlib
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import torch  # pyright: ignore[reportMissingImports] - only this script needs it
from safetensors.torch import save_file


@contextlib.contextmanager
def recorded(model: Any, path: str | pathlib.Path) -> Iterator[dict[str, Any]]:
    """Records a run of a model, and the gradients if there is a backward pass.

    The file is written at the end, unless an error came first. Inside, the outputs are
    in the dict that the context gives.
    """
    found: dict[str, Any] = {}
    calls: collections.Counter[str] = collections.Counter()

    def keep(name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[name] = value.detach().clone().contiguous()
            if value.requires_grad:
                value.register_hook(lambda grad: keep(f"{name}@grad", grad))
        elif isinstance(value, dict):
            for key, item in value.items():
                keep(f"{name}.{key}", item)
        elif isinstance(value, tuple | list):
            for number, item in enumerate(value):
                keep(f"{name}.{number}", item)

    def hook_for(name: str) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            number = calls[name]
            calls[name] += 1
            keep(f"{name}#{number}" if number else name, output)

        return hook

    handles = [
        module.register_forward_hook(hook_for(name or "__call__"))
        for name, module in model.named_modules()
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
    tensors = {name: value.cpu() for name, value in found.items()}
    save_file(tensors, path, {"treetap.order": json.dumps(list(found))})


# A small network.


class Net(torch.nn.Module):
    """Convolutions, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.norm = torch.nn.GroupNorm(2, 8, eps=1e-5)
        self.down = torch.nn.Conv2d(8, 8, 2, stride=2)
        self.shared = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 5)

    def forward(self, images: Any) -> Any:
        """Scores of five classes."""
        x = torch.relu(self.norm(self.stem(images)))
        x = torch.relu(self.down(x)).mean(dim=(2, 3))
        x = x + torch.relu(self.shared(x))
        x = x + torch.relu(self.shared(x))
        return self.head(x)


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model, images = Net(), torch.randn(2, 3, 6, 6)
    with recorded(model, folder / "outputs.safetensors"):
        model(images).logsumexp(dim=-1).sum().backward()
    save_file(model.state_dict(), folder / "model.safetensors")
    save_file({"images": images}, folder / "inputs.safetensors")


if __name__ == "__main__":
    main()
