"""A function's parameters as a type: arguments are checked and become JSON before they are pushed.

The arguments are a JSON object by parameter name. They are encoded and then decoded with the types
of the function's annotations, so that the worker will be able to decode them.
"""

import inspect
from collections.abc import Callable
from typing import Any, Final, get_type_hints

import msgspec
from msgspec import UNSET, UnsetType

from penstock.tasks.errors import TaskError

_encode: Final = msgspec.json.Encoder().encode
_EMPTY: Final = inspect.Parameter.empty
# A value of just this type, once encoded, is decoded as it without an error.
_CERTAIN: Final = frozenset({int, str, bool})


class Arguments:
    """Checks, encodes and decodes the arguments of one function."""

    def __init__(self, task: str, function: Callable[..., Any]) -> None:
        """Reads the signature. Raises TaskError for a type that JSON cannot hold."""
        self._task = task
        self._signature = inspect.signature(function)
        self._parameters = list(self._signature.parameters.values())
        self.names = tuple(self._signature.parameters)
        kinds = {parameter.kind for parameter in self._parameters}
        self._is_plain = kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD}
        try:
            hints = get_type_hints(function, include_extras=True)
            types = tuple(hints.get(name) for name in self.names)
            # The types of arguments that need no check, because they are those of the parameters.
            self._certain = types if _CERTAIN.issuperset(types) else None
            self._decode = self._decoder(hints, ())
            # For a task in a chain: the result of the task before it becomes the first argument.
            self._decode_rest = self._decoder(hints, self.names[:1])
            # For a call with all parameters in order: a struct is encoded as a dict of them is, and
            # made in less time.
            self._row = msgspec.defstruct(f"{task}_row", self.names) if self._is_plain else None
            returned = hints.get("return", Any)
            self.result = msgspec.json.Decoder(Any if returned is None else returned)
        except (TypeError, NameError) as error:
            raise TaskError(
                f"task {task!r}: its parameters cannot be checked: {error}; annotate them with "
                "types that JSON can hold, such as int, str, list[int], datetime or a dataclass"
            ) from None

    def _decoder(self, hints: dict[str, Any], without: tuple[str, ...]) -> Callable[[Any], Any]:
        fields: list[Any] = []
        for parameter in self._parameters:
            kind: Any = hints.get(parameter.name, Any)
            if parameter.name in without:
                continue
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                fields.append((parameter.name, list[kind], []))
            elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
                fields.append((parameter.name, dict[str, kind], {}))
            elif parameter.default is _EMPTY:
                fields.append((parameter.name, kind))
            else:
                fields.append(
                    (parameter.name, kind | UnsetType if kind is not Any else kind, UNSET)
                )
        struct = msgspec.defstruct(
            f"{self._task}_arguments", fields, kw_only=True, forbid_unknown_fields=True
        )
        return msgspec.json.Decoder(struct).decode

    def encode(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        """The arguments of a call as JSON. Raises TaskError, naming the argument."""
        if kwargs or self._row is None or len(args) != len(self.names):
            return self._checked(self._named(self._signature, args, kwargs), self._decode)
        is_certain = tuple(map(type, args)) == self._certain
        return self._checked(self._row(*args), None if is_certain else self._decode)

    def encode_rest(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        """The same for a call whose first argument is added later. Raises TaskError."""
        if not self._parameters or self._parameters[0].kind is not (
            inspect.Parameter.POSITIONAL_OR_KEYWORD
        ):
            raise TaskError(
                f"{self._task}: has no first parameter with a name, so it cannot get the result of "
                "the task before it"
            )
        signature = self._signature.replace(parameters=self._parameters[1:])
        return self._checked(self._named(signature, args, kwargs), self._decode_rest)

    def _named(
        self, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        try:
            return signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TaskError(f"{self._task}: {error}") from None

    def _checked(self, named: Any, decode: Callable[[bytes], Any] | None) -> bytes:
        """The arguments as JSON, which `decode` decodes if it is given. Raises TaskError."""
        try:
            encoded = _encode(named)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise TaskError(f"{self._task}: an argument cannot become JSON: {error}") from None
        if decode is None:
            return encoded
        try:
            decode(encoded)
        except msgspec.ValidationError as error:
            raise TaskError(f"{self._task}: {_plain(error)}") from None
        return encoded

    def decode(self, encoded: msgspec.Raw | bytes) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments for a call of the function. Raises TaskError."""
        try:
            found = self._decode(encoded)
        except msgspec.MsgspecError as error:
            raise TaskError(f"{self._task}: {_plain(error)}") from None
        values = msgspec.structs.astuple(found)
        if self._is_plain and UNSET not in values:
            return values, {}
        return self._spread(values)

    def _spread(self, values: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        by_name = False
        for parameter, value in zip(self._parameters, values, strict=True):
            if value is UNSET:
                # The function's default is used; the arguments behind it must be passed by name.
                by_name = True
                continue
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                args += value
            elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
                kwargs |= value
            elif parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
                args.append(value)
            elif parameter.kind is inspect.Parameter.KEYWORD_ONLY or by_name:
                kwargs[parameter.name] = value
            else:
                args.append(value)
        return tuple(args), kwargs


def with_first(rest: msgspec.Raw, name: str, first: bytes) -> msgspec.Raw:
    """The arguments of a call with its first one added, whose name and JSON are given."""
    start = b"{" + _encode(name) + b":" + first
    body = bytes(rest)
    return msgspec.Raw(start + (b"}" if body == b"{}" else b"," + body[1:]))


def _plain(error: Exception) -> str:
    """The text of an error of msgspec, with the argument's name in front."""
    what, at, path = str(error).partition(" - at `$.")
    what = what.replace("`", "")
    if at:
        return f"argument {path.rstrip('`')}: {what[0].lower()}{what[1:]}"
    return what[0].lower() + what[1:] if what else str(error)
