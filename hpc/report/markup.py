"""HTML as values: what is no `Markup` yet is text, and is escaped. Pure; runs on the login node."""

from collections.abc import Iterable
from html import escape


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, /, *children: str | None, **attributes: str | None) -> Markup:
    """An element. `class_` is the attribute class, `aria_label` is aria-label; children and attributes may be None."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{written}>{join(children)}</{name}>")


def void(name: str, /, **attributes: str) -> Markup:
    """An element that has no end, such as img."""
    return Markup(tag(name, **attributes).removesuffix(f"</{name}>"))


def join(children: Iterable[str | None]) -> Markup:
    """Several elements or texts, one after the other."""
    return Markup("".join(as_markup(child) for child in children if child is not None))


def as_markup(text: str) -> Markup:
    """The text itself if it is HTML, else escaped."""
    return text if isinstance(text, Markup) else Markup(escape(text))
