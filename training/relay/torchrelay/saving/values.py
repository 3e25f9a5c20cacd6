"""Splits a state into its tensors and a value for JSON, and joins them again. Runs on every rank.

In the value, a JSON object with one key that begins with `$` stands for what JSON lacks: a tensor, by its name, a
tuple, a dict with keys that are no texts, or any other object, as torch saves it. No pickled code is ever run.
"""

import base64
import io
import random
from collections.abc import Callable, Mapping
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from .tensor_files import has_name, is_sharded

if TYPE_CHECKING:
    from torch import Tensor

_TENSOR, _TUPLE, _ITEMS, _TORCH = "$tensor", "$tuple", "$items", "$torch"
_PLAIN = {bool, int, float, str, type(None)}


def split(name: str, value: Any, tensors: dict[str, "Tensor"]) -> Any:  # noqa: PLR0911  # one for each kind
    """Return a state as a value for JSON, and add its tensors to `tensors`, with names that begin with `name`.

    Raises TypeError if the state holds an object that could be saved but not restored.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, str):
        return str(value)  # such as torch.__version__, which is of a class of its own
    if isinstance(value, dict):
        if all(type(key) is str and key[:1] != "$" for key in value):
            return {key: split(f"{name}/{key}", each, tensors) for key, each in value.items()}
        return {_ITEMS: [[split("", key, {}), split(f"{name}/{key}", each, tensors)] for key, each in value.items()]}
    if type(value) in {list, tuple}:
        values = [split(f"{name}/{at}", each, tensors) for at, each in enumerate(value)]
        return values if type(value) is list else {_TUPLE: values}
    if _has_memory_of_its_own(value):
        while name in tensors:  # {"a/b": ...} and {"a": {"b": ...}}
            name += "+"
        tensors[name] = value
        return {_TENSOR: name}
    data = serialized(value)
    try:
        deserialized(data)
    except UnpicklingError as error:
        raise TypeError(
            f"state({name.partition('/')[0]}=...): its state_dict() holds more than tensors, numbers and texts, so it "
            f"could not be restored: {error}"
        ) from error
    return {_TORCH: base64.b64encode(data).decode()}


def join(value: Any, tensor_of: Callable[[str], "Tensor"]) -> Any:  # noqa: PLR0911  # one for each kind
    """Return the state that `split` made into a value; `tensor_of` returns a tensor by its name."""
    if type(value) is list:
        return [join(each, tensor_of) for each in value]
    if type(value) is not dict:
        return value
    if _TENSOR in value:
        return tensor_of(value[_TENSOR])
    if _TUPLE in value:
        return tuple(join(each, tensor_of) for each in value[_TUPLE])
    if _ITEMS in value:
        return {join(key, tensor_of): join(each, tensor_of) for key, each in value[_ITEMS]}
    if _TORCH in value:
        return deserialized(base64.b64decode(value[_TORCH]))
    return {key: join(each, tensor_of) for key, each in value.items()}


def _has_memory_of_its_own(value: Any) -> bool:
    """Return whether a value is a tensor, whole or sharded, that a file of tensors can hold."""
    import torch

    if not isinstance(value, torch.Tensor):
        return False
    is_dense = type(value) in {torch.Tensor, torch.nn.Parameter} and value.layout == torch.strided
    return is_sharded(value) or (is_dense and not value.is_nested and has_name(value.dtype))


def serialized(content: Any) -> bytes:
    """Return the content as bytes that `deserialized` can read."""
    import torch

    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def deserialized(data: bytes) -> Any:
    """Return the content that `serialized` made into bytes. Pickled code is not run, but raises UnpicklingError."""
    import torch

    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def uses_gpu() -> bool:
    """Return whether this rank computes on a GPU."""
    import torch

    return torch.cuda.is_initialized()  # type: ignore[no-untyped-call,no-any-return]  # torch's own


def random_states() -> dict[str, Any]:
    """Return the states of this rank's random number generators: torch's (CPU and GPU) and Python's."""
    import torch

    version, internal, gauss = random.getstate()
    # As a tensor, because each snapshot serializes the state: 625 numbers of their own would take milliseconds.
    python = version, torch.tensor(internal), gauss
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": python}
    if uses_gpu():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def restore_random(states: Mapping[str, Any]) -> None:
    """Restore the random number generators to states from `random_states`."""
    import torch

    torch.set_rng_state(states["torch"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(torch.as_tensor(internal).tolist()), gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
