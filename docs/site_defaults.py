"""Extension of griffe: the API reference shows the default of a field instead of the call that declares it."""

from griffe import Attribute, ExprCall, Extension


class FieldDefaults(Extension):
    """Replace the value `option(default, ...)` of a field of a dataclass by its default."""

    def on_attribute_instance(self, *, attr: Attribute, **kwargs) -> None:
        if isinstance(attr.value, ExprCall) and str(attr.value.function) == "option":
            attr.value = attr.value.arguments[0]
