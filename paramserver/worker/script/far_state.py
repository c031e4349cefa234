"""``optimizer.state`` of a prepared optimizer: it is on the servers, so it is read there, and cannot be written to."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping
from typing import Any

from torch import Tensor

from paramserver import errors


class FarState(Mapping[Tensor, dict[str, Any]]):
    """Reads with each access. ``fetch`` gives the state by parameter; a parameter without state has an empty one."""

    def __init__(self, fetch: Callable[[], Mapping[Tensor, dict[str, Any]]]) -> None:
        self._fetch = fetch

    def __getitem__(self, parameter: Tensor) -> dict[str, Any]:
        return self._fetch().get(parameter, {})

    def get(self, parameter: Tensor, default: Any = None) -> Any:
        """As of a dict."""
        return self._fetch().get(parameter, default)

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._fetch()

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._fetch())

    def __len__(self) -> int:
        return len(self._fetch())

    def items(self) -> ItemsView[Tensor, dict[str, Any]]:
        """As of a dict, read once."""
        return self._fetch().items()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self._fetch()),)

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise lost()

    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = _refuse


def lost() -> errors.ModelError:
    """The refusal of a change that the servers would not see."""
    return errors.ModelError(
        "the script changes optimizer.state, which is a copy of the servers' state here, so the change would be lost: "
        "change it before ctx.prepare, or change optimizer.state_dict() and give it to ctx.load(optimizer=...) in "
        "every worker"
    )
