import inspect

import pytest

from cupyrec.embedding import MemoryStore, StatePart, Store


def test_the_interface_is_fixed():
    assert Store.__abstractmethods__ == {
        "__len__", "nbytes", "load", "find", "find_or_insert", "places", "read", "update", "delete",
        "keys", "table_counts", "new_counts", "set_state", "clear", "to", "export", "export_rows",
        "import_rows",
    }  # fmt: skip
    with pytest.raises(TypeError, match="abstract"):
        Store()


@pytest.mark.parametrize("name", sorted(Store.__abstractmethods__ - {"nbytes", "load", "__len__"}))
def test_a_tier_keeps_to_its_signatures(name):
    rule, tier = (inspect.signature(getattr(cls, name)) for cls in (Store, MemoryStore))
    assert list(tier.parameters) == list(rule.parameters)
    assert tier.return_annotation == rule.return_annotation


def test_a_state_part_compares_by_value():
    assert StatePart("m", 4, 0.0) == StatePart("m", 4, 0.0) != StatePart("m", 4, 0.5)
