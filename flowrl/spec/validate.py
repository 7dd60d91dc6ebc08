"""Pydantic errors as `Problem` values at the exact key or value; the rest of the data stays usable.

Offending values are dropped and the data is validated again, so that one mistake does not hide the others, and what is
right can be checked further.
"""

from __future__ import annotations

import typing
from collections.abc import Collection, Iterable, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Protocol, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from flowrl.errors import Place, Problem, closest
from flowrl.model import SettingError
from flowrl.spec.facts import Said, belongs_elsewhere, missing_key, unknown_key, wrong_value
from flowrl.spec.scalars import number
from flowrl.spec.strict import validated
from flowrl.spec.tree import Path_


class Locator(Protocol):
    """Where the value at a path of the document was written, or its key."""

    def __call__(self, path: Path_, key: bool = False) -> Place: ...


class Repaired(NamedTuple):
    """An instance of what is right in the data, the problems, and the paths of what was dropped."""

    instance: Any
    problems: list[Problem]
    broken: frozenset[Path_]


def repair(
    model: type[BaseModel],
    data: Mapping[str, Any],
    place: Locator,
    path: Path_ = (),
    *,
    known: Iterable[str] = (),
    homes: Mapping[str, str] | None = None,
    broken: Collection[Path_] = (),
    stand_ins: Mapping[Path_, Any] | None = None,
) -> Repaired:
    """An instance of `model` from data that stands at `path` of the document, the problems, and what was dropped.

    With problems, the instance holds the class defaults where values were refused; it is None where that is not
    possible. `known` are keys that may stand beside those of the model, for the nearest name of an unknown key;
    `homes` says of a key of other sections where it belongs. Nothing is reported at paths that are `broken` already.
    `stand_ins` gives values for required keys that are missing, so that a document without them can be checked further.
    """
    try:
        return Repaired(validated(model, data), [], frozenset(broken))
    except ValidationError:
        pass  # told below, one by one
    work = _Repair(model, data, path, place, tuple(known), homes or {}, broken, stand_ins or {})
    instance = work.run()
    return Repaired(instance, work.problems, frozenset(work.broken))


class _Repair:
    """Validates, reports and drops until what is left is right. Paths in here start at the data."""

    def __init__(
        self, model: type[BaseModel], data: Mapping[str, Any], path: Path_, place: Locator,
        known: tuple[str, ...], homes: Mapping[str, str], broken: Iterable[Path_], stand_ins: Mapping[Path_, Any],
    ) -> None:  # fmt: skip
        self.model, self.path, self.place, self.known, self.homes = model, path, place, known, homes
        self.data: Any = _copy(data)
        self.stand_ins = stand_ins
        self.problems: list[Problem] = []
        self.broken: set[Path_] = set()
        self.above: set[Path_] = set()
        """What holds something broken."""
        for one in broken:
            self.mark(one)

    def mark(self, path: Path_) -> None:
        self.broken.add(path)
        self.above.update(path[:length] for length in range(len(path)))

    def run(self) -> BaseModel | None:
        while self.data is not None:
            try:
                return validated(self.model, self.data)
            except ValidationError as error:
                self.handle(error.errors(include_url=False))
        return None

    def handle(self, errors: list[ErrorDetails]) -> None:
        found: dict[Path_, list[ErrorDetails]] = {}
        for error in errors:
            found.setdefault(self.at_last_written(_real_path(error, self.data), error), []).append(error)
        found = {path: group for path, group in found.items() if not self.made_tuple(path, group)}
        # The branches of a union report at the value and inside it; what is inside says more.
        outer = {path[:length] for path in found for length in range(len(path))}
        inner = {path: group for path, group in found.items() if path not in outer}
        for path, group in inner.items():
            if near := self.misspelt(path, group):
                self.mark(self.path + path[:-1] + (near,))
        for path, group in inner.items():
            self.report(path, group)
        for path, group in sorted(inner.items(), key=lambda one: len(one[0]), reverse=True):
            self.drop(path, group[0]["type"])

    def at_last_written(self, path: Path_, error: ErrorDetails) -> Path_:
        """The path of values that do not go together, led on to the one that was written last."""
        cause, section = error.get("ctx", {}).get("error"), _value_at(self.data, path)
        if not isinstance(cause, SettingError) or not isinstance(section, dict):
            return path
        there = [(*path, key) for key in cause.keys if key in section]
        return max(there, key=lambda one: self.place(self.path + one).layer, default=path)

    def made_tuple(self, path: Path_, errors: list[ErrorDetails]) -> bool:
        """Whether a list stood where a tuple is asked for; YAML has no other way to write one, so it becomes one."""
        parent = _value_at(self.data, path[:-1]) if path else None
        if not isinstance(parent, (dict, list)) or all(error["type"] != "tuple_type" for error in errors):
            return False
        value = _value_at(self.data, path)
        if isinstance(value, list):
            _put(parent, path[-1], tuple(value))
        return isinstance(value, list)

    def report(self, path: Path_, errors: list[ErrorDetails]) -> None:
        full = self.path + path
        # What was dropped is reported already, and what depends on it may only look wrong.
        if full in self.above or any(full[:length] in self.broken for length in range(len(full) + 1)):
            return
        cause = errors[0].get("ctx", {}).get("error")
        if isinstance(cause, SettingError):
            section = full[:-1] if path and path[-1] in cause.keys else full
            if any((*section, key) in self.broken for key in cause.keys):
                return
        at_key = errors[0]["type"] in _AT_KEY or errors[0]["loc"][-1:] == ("[key]",) or not path
        missing = errors[0]["type"] in _MISSING
        where = (*full[:-1], *filter(None, [self.instead(path)])) if missing else full
        said = self.said(path, full, errors)
        self.problems.append(Problem(said.code, self.place(where, key=at_key), said.fact, said.fix))

    def said(self, path: Path_, full: Path_, errors: list[ErrorDetails]) -> Said:
        kind = errors[0]["type"]
        if kind in _MISSING:
            return self.missing(path, full)
        if kind == "extra_forbidden":
            return unknown_key(full, self.keys(path), self.homes)
        value = path[-1] if _is_key(errors[0]) else _value_at(self.data, path)
        return wrong_value([dict(error) for error in errors], full, value, self.default(path))

    def keys(self, path: Path_) -> set[str]:
        """The keys that may stand beside the one at `path`."""
        section = _model_at(self.model, path[:-1], self.data)
        return set(section.model_fields if section else ()) | set(self.known if len(path) == 1 else ())

    def misspelt(self, path: Path_, errors: list[ErrorDetails]) -> str:
        """The absent key that an unknown one stands for: that it is missing need not be said."""
        if errors[0]["type"] != "extra_forbidden":
            return ""
        key, known = str(path[-1]), self.keys(path)
        absent = known - set(_value_at(self.data, path[:-1]) or ())
        return "" if belongs_elsewhere(key, known, self.homes) else closest(key, absent)

    def instead(self, path: Path_) -> str:
        """The key that was written for the missing one at `path`, in a section that takes any key."""
        section, there = _model_at(self.model, path[:-1], self.data), _value_at(self.data, path[:-1])
        if section is None or section.model_config.get("extra") != "allow":
            return ""
        return closest(str(path[-1]), set(there) - set(section.model_fields))

    def missing(self, path: Path_, full: Path_) -> Said:
        if wrong := self.instead(path):
            return unknown_key((*full[:-1], wrong), {str(path[-1])}, {})
        section = _model_at(self.model, path[:-1], self.data)
        field = section.model_fields.get(str(path[-1])) if section else None
        return missing_key(full, field is not None and type(None) in get_args(field.annotation))

    def default(self, path: Path_) -> str:
        """The default of the key at `path` in YAML; empty where it has none or a long one."""
        section = _model_at(self.model, path[:-1], self.data) if path else None
        field = section.model_fields.get(str(path[-1])) if section else None
        value = field.default if field else None
        return value if isinstance(value, str) else number(value) if isinstance(value, (bool, int, float)) else ""

    def drop(self, path: Path_, kind: str = "") -> None:
        """Take out the value at `path`, or, for a missing one, put its stand-in or take out what lacks it."""
        if kind != "extra_forbidden":
            # Nothing depends on a key that nobody knows.
            self.mark(self.path + path)
        missing = kind in _MISSING
        if not path or (missing and len(path) == 1 and path not in self.stand_ins):
            self.data = None
            return
        parent = _value_at(self.data, path[:-1])
        if missing and path in self.stand_ins:
            _put(parent, path[-1], _copy(self.stand_ins[path]))
        elif missing or isinstance(parent, (list, tuple)):
            self.drop(path[:-1])
        elif isinstance(parent, dict):
            parent.pop(path[-1], None)


_MISSING = frozenset({"missing", "missing_key", "union_tag_not_found"})
_AT_KEY = _MISSING | {"extra_forbidden"}


def _is_key(error: ErrorDetails) -> bool:
    return error["loc"][-1:] == ("[key]",)


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _copy(item) for name, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def _real_path(error: ErrorDetails, data: Any) -> Path_:
    """The location without the labels of union members, which are no keys of the data."""
    path: list[str | int] = []
    last = len(error["loc"]) - 1
    for position, part in enumerate(error["loc"]):
        if isinstance(data, dict) and part in data:
            data = data[str(part)]
        elif isinstance(data, (list, tuple)) and isinstance(part, int) and part < len(data):
            data = data[part]
        elif not (position == last and error["type"] == "missing"):
            continue
        path.append(part)
    if error["type"] in ("union_tag_not_found", "union_tag_invalid"):
        path.append(str(error["ctx"]["discriminator"]).strip("'"))
    if error["type"] == "missing_key":
        path.append(str(error["ctx"]["key"]))
    return tuple(path)


def _value_at(data: Any, path: Path_) -> Any:
    """The value, or None where the way to it has been dropped."""
    for part in path:
        if isinstance(data, dict):
            data = data.get(str(part))
        else:
            data = (
                data[part] if isinstance(data, (list, tuple)) and isinstance(part, int) and part < len(data) else None
            )
    return data


def _put(container: Any, part: str | int, value: Any) -> None:
    container[part] = value


def _model_at(annotation: Any, path: Path_, data: Any) -> type[BaseModel] | None:
    """The model that describes the data at `path`."""
    origin = get_origin(annotation)
    if origin is list and isinstance(data, dict):
        return _model_at(get_args(annotation)[0], path, data)  # one instead of a list of one
    if origin is Annotated:
        return _model_at(get_args(annotation)[0], path, data)
    if origin in (Union, UnionType):
        members = [member for member in get_args(annotation) if _fits(member, data)]
        return _model_at(members[0], path, data) if members else None
    is_model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    if not path:
        return annotation if is_model else None
    inner = data[path[0]]
    if is_model:
        field = annotation.model_fields.get(str(path[0]))
        return _model_at(field.annotation, path[1:], inner) if field is not None else None
    arguments = get_args(annotation)
    return _model_at(arguments[-1], path[1:], inner) if arguments else None


def _fits(member: Any, data: Any) -> bool:
    """Whether a member of a union is meant: a list for a list, a model whose tag is the one given for a mapping."""
    if get_origin(member) is Annotated:
        return _fits(get_args(member)[0], data)
    if get_origin(member) in (Union, UnionType):
        return any(_fits(inner, data) for inner in get_args(member))
    if get_origin(member) is Literal:
        return data in get_args(member)
    if isinstance(member, type) and issubclass(member, BaseModel):
        tags = {n: get_args(f.annotation) for n, f in member.model_fields.items() if n in ("type", "mode")}
        return isinstance(data, dict) and all(data.get(name) in allowed for name, allowed in tags.items())
    return isinstance(data, typing.get_origin(member) or (member if isinstance(member, type) else ()))
