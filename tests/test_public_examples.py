"""What packages offer to their users shows an example."""

import importlib
import re
from collections.abc import Callable

from test_structure import ROOT, modules


def undocumented(function: Callable) -> list[str]:
    """Public functions explain themselves and show an example, which runs as a doctest."""
    text = function.__doc__ or ""
    return (
        [] if re.search(r"^ *Examples\n *-+\n(.*\n)* *>>> ", text, re.MULTILINE) else ["no example"]
    )


def test_public_functions_have_examples() -> None:
    complaints = []
    for name in (n for n in modules("cupyrec") if (ROOT / n.replace(".", "/")).is_dir()):
        package = importlib.import_module(name)
        for public in getattr(package, "__all__", ()):
            value = getattr(package, public)
            ours = getattr(value, "__module__", "").startswith("cupyrec")
            if ours and callable(value) and not isinstance(value, type):
                complaints += [f"{name}.{public}: {c}" for c in undocumented(value)]
    assert not complaints, "\n".join(complaints)


def test_undocumented() -> None:
    def silent() -> None: ...

    def told() -> None:
        """Do nothing.

        Examples
        --------
        See the class.
        """

    def shown() -> None:
        """Do nothing.

        Examples
        --------
        Nothing comes back:

        >>> shown()
        """

    assert [undocumented(f) for f in (silent, told, shown)] == [["no example"], ["no example"], []]
